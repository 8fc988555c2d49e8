// exp, silu and gelu, one definition for every width.
//
// Each is a fixed sequence of IEEE operations, the same for a float, for 8 or 16 lanes and on every
// instruction set: a value never depends on the lane it sits in, on the tail it falls into or on the
// kernel that it is fused with. Included by files in csrc/kernels (inside the namespace of their
// instruction set).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
// GCC 12 takes its own _mm512_undefined_ps for a mistake.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace outrider {
namespace OUTRIDER_ISA {
namespace math {

// The few operations that the functions are made of, per vector type.
template <class V> V splat(float x);

template <> inline float splat<float>(float x) { return x; }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float sub(float a, float b) { return a - b; }
inline float add(float a, float b) { return a + b; }
inline float mul(float a, float b) { return a * b; }
inline float div(float a, float b) { return a / b; }
inline float clamp(float x, float low, float high) {  // NaN passes through
  x = x < low ? low : x;
  return x > high ? high : x;
}
inline float negate(float x) { return -x; }
// 2^n from the float 1.5 * 2^23 + n.
inline float power_of_two(float shifted) {
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = (bits << 23) + 0x3f800000u;
  std::memcpy(&shifted, &bits, 4);
  return shifted;
}
// y where x >= low, else 0; NaN in x keeps y.
inline float zero_below(float y, float x, float low) { return x < low ? 0.0f : y; }

#if defined(__AVX2__) && defined(__FMA__)
template <> inline __m256 splat<__m256>(float x) { return _mm256_set1_ps(x); }
inline __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256 sub(__m256 a, __m256 b) { return _mm256_sub_ps(a, b); }
inline __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
inline __m256 mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
inline __m256 div(__m256 a, __m256 b) { return _mm256_div_ps(a, b); }
inline __m256 clamp(__m256 x, __m256 low, __m256 high) { return _mm256_min_ps(high, _mm256_max_ps(low, x)); }
inline __m256 negate(__m256 x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }
inline __m256 power_of_two(__m256 shifted) {
  const __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(0x3f800000)));
}
inline __m256 zero_below(__m256 y, __m256 x, __m256 low) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, low, _CMP_LT_OQ), y);
}
#endif

#if defined(__AVX512F__)
template <> inline __m512 splat<__m512>(float x) { return _mm512_set1_ps(x); }
inline __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
inline __m512 sub(__m512 a, __m512 b) { return _mm512_sub_ps(a, b); }
inline __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
inline __m512 mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
inline __m512 div(__m512 a, __m512 b) { return _mm512_div_ps(a, b); }
inline __m512 clamp(__m512 x, __m512 low, __m512 high) { return _mm512_min_ps(high, _mm512_max_ps(low, x)); }
inline __m512 negate(__m512 x) {
  return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN)));
}
inline __m512 power_of_two(__m512 shifted) {
  const __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x3f800000)));
}
inline __m512 zero_below(__m512 y, __m512 x, __m512 low) {
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, low, _CMP_LT_OQ), _mm512_setzero_ps());
}
#endif

#if defined(__ARM_NEON)
template <> inline float32x4_t splat<float32x4_t>(float x) { return vdupq_n_f32(x); }
inline float32x4_t fma(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
inline float32x4_t sub(float32x4_t a, float32x4_t b) { return vsubq_f32(a, b); }
inline float32x4_t add(float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); }
inline float32x4_t mul(float32x4_t a, float32x4_t b) { return vmulq_f32(a, b); }
inline float32x4_t div(float32x4_t a, float32x4_t b) { return vdivq_f32(a, b); }
inline float32x4_t clamp(float32x4_t x, float32x4_t low, float32x4_t high) {
  return vminq_f32(high, vmaxq_f32(low, x));
}
inline float32x4_t negate(float32x4_t x) { return vnegq_f32(x); }
inline float32x4_t power_of_two(float32x4_t shifted) {
  const uint32x4_t bits = vshlq_n_u32(vreinterpretq_u32_f32(shifted), 23);
  return vreinterpretq_f32_u32(vaddq_u32(bits, vdupq_n_u32(0x3f800000u)));
}
inline float32x4_t zero_below(float32x4_t y, float32x4_t x, float32x4_t low) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, low)));
}
#endif

// e^x within 1 ulp; 0 below -87.33 (so for -inf), saturates at e^88.02; NaN stays NaN.
template <class V>
inline V exp(V x0) {
  const V low = splat<V>(-87.33f), shift = splat<V>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const V x = clamp(x0, low, splat<V>(88.02f));
  const V shifted = fma(x, splat<V>(1.44269504088896341f), shift);
  const V n = sub(shifted, shift);
  V r = fma(n, splat<V>(-0.693359375f), x);  // ln 2 in two parts
  r = fma(n, splat<V>(2.12194440e-4f), r);
  V p = splat<V>(1.9875691500e-4f);
  p = fma(p, r, splat<V>(1.3981999507e-3f));
  p = fma(p, r, splat<V>(8.3334519073e-3f));
  p = fma(p, r, splat<V>(4.1665795894e-2f));
  p = fma(p, r, splat<V>(1.6666665459e-1f));
  p = fma(p, r, splat<V>(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), splat<V>(1.0f));
  return zero_below(mul(p, power_of_two(shifted)), x0, low);
}

// x * sigmoid(x)
template <class V>
inline V silu(V x) {
  return div(x, add(splat<V>(1.0f), math::exp(negate(x))));
}

// gelu with the tanh approximation: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
template <class V>
inline V gelu(V x) {
  const V cubic = fma(mul(x, x), splat<V>(0.0713548162726f), splat<V>(1.59576912160573f));
  return div(x, add(splat<V>(1.0f), math::exp(negate(mul(x, cubic)))));
}

}  // namespace math
}  // namespace OUTRIDER_ISA
}  // namespace outrider
