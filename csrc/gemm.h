// Packed weights and the linear op.
//
// The law of this file: element (row, column) of a result is a function of that input row and
// that weight row alone. The reduction over K is in one fixed order whatever the number of rows
// or threads; threads divide the output columns, never K.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "thread_pool.h"

namespace outrider {

// How the numbers of a weight are held after packing. Quantised kinds have groups of 32 inputs
// (larger groups repeat their scale) with fp16 scale and, where `has_min`, an fp16 minimum:
// w = scale * q + min.
enum class WeightKind { int4, int8, f16, bf16, f32 };

class PackedWeight {
 public:
  int64_t n() const;  // output features
  int64_t k() const;  // input features
  WeightKind kind() const;
  int64_t nbytes() const;
  void dequantize_row(int64_t row, float* out) const;  // k floats, exactly what linear multiplies by

  struct Impl;
  explicit PackedWeight(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  const Impl& impl() const { return *impl_; }

 private:
  friend void settle(const std::vector<PackedWeight>& weights);
  std::shared_ptr<Impl> impl_;
};

// `format` is one of q4_0 q4_1 q5_0 q5_1 q8_0 (GGUF blocks of 32, row-major) f16 bf16 f32.
PackedWeight pack(const std::string& format, const uint8_t* data, int64_t n, int64_t k);
// Quantises fp32 [n, k]. bits 4 or 8; group 32, 64, 128 or 0 (one scale an output channel);
// with_min: asymmetric.
PackedWeight quantize(const float* data, int64_t n, int64_t k, int bits, int group, bool with_min);
// Rows of several weights, one after the other (fused q, k, v).
PackedWeight concat(const std::vector<PackedWeight>& parts);
// Rows of gate and up side by side, for Epilogue::silu_mul / gelu_mul: n = 2 * gate.n(). To callers its rows
// are gate's, then up's, as concat's would be; only the memory is interleaved.
PackedWeight interleave(const PackedWeight& gate, const PackedWeight& up);

// Moves weights into one region of large pages, one after the other in the order given: the order of use, so that
// the end of one product already fetches the beginning of the next. While nothing else uses them.
void settle(const std::vector<PackedWeight>& weights);

enum class Epilogue {
  store,     // out[r, c] = y
  add,       // out[r, c] += y        (residual)
  silu_mul,  // weight is interleave(gate, up): out[r, c] = silu(gate) * up, n/2 columns
  gelu_mul,  // the same with tanh-approximated gelu
};

struct LinearArgs {
  const PackedWeight* weight = nullptr;
  const float* x = nullptr;  // [*, k], row r at x + r * x_stride
  int64_t x_stride = 0;
  int64_t rows = 0;
  const int32_t* row_index = nullptr;  // not null: row r of the result is made from x row row_index[r]
  const float* norm_weight = nullptr;  // not null: RMSNorm(x, norm_weight, norm_eps) goes in
  float norm_eps = 0;
  const float* bias = nullptr;  // [n] or null; added before the epilogue (for *_mul: gate's, then up's)
  Epilogue epilogue = Epilogue::store;
  float* out = nullptr;  // [rows, n or n/2], apart from x
  int64_t out_stride = 0;
  const PackedWeight* next = nullptr;  // what the team will multiply by after this, or null: a hint to fetch it early
};

// Memory that linear works in, for the team (prepared rows) and for each thread.
struct LinearScratch {
  std::vector<uint8_t> shared;
  std::vector<std::vector<uint8_t>> per_thread;
  void reserve(int64_t max_rows, int64_t max_k, int threads);
};

// Throws std::invalid_argument when epilogue and weight do not fit together. linear does not look.
void check_linear(const LinearArgs& args);

// Collective: every thread of the team calls it with the same arguments. Returns when the result is there.
void linear(Team& team, const LinearArgs& args, LinearScratch& scratch);

}  // namespace outrider
