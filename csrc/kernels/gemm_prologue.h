// From a row of fp32 (optionally through RMSNorm) to the integers that the block kernels take. The same bits on
// every instruction set.
#pragma once

#include <cmath>
#include <cstring>

#include "../gemm_impl.h"
#include "simd_norm.h"

namespace outrider {
namespace OUTRIDER_ISA {
namespace gemm {

inline float from_bits(int32_t bits) {
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// The multiplier of a group, and what its values are multiplied by to give q.
struct GroupScale {
  int32_t multiplier;
  float inverse;
};

inline GroupScale group_scale(float top, float row_top) {
  if (row_top < kTinyRow) return {1, 0.0f};
  const float exact = std::ceil(top * (kMultiplierMax / row_top));
  const float multiplier = !(exact >= 1.0f) ? 1.0f : exact > kMultiplierMax ? kMultiplierMax : exact;
  return {int32_t(multiplier), 1.0f / (row_top / (kQ8Levels * kMultiplierMax) * multiplier)};
}

#if defined(__AVX2__) && defined(__FMA__)

inline int32_t horizontal_max(__m256i v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtsi128_si32(m);
}

inline int32_t horizontal_sum(__m256i v) {
  __m128i m = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtsi128_si32(m);
}

// Largest absolute value of 32, as bits; NaN counts as larger than infinity, so that it reaches the result.
inline int32_t absolute_max(const float* x) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i top = _mm256_setzero_si256();
  for (int i = 0; i < kBlock; i += 8)
    top = _mm256_max_epi32(
        top, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), magnitude));
  return horizontal_max(top);
}

inline __m256i rounded(const float* x, __m256 inverse, __m256 limit) {
  const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x), inverse);
  // max and min give their second operand when one is NaN: NaN becomes -limit
  return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(v, _mm256_sub_ps(_mm256_setzero_ps(), limit)), limit));
}

// q[i] = round(x[i] * inverse); gives the sum of q.
inline int32_t quantise_group8(const float* x, float inverse, int8_t* q) {
  const __m256 scale = _mm256_set1_ps(inverse), limit = _mm256_set1_ps(kQ8Levels);
  const __m256i a = rounded(x, scale, limit), b = rounded(x + 8, scale, limit);
  const __m256i c = rounded(x + 16, scale, limit), d = rounded(x + 24, scale, limit);
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q),
                      _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  return horizontal_sum(_mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d)));
}

// The same to 16 bits, each four in the order 0, 2, 1, 3.
inline int32_t quantise_group16(const float* x, float inverse, int16_t* q) {
  const __m256 scale = _mm256_set1_ps(inverse), limit = _mm256_set1_ps(kQ16Levels);
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                         0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  __m256i sum = _mm256_setzero_si256();
  for (int i = 0; i < kBlock; i += 16) {
    const __m256i a = rounded(x + i, scale, limit), b = rounded(x + i + 8, scale, limit);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i), _mm256_shuffle_epi8(words, order));
    sum = _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
  }
  return horizontal_sum(sum);
}

#else

inline int32_t absolute_max(const float* x) {
  int32_t top = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  return top;
}

inline int32_t rounded(float x, float limit) {
  x = !(x > -limit) ? -limit : x;  // NaN, too
  return int32_t(std::lrint(x < limit ? x : limit));
}

inline int32_t quantise_group8(const float* x, float inverse, int8_t* q) {
  int32_t sum = 0;
  for (int i = 0; i < kBlock; ++i) {
    const int32_t v = rounded(x[i] * inverse, kQ8Levels);
    q[i] = int8_t(v);
    sum += v;
  }
  return sum;
}

inline int32_t quantise_group16(const float* x, float inverse, int16_t* q) {
  static constexpr int order[4] = {0, 2, 1, 3};
  int32_t sum = 0;
  for (int i = 0; i < kBlock; ++i) {
    const int32_t v = rounded(x[i] * inverse, kQ16Levels);
    q[i / 4 * 4 + order[i % 4]] = int16_t(v);
    sum += v;
  }
  return sum;
}

#endif

inline float quantise_q8(const float* x, int32_t* tops, int64_t blocks, Q8Block* quad, int lane) {
  int32_t top = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    tops[b] = absolute_max(x + b * kBlock);
    top = tops[b] > top ? tops[b] : top;
  }
  const float row_top = from_bits(top);
  for (int64_t b = 0; b < blocks; ++b) {
    const GroupScale scale = group_scale(from_bits(tops[b]), row_top);
    const int32_t sum = quantise_group8(x + b * kBlock, scale.inverse, quad[b].q[lane]);
    quad[b].multiplier[lane][0] = quad[b].multiplier[lane][1] = int16_t(scale.multiplier);
    quad[b].sum[lane] = float(sum * scale.multiplier);
  }
  return row_top < kTinyRow ? 0.0f : row_top / (kQ8Levels * kMultiplierMax);
}

inline float quantise_q16(const float* x, int64_t blocks, Q16Block* quad, int lane) {
  int32_t top = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int32_t t = absolute_max(x + b * kBlock);
    top = t > top ? t : top;
  }
  const float row_top = from_bits(top);
  const bool zero = row_top < kTinyRow;
  const float inverse = zero ? 0.0f : kQ16Levels / row_top;
  for (int64_t b = 0; b < blocks; ++b) {
    const int32_t sum = quantise_group16(x + b * kBlock, inverse, quad[b].q[lane]);
    quad[b].offset[lane] = -128 * sum;
    quad[b].sum[lane] = float(sum);
  }
  return zero ? 0.0f : row_top / kQ16Levels;
}

inline void prologue(WeightKind kind, const PrologueRow& row) {
  const int64_t blocks = (row.k + kBlock - 1) / kBlock;
  const float* x = row.x;
  if (row.norm_weight) {
    rms_norm(row.staging, x, row.norm_weight, row.norm_eps, row.k);
    x = row.staging;
  }
  if (row.k % kBlock) {  // zeros up to the end of the last block
    if (x != row.staging) std::memcpy(row.staging, x, size_t(row.k) * sizeof(float));
    for (int64_t i = row.k; i < blocks * kBlock; ++i) row.staging[i] = 0;
    x = row.staging;
  }
  if (kind == WeightKind::int4) {
    auto* tops = reinterpret_cast<int32_t*>(row.staging + blocks * kBlock);
    *row.unit = quantise_q8(x, tops, blocks, static_cast<Q8Block*>(row.quad), row.lane);
  } else if (kind == WeightKind::int8) {
    *row.unit = quantise_q16(x, blocks, static_cast<Q16Block*>(row.quad), row.lane);
  } else {
    auto* quad = static_cast<FloatBlock*>(row.quad);
    for (int64_t i = 0; i < blocks * kBlock; ++i) quad[i / kBlock].x[i % kBlock][row.lane] = x[i];
    *row.unit = 1.0f;
  }
}

}  // namespace gemm
}  // namespace OUTRIDER_ISA
}  // namespace outrider
