// The micro-kernels of attention: rows of floats times keys or values, every element one chain of fma.
#pragma once

#include "kernels/attention_chunk.h"
#include "kernels/simd.h"

namespace outrider {
namespace OUTRIDER_ISA {

// c[R][8 NV] += a[R][k] * b[k][8 NV], each element one chain over k; from zero when `kFromZero`. On the way it
// asks for the memory at `ahead`, `step` bytes a turn.
template <class T, int R, int NV, bool kFromZero>
__attribute__((noinline)) void multiply(const float* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t ldc,
                                        int k, const char* ahead, int64_t step) {
  F8 acc[R][NV];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = kFromZero ? splat8(0.0f) : load8(c + r * ldc + 8 * v);
  // The longer side of the tile is taken one by one, so that 16 registers hold the rest.
  for (int i = 0; i < k; ++i, b += ldb, ahead += step) {
    __builtin_prefetch(ahead, 0, 3);
    if constexpr (NV > R) {
      F8 x[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) x[r] = splat8(a[r * lda + i]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        const F8 column = load8(b + 8 * v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r][v] = math::fma(x[r], column, acc[r][v]);
      }
    } else {
      F8 column[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) column[v] = load8(b + 8 * v);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F8 x = splat8(a[r * lda + i]);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[r][v] = math::fma(x, column[v], acc[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) store8(c + r * ldc + 8 * v, acc[r][v]);
}

template <class T, int NV, bool kFromZero>
inline void multiply_rows(int rows, const float* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t ldc,
                          int k, Fetch& fetch) {
  const char* ahead = fetch.take(k);
  if constexpr (NV <= 2) {
    if (rows == 4) return multiply<T, 4, NV, kFromZero>(a, lda, b, ldb, c, ldc, k, ahead, fetch.step);
    if (rows == 5) return multiply<T, 5, NV, kFromZero>(a, lda, b, ldb, c, ldc, k, ahead, fetch.step);
    if (rows == 6) return multiply<T, 6, NV, kFromZero>(a, lda, b, ldb, c, ldc, k, ahead, fetch.step);
  }
  if (rows == 3) return multiply<T, 3, NV, kFromZero>(a, lda, b, ldb, c, ldc, k, ahead, fetch.step);
  if (rows == 2) return multiply<T, 2, NV, kFromZero>(a, lda, b, ldb, c, ldc, k, ahead, fetch.step);
  multiply<T, 1, NV, kFromZero>(a, lda, b, ldb, c, ldc, k, ahead, fetch.step);
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
