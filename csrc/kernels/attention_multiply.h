// The micro-kernels of attention: rows of floats times keys or values, every element one chain of fma.
#pragma once

#include <type_traits>

#include "kernels/attention_chunk.h"
#include "kernels/attention_tile.h"
#include "kernels/simd_wide.h"

namespace outrider {
namespace OUTRIDER_ISA {

// Registers of eight or sixteen floats: which, is a matter of speed.
struct Eight {
  using Vector = F8;
  static constexpr int kWidth = 8;
  template <class T>
  static F8 load(const T* p) { return load8(p); }
  static void store(float* p, F8 x) { store8(p, x); }
  static F8 splat(float x) { return splat8(x); }
};

struct Sixteen {
  using Vector = F16;
  static constexpr int kWidth = 16;
  template <class T>
  static F16 load(const T* p) { return load16(p); }
  static void store(float* p, F16 x) { store16(p, x); }
  static F16 splat(float x) { return splat16(x); }
};

// c[R][columns] += a[R][k] * b[k][columns], each element one chain over k; from zero when `kFromZero`. On the way
// it asks for the memory at `ahead`, `step` bytes a turn.
template <class T, int R, int kColumns, bool kFromZero>
__attribute__((noinline)) void multiply(const float* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t ldc,
                                        int k, const char* ahead, int64_t step) {
  using L = std::conditional_t<kHasWideRegisters && kColumns % 16 == 0, Sixteen, Eight>;
  using V = typename L::Vector;
  constexpr int kWidth = L::kWidth, NV = kColumns / kWidth;
  V acc[R][NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) acc[r][v] = kFromZero ? L::splat(0.0f) : L::load(c + r * ldc + kWidth * v);
  // The longer side of the tile is taken one by one, so that the registers hold the rest.
  for (int i = 0; i < k; ++i, b += ldb, ahead += step) {
    __builtin_prefetch(ahead, 0, 2);  // as far as L2: L1 can wait for fewer lines at a time
    if constexpr (NV > R) {
      V x[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) x[r] = L::splat(a[r * lda + i]);
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) {
        const V column = L::load(b + kWidth * v);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[r][v] = math::fma(x[r], column, acc[r][v]);
      }
    } else {
      V column[NV];
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) column[v] = L::load(b + kWidth * v);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const V x = L::splat(a[r * lda + i]);
#pragma GCC unroll 16
        for (int v = 0; v < NV; ++v) acc[r][v] = math::fma(x, column[v], acc[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) L::store(c + r * ldc + kWidth * v, acc[r][v]);
}

// The same for a number of rows that is known at run time: up to kRowBlock, over 32 columns up to kWideRows.
template <class T, int NV, bool kFromZero, int R = NV <= 2 ? kRowBlock : kWideRows>
inline void multiply_rows(int rows, const float* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t ldc,
                          int k, Fetch& fetch) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_rows<T, NV, kFromZero, R - 1>(rows, a, lda, b, ldb, c, ldc, k, fetch);
  }
  multiply<T, R, 8 * NV, kFromZero>(a, lda, b, ldb, c, ldc, k, fetch.take(k), fetch.step);
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
