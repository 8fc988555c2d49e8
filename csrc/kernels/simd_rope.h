// RoPE of one head, one definition for every instruction set and every kernel that fuses it.
#pragma once

#include <cstdint>

#include "simd_math.h"

namespace outrider {
namespace OUTRIDER_ISA {

// (a, b) -> (a cos - b sin, b cos + a sin), each as fma of one rounded product.
template <class V>
inline void rotate(V& a, V& b, V cos, V sin) {
  const V first = math::fma(a, cos, math::negate(math::mul(b, sin)));
  const V second = math::fma(b, cos, math::mul(a, sin));
  a = first;
  b = second;
}

// Rotates x[0 .. 2 * half) in place; cos and sin have `half` entries, those of the row's position. Pairs are
// (i, i + half), or (2i, 2i + 1) when interleaved.
inline void rope_head(float* x, const float* cos, const float* sin, int64_t half, bool interleaved) {
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) rotate(x[2 * i], x[2 * i + 1], cos[i], sin[i]);
    return;
  }
  int64_t i = 0;
#if defined(__AVX2__) && defined(__FMA__)
  for (; i + 8 <= half; i += 8) {
    __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + half + i);
    rotate(a, b, _mm256_loadu_ps(cos + i), _mm256_loadu_ps(sin + i));
    _mm256_storeu_ps(x + i, a);
    _mm256_storeu_ps(x + half + i, b);
  }
#endif
  for (; i < half; ++i) rotate(x[i], x[half + i], cos[i], sin[i]);
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
