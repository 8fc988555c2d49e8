// Sums over a row and RMSNorm, one definition for every instruction set and every kernel.
//
// A row is summed in 32 chains (element i goes to chain i % 32), the chains in a fixed tree. A kernel
// that fuses the norm includes this file, so fusing changes no bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd_math.h"

namespace outrider {
namespace OUTRIDER_ISA {

namespace norm {

// Chains 0..31 to one: 32 -> 16 -> 8 -> 4 -> 2 -> 1, always first half plus second half.
inline float fold(float* chain) {
  for (int half = 16; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) chain[i] = chain[i] + chain[i + half];
  return chain[0];
}

}  // namespace norm

// sum of x[i] * x[i]
inline float sum_of_squares(const float* x, int64_t n) {
  alignas(64) float chain[32] = {};
  int64_t i = 0;
#if defined(__AVX2__) && defined(__FMA__)
  __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
  for (; i + 32 <= n; i += 32) {
    const __m256 xa = _mm256_loadu_ps(x + i), xb = _mm256_loadu_ps(x + i + 8);
    const __m256 xc = _mm256_loadu_ps(x + i + 16), xd = _mm256_loadu_ps(x + i + 24);
    a = _mm256_fmadd_ps(xa, xa, a);
    b = _mm256_fmadd_ps(xb, xb, b);
    c = _mm256_fmadd_ps(xc, xc, c);
    d = _mm256_fmadd_ps(xd, xd, d);
  }
  _mm256_store_ps(chain, a);
  _mm256_store_ps(chain + 8, b);
  _mm256_store_ps(chain + 16, c);
  _mm256_store_ps(chain + 24, d);
#else
  for (; i + 32 <= n; i += 32)
    for (int j = 0; j < 32; ++j) chain[j] = math::fma(x[i + j], x[i + j], chain[j]);
#endif
  for (int j = 0; i < n; ++i, ++j) chain[j] = math::fma(x[i], x[i], chain[j]);
  return norm::fold(chain);
}

// sum of x[i]
inline float sum(const float* x, int64_t n) {
  alignas(64) float chain[32] = {};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    for (int j = 0; j < 32; ++j) chain[j] = chain[j] + x[i + j];
  for (int j = 0; i < n; ++i, ++j) chain[j] = chain[j] + x[i];
  return norm::fold(chain);
}

// What RMSNorm multiplies a row by.
inline float rms_scale(const float* x, int64_t n, float eps) {
  return 1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps);
}

// out[i] = (x[i] * scale) * weight[i]; out may be x.
inline void scale_by_weight(float* out, const float* x, const float* weight, float scale, int64_t n) {
  int64_t i = 0;
#if defined(__AVX2__) && defined(__FMA__)
  const __m256 s = _mm256_set1_ps(scale);
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i,
                     _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), s), _mm256_loadu_ps(weight + i)));
#endif
  for (; i < n; ++i) out[i] = (x[i] * scale) * weight[i];
}

// out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]; out may be x.
inline void rms_norm(float* out, const float* x, const float* weight, float eps, int64_t n) {
  scale_by_weight(out, x, weight, rms_scale(x, n, eps), n);
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
