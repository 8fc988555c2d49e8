// Eight floats at a time, the same way on every instruction set.
//
// F8 is one AVX register, two NEON registers or a compiler vector. Every function here is a fixed
// sequence of IEEE operations per lane; sums and maxima over lanes have one fixed order. On the generic
// instruction set `fma` of F8 is a multiplication and an addition: its results differ from those of the
// others in the last bit, and are as reproducible. Included by files in csrc/kernels.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/simd_math.h"

namespace outrider {
namespace OUTRIDER_ISA {

// Storage types of the cache.
struct Half { uint16_t bits; };
struct BFloat { uint16_t bits; };

constexpr float kMinusInfinity = -__builtin_inff();

inline int min_of(int a, int b) { return a < b ? a : b; }
inline int max_of(int a, int b) { return a > b ? a : b; }

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// The nearest bfloat16, ties to even; NaN stays NaN.
inline uint16_t bfloat_bits(float x) {
  const uint32_t bits = to_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

using F8 = __m256;

inline F8 load8(const float* p) { return _mm256_loadu_ps(p); }
inline F8 load8(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline F8 load8(const BFloat* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline void store8(float* p, F8 x) { _mm256_storeu_ps(p, x); }
inline void store8(Half* p, F8 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline F8 splat8(float x) { return _mm256_set1_ps(x); }
inline F8 max8(F8 a, F8 b) { return _mm256_max_ps(a, b); }
// Lane i of x where lo <= first + i < hi, else -inf.
inline F8 keep_inside(F8 x, int first, int lo, int hi) {
  const __m256i at = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), at),
                                             _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), at));
  return _mm256_blendv_ps(_mm256_set1_ps(kMinusInfinity), x, _mm256_castsi256_ps(inside));
}

#elif defined(__ARM_NEON)

namespace math {
struct F8 { float32x4_t lo, hi; };
}  // namespace math
using math::F8;

inline F8 load8(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline F8 load8(const Half* p) {
  const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
  return {vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))};
}
inline F8 load8(const BFloat* p) {
  const uint16x8_t b = vld1q_u16(reinterpret_cast<const uint16_t*>(p));
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(b), 16)),
          vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(b), 16))};
}
inline void store8(float* p, F8 x) {
  vst1q_f32(p, x.lo);
  vst1q_f32(p + 4, x.hi);
}
inline void store8(Half* p, F8 x) {
  const float16x8_t h = vcombine_f16(vcvt_f16_f32(x.lo), vcvt_f16_f32(x.hi));
  vst1q_u16(reinterpret_cast<uint16_t*>(p), vreinterpretq_u16_f16(h));
}
inline F8 splat8(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F8 max8(F8 a, F8 b) { return {vmaxq_f32(a.lo, b.lo), vmaxq_f32(a.hi, b.hi)}; }

namespace math {
template <> inline F8 splat<F8>(float x) { return splat8(x); }
inline F8 fma(F8 a, F8 b, F8 c) { return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)}; }
inline F8 sub(F8 a, F8 b) { return {sub(a.lo, b.lo), sub(a.hi, b.hi)}; }
inline F8 add(F8 a, F8 b) { return {add(a.lo, b.lo), add(a.hi, b.hi)}; }
inline F8 mul(F8 a, F8 b) { return {mul(a.lo, b.lo), mul(a.hi, b.hi)}; }
inline F8 clamp(F8 x, F8 low, F8 high) { return {clamp(x.lo, low.lo, high.lo), clamp(x.hi, low.hi, high.hi)}; }
inline F8 power_of_two(F8 x) { return {power_of_two(x.lo), power_of_two(x.hi)}; }
inline F8 zero_below(F8 y, F8 x, F8 low) { return {zero_below(y.lo, x.lo, low.lo), zero_below(y.hi, x.hi, low.hi)}; }
}  // namespace math

#else

typedef float Floats __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));

