// Quantising a row of activations with AVX2: eight groups at a time, so that what is found out about a group is one
// lane of a vector. The same bits as the plain functions in gemm_prologue.h. Values that are not finite give any
// integers: the row's unit carries them on.
#pragma once

#include <immintrin.h>

#include "../gemm_impl.h"

namespace outrider {
namespace OUTRIDER_ISA {
namespace gemm {

// Lane g of the result: op over the lanes of v[g].
template <class Op>
inline __m256i across(const __m256i (&v)[8], Op op) {
  __m256i quarter[4], half[2];
  for (int i = 0; i < 4; ++i)
    quarter[i] = op(_mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 2; ++i)
    half[i] = op(_mm256_unpacklo_epi64(quarter[2 * i], quarter[2 * i + 1]),
                 _mm256_unpackhi_epi64(quarter[2 * i], quarter[2 * i + 1]));
  return op(_mm256_permute2x128_si256(half[0], half[1], 0x20), _mm256_permute2x128_si256(half[0], half[1], 0x31));
}

inline __m256i max32(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
inline __m256i add32(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }

// Absolute maxima of groups of 32, as bits (NaN is above infinity), in tops[0 .. blocks rounded up to 8); gives the
// largest.
inline float group_tops(const float* x, int64_t blocks, int32_t* tops) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i all = _mm256_setzero_si256();
  for (int64_t b = 0; b < blocks; b += 8) {
    __m256i top[8];
    for (int g = 0; g < 8; ++g) {
      const __m256i* p = reinterpret_cast<const __m256i*>(x + (b + g < blocks ? b + g : blocks - 1) * kBlock);
      const __m256i first = max32(_mm256_and_si256(_mm256_loadu_si256(p), magnitude),
                                  _mm256_and_si256(_mm256_loadu_si256(p + 1), magnitude));
      top[g] = max32(first, max32(_mm256_and_si256(_mm256_loadu_si256(p + 2), magnitude),
                                  _mm256_and_si256(_mm256_loadu_si256(p + 3), magnitude)));
    }
    const __m256i eight = across(top, max32);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(tops + b), eight);
    all = max32(all, eight);
  }
  all = max32(all, _mm256_permute2x128_si256(all, all, 1));
  all = max32(all, _mm256_shuffle_epi32(all, 0x4e));
  all = max32(all, _mm256_shuffle_epi32(all, 0xb1));
  return from_bits(_mm256_extract_epi32(all, 0));
}

inline __m256i rounded(const float* x, __m256 inverse) {
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
}

// Fills one lane of a quad and gives the row's unit. `tops` has room for a number a block, rounded up to 8.
inline float quantise_q8(const float* x, int32_t* tops, int64_t blocks, Q8Block* quad, int lane) {
  const float row_top = group_tops(x, blocks, tops), unit = row_top / (kQ8Levels * kMultiplierMax);
  const bool zero = row_top < kTinyRow;
  const __m256 relative = _mm256_set1_ps(kMultiplierMax / row_top), one = _mm256_set1_ps(1.0f);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int64_t b = 0; b < blocks; b += 8) {
    alignas(32) float inverses[8], factors[8], sums[8];
    alignas(32) int32_t multipliers[8];
    __m256 multiplier = _mm256_ceil_ps(_mm256_mul_ps(_mm256_loadu_ps(reinterpret_cast<float*>(tops + b)), relative));
    // max gives its second operand when the first is NaN
    multiplier = _mm256_min_ps(_mm256_max_ps(multiplier, one), _mm256_set1_ps(kMultiplierMax));
    if (zero) multiplier = one;
    __m256 inverse = _mm256_div_ps(one, _mm256_mul_ps(_mm256_set1_ps(unit), multiplier));
    if (zero) inverse = _mm256_setzero_ps();
    const __m256i integers = _mm256_cvtps_epi32(multiplier);
    _mm256_store_ps(inverses, inverse);
    _mm256_store_ps(factors, multiplier);
    _mm256_store_si256(reinterpret_cast<__m256i*>(multipliers), _mm256_mullo_epi32(integers, _mm256_set1_epi32(65537)));
    const int count = blocks - b < 8 ? int(blocks - b) : 8;
    __m256i sum[8];
    for (int g = 0; g < count; ++g) {
      const float* p = x + (b + g) * kBlock;
      const __m256 scale = _mm256_broadcast_ss(inverses + g);
      const __m256i low = _mm256_packs_epi32(rounded(p, scale), rounded(p + 8, scale));
      const __m256i high = _mm256_packs_epi32(rounded(p + 16, scale), rounded(p + 24, scale));
      const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(quad[b + g].q[lane]), bytes);
      sum[g] = _mm256_madd_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(1));
    }
    for (int g = count; g < 8; ++g) sum[g] = _mm256_setzero_si256();
    _mm256_store_ps(sums, _mm256_cvtepi32_ps(_mm256_mullo_epi32(across(sum, add32), integers)));
    for (int g = 0; g < count; ++g) {
      std::memcpy(quad[b + g].multiplier[lane], multipliers + g, 4);
      quad[b + g].factor[lane] = factors[g];
      quad[b + g].sum[lane] = sums[g];
    }
  }
  return zero ? 0.0f : unit;
}

// Lanes 0 and 2 of a, then of b, in each half.
inline __m256i even_lanes(__m256i a, __m256i b) {
  return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0x88));
}

inline float quantise_pairs(const float* x, int32_t* tops, int64_t blocks, PairBlock* quad, int lane) {
  const float row_top = group_tops(x, blocks, tops);
  const bool zero = row_top < kTinyRow;
  const __m256 inverse = _mm256_set1_ps(zero ? 0.0f : kPairLevels * kPairMultiplierMax / row_top);
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  const __m256 step = _mm256_set1_ps(1.0f / kPairLevels), one = _mm256_set1_ps(1.0f);
  const __m256 most = _mm256_set1_ps(kPairMultiplierMax);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int64_t b = 0; b < blocks; ++b) {
    __m256i q[4], multipliers[4], sum = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
      const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + b * kBlock + 8 * i), inverse);
      const __m256 size = _mm256_and_ps(v, magnitude);
      const __m256 larger = _mm256_max_ps(size, _mm256_permute_ps(size, 0xb1));
      const __m256 multiplier = _mm256_min_ps(_mm256_max_ps(_mm256_ceil_ps(_mm256_mul_ps(larger, step)), one), most);
      q[i] = _mm256_cvtps_epi32(_mm256_div_ps(v, multiplier));
      multipliers[i] = _mm256_cvtps_epi32(multiplier);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(q[i], multipliers[i]));  // both fit 16 bits
    }
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(quad[b].q[lane]), _mm256_permutevar8x32_epi32(bytes, order));
    const __m256i words = _mm256_packs_epi32(even_lanes(multipliers[0], multipliers[1]),
                                             even_lanes(multipliers[2], multipliers[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(quad[b].multiplier[lane]),
                        _mm256_permutevar8x32_epi32(words, order));
    sum = _mm256_add_epi32(sum, _mm256_permute2x128_si256(sum, sum, 1));
    sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0x4e));
    sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0xb1));
    const int32_t total = _mm256_extract_epi32(sum, 0);
    quad[b].offset[lane] = -128 * total;
    quad[b].sum[lane] = float(total);
  }
  return zero ? 0.0f : row_top / (kPairLevels * kPairMultiplierMax);
}

}  // namespace gemm
}  // namespace OUTRIDER_ISA
}  // namespace outrider
