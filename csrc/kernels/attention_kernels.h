// The part of attention that is compiled once per instruction set, and what csrc/attention.cpp asks of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"
#include "isa.h"

namespace outrider {

constexpr int kTileRows = 96;  // query rows x heads of a group that share one reading of keys and values

// Some rows of one request, and the chunks that one thread reduces for them with one kv head.
struct AttentionUnit {
  int64_t request = 0;
  int64_t row_begin = 0, row_end = 0;
  int kv_head = 0;
  int chunk_begin = 0, chunk_end = 0;
  bool append = false;        // first write the keys and values of the rows whose positions are in these chunks
  float* partials = nullptr;  // null: these are all chunks of the rows, and the result goes to `out`;
                              // else one partial a chunk is left here
};

// Floats of one partial of `rows` x heads: maxima, sums, weighted values.
inline int64_t partial_floats(int64_t rows, int head_dim) { return (rows + 7) / 8 * 16 + rows * head_dim; }

struct AttentionKernels {
  int64_t (*scratch_floats)(int rows, int head_dim, int panels);
  // Norm, RoPE and storing of the k and v of rows [row_begin, row_end), one kv head, where
  // first_position <= position < last_position.
  void (*append)(const AttentionBatch&, const AttentionArgs&, int64_t row_begin, int64_t row_end, int kv_head,
                 int64_t first_position, int64_t last_position, float* scratch);
  void (*attend)(const AttentionBatch&, const AttentionArgs&, const AttentionUnit&, float* scratch);
  // Folds the partials of all chunks of a unit, left to right, and writes the result to `out`.
  void (*merge)(const AttentionArgs&, const AttentionUnit&, float* scratch);
};

OUTRIDER_DECLARE_KERNELS(AttentionKernels, attention_kernels)

}  // namespace outrider
