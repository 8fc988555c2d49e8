// Sixteen floats at a time: one AVX-512 register, else two of eight. Lane by lane, and in the order of sums over
// lanes, the same as two F8, of which the first is the lower half.
#pragma once

#include "kernels/simd.h"

namespace outrider {
namespace OUTRIDER_ISA {

#if defined(__AVX512F__)

constexpr bool kHasWideRegisters = true;
using F16 = __m512;

inline F16 load16(const float* p) { return _mm512_loadu_ps(p); }
inline F16 load16(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F16 load16(const BFloat* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void store16(float* p, F16 x) { _mm512_storeu_ps(p, x); }
inline F16 splat16(float x) { return _mm512_set1_ps(x); }
inline F16 max16(F16 a, F16 b) { return _mm512_max_ps(a, b); }
// Lane i of x where lo <= first + i < hi, else -inf.
inline F16 keep_inside16(F16 x, int first, int lo, int hi) {
  const uint32_t below_hi = (1u << max_of(0, min_of(16, hi - first))) - 1;
  const uint32_t below_lo = (1u << max_of(0, min_of(16, lo - first))) - 1;
  return _mm512_mask_mov_ps(splat16(kMinusInfinity), __mmask16(below_hi & ~below_lo), x);
}
inline F16 exp16(F16 x) { return math::exp(x); }
inline F16 add16(F16 a, F16 b) { return math::add(a, b); }
inline F16 sub16(F16 a, F16 b) { return math::sub(a, b); }
inline F8 low_half(F16 x) { return _mm512_castps512_ps256(x); }
inline F8 high_half(F16 x) { return _mm512_extractf32x8_ps(x, 1); }

#else

constexpr bool kHasWideRegisters = false;
struct F16 { F8 low, high; };

template <class T>
inline F16 load16(const T* p) { return {load8(p), load8(p + 8)}; }
inline void store16(float* p, F16 x) {
  store8(p, x.low);
  store8(p + 8, x.high);
}
inline F16 splat16(float x) { return {splat8(x), splat8(x)}; }
inline F16 max16(F16 a, F16 b) { return {max8(a.low, b.low), max8(a.high, b.high)}; }
inline F16 keep_inside16(F16 x, int first, int lo, int hi) {
  return {keep_inside(x.low, first, lo, hi), keep_inside(x.high, first + 8, lo, hi)};
}
inline F16 exp16(F16 x) { return {math::exp(x.low), math::exp(x.high)}; }
inline F16 add16(F16 a, F16 b) { return {math::add(a.low, b.low), math::add(a.high, b.high)}; }
inline F16 sub16(F16 a, F16 b) { return {math::sub(a.low, b.low), math::sub(a.high, b.high)}; }
inline F8 low_half(F16 x) { return x.low; }
inline F8 high_half(F16 x) { return x.high; }

#endif

}  // namespace OUTRIDER_ISA
}  // namespace outrider
