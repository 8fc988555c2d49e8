// The ops between the matrix products, row by row.
//
// All are collective (every thread of the team, same arguments) and end with a barrier. An output row
// is a function of the same row of the inputs; `out` may be an input of the same shape, else they must
// not overlap. Strides are in floats.
#pragma once

#include <cstdint>

#include "attention.h"
#include "gemm.h"
#include "thread_pool.h"

namespace outrider {

struct Rows {
  float* data = nullptr;
  int64_t stride = 0;
  float* row(int64_t r) const { return data + r * stride; }
};

// out[r] = table[ids[r]]
void embedding(Team& team, const PackedWeight& table, const int32_t* ids, int64_t rows, Rows out);
// out[r] = x[index[r]], `width` floats each
void gather_rows(Team& team, Rows x, const int32_t* index, int64_t rows, int64_t width, Rows out);
// RMSNorm over each of `heads` parts of `width` floats; `weight` [width] serves every part.
void rms_norm(Team& team, Rows x, const float* weight, float eps, int64_t rows, int heads, int64_t width, Rows out);
// (x - mean) / sqrt(var + eps) * weight + bias; bias may be null
void layer_norm(Team& team, Rows x, const float* weight, const float* bias, float eps, int64_t rows, int64_t width,
                Rows out);
// Rotates each of `heads` heads of `head_dim` floats by positions[r]; dimensions past rotary_dim pass through.
void rope(Team& team, Rows x, const RopeTable& table, const int32_t* positions, int64_t rows, int heads,
          int64_t head_dim, Rows out);
// silu(gate) * up, gelu(gate) * up, a + b
void silu_mul(Team& team, Rows gate, Rows up, int64_t rows, int64_t width, Rows out);
void gelu_mul(Team& team, Rows gate, Rows up, int64_t rows, int64_t width, Rows out);
void add(Team& team, Rows a, Rows b, int64_t rows, int64_t width, Rows out);

// One row each; csrc/kernels/elementwise.cpp.
struct ElementwiseKernels {
  void (*rms_norm)(float* out, const float* x, const float* weight, float eps, int64_t n);
  void (*layer_norm)(float* out, const float* x, const float* weight, const float* bias, float eps, int64_t n);
  void (*rope_head)(float* x, const float* cos, const float* sin, int64_t half, bool interleaved);
  void (*silu_mul)(float* out, const float* gate, const float* up, int64_t n);
  void (*gelu_mul)(float* out, const float* gate, const float* up, int64_t n);
  void (*add)(float* out, const float* a, const float* b, int64_t n);
};

}  // namespace outrider