namespace math {
struct F8 { Floats v; };
}  // namespace math
using math::F8;

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, body = uint32_t(h & 0x7fff) << 13;
  if (body >= 0x0f800000u) return from_bits(sign | 0x7f800000u | body);  // infinity, NaN
  return from_bits(sign | to_bits(from_bits(body) * from_bits(0x77800000u)));  // times 2^112, exact
}

// The nearest half, ties to even; too large becomes infinity.
inline uint16_t half_bits(float x) {
  const uint32_t bits = to_bits(x), sign = (bits >> 16) & 0x8000, body = bits & 0x7fffffffu;
  if (body > 0x7f800000u) return uint16_t(sign | 0x7e00);
  if (body >= 0x477ff000u) return uint16_t(sign | 0x7c00);
  if (body < 0x38800000u) {  // subnormal half: adding 0.5 leaves multiples of 2^-24
    return uint16_t(sign | (to_bits(from_bits(body) + 0.5f) - 0x3f000000u));
  }
  return uint16_t(sign | ((body - 0x38000000u + 0xfffu + ((body >> 13) & 1)) >> 13));
}

inline F8 load8(const float* p) {
  F8 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline F8 load8(const Half* p) {
  F8 x;
  for (int i = 0; i < 8; ++i) x.v[i] = half_to_float(p[i].bits);
  return x;
}
inline F8 load8(const BFloat* p) {
  F8 x;
  for (int i = 0; i < 8; ++i) x.v[i] = from_bits(uint32_t(p[i].bits) << 16);
  return x;
}
inline void store8(float* p, F8 x) { std::memcpy(p, &x, sizeof x); }
inline void store8(Half* p, F8 x) {
  for (int i = 0; i < 8; ++i) p[i].bits = half_bits(x.v[i]);
}
inline F8 splat8(float x) { return {Floats{x, x, x, x, x, x, x, x}}; }
inline F8 max8(F8 a, F8 b) { return {a.v > b.v ? a.v : b.v}; }

namespace math {
template <> inline F8 splat<F8>(float x) { return splat8(x); }
inline F8 fma(F8 a, F8 b, F8 c) { return {a.v * b.v + c.v}; }
inline F8 sub(F8 a, F8 b) { return {a.v - b.v}; }
inline F8 add(F8 a, F8 b) { return {a.v + b.v}; }
inline F8 mul(F8 a, F8 b) { return {a.v * b.v}; }
inline F8 clamp(F8 x, F8 low, F8 high) {
  const Floats raised = x.v < low.v ? low.v : x.v;
  return {raised > high.v ? high.v : raised};
}
inline F8 power_of_two(F8 shifted) { return {Floats((Words(shifted.v) << 23) + 0x3f800000u)}; }
inline F8 zero_below(F8 y, F8 x, F8 low) { return {x.v < low.v ? Floats{} : y.v}; }
}  // namespace math

#endif

#if !defined(__AVX2__)
inline F8 keep_inside(F8 x, int first, int lo, int hi) {
  float lane[8];
  store8(lane, x);
  for (int i = 0; i < 8; ++i)
    if (first + i < lo || first + i >= hi) lane[i] = kMinusInfinity;
  return load8(lane);
}
#endif

inline void store8(BFloat* p, F8 x) {
  float lane[8];
  store8(lane, x);
  for (int i = 0; i < 8; ++i) p[i].bits = bfloat_bits(lane[i]);
}

#if defined(__AVX2__)

// ((0+4) + (2+6)) + ((1+5) + (3+7))
inline float sum_lanes(F8 x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

inline float max_lanes(F8 x) {
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

#else

inline float sum_lanes(F8 x) {
  float v[8];
  store8(v, x);
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

inline float max_lanes(F8 x) {
  float v[8];
  store8(v, x);
  for (int step = 4; step; step /= 2)
    for (int i = 0; i < step; ++i) v[i] = v[i + step] > v[i] ? v[i + step] : v[i];
  return v[0];
}

#endif

}  // namespace OUTRIDER_ISA
}  // namespace outrider
