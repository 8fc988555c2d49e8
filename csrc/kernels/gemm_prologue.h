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

}  // namespace gemm
}  // namespace OUTRIDER_ISA
}  // namespace outrider

#if defined(__AVX2__) && defined(__FMA__)
#include "gemm_prologue_avx2.h"
#endif

namespace outrider {
namespace OUTRIDER_ISA {
namespace gemm {

#if !(defined(__AVX2__) && defined(__FMA__))

// Largest absolute value of 32, as bits; NaN counts as larger than infinity, so that it reaches the result.
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

// A multiplier in 1..most; 1 for NaN.
inline float clamped(float multiplier, float most) {
  return !(multiplier >= 1.0f) ? 1.0f : multiplier > most ? most : multiplier;
}

// Fills one lane of a quad and gives the row's unit. `tops` has room for a number a block.
inline float quantise_q8(const float* x, int32_t* tops, int64_t blocks, Q8Block* quad, int lane) {
  int32_t top = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    tops[b] = absolute_max(x + b * kBlock);
    top = tops[b] > top ? tops[b] : top;
  }
  const float row_top = from_bits(top), unit = row_top / (kQ8Levels * kMultiplierMax);
  const bool zero = row_top < kTinyRow;
  for (int64_t b = 0; b < blocks; ++b) {
    const float exact = std::ceil(from_bits(tops[b]) * (kMultiplierMax / row_top));
    const float multiplier = zero ? 1.0f : clamped(exact, kMultiplierMax);
    const float inverse = zero ? 0.0f : 1.0f / (unit * multiplier);
    int32_t sum = 0;
    for (int i = 0; i < kBlock; ++i) {
      const int32_t q = rounded(x[b * kBlock + i] * inverse, kQ8Levels);
      quad[b].q[lane][i] = int8_t(q);
      sum += q;
    }
    quad[b].multiplier[lane][0] = quad[b].multiplier[lane][1] = int16_t(multiplier);
    quad[b].factor[lane] = multiplier;
    quad[b].sum[lane] = float(sum * int32_t(multiplier));
  }
  return zero ? 0.0f : unit;
}

#if defined(OUTRIDER_ISA_neon)

inline void put_pair(PairBlock& block, int lane, int i, int32_t q0, int32_t q1, int32_t multiplier) {
  int8_t* low = reinterpret_cast<int8_t*>(block.multiplier[lane]);
  for (int32_t value : {q0 * multiplier, q1 * multiplier}) {
    low[i] = int8_t(value);
    block.q[lane][i++] = int8_t((value + 128) >> 8);
  }
}

#else

inline void put_pair(PairBlock& block, int lane, int i, int32_t q0, int32_t q1, int32_t multiplier) {
  block.q[lane][i] = int8_t(q0);
  block.q[lane][i + 1] = int8_t(q1);
  block.multiplier[lane][i / 2] = int16_t(multiplier);
}

#endif

inline float quantise_pairs(const float* x, int32_t* tops, int64_t blocks, PairBlock* quad, int lane) {
  int32_t top = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    tops[b] = absolute_max(x + b * kBlock);
    top = tops[b] > top ? tops[b] : top;
  }
  const float row_top = from_bits(top);
  const bool zero = row_top < kTinyRow;
  const float inverse = zero ? 0.0f : kPairLevels * kPairMultiplierMax / row_top;
  for (int64_t b = 0; b < blocks; ++b) {
    int32_t sum = 0;
    for (int i = 0; i < kBlock; i += 2) {
      const float first = x[b * kBlock + i] * inverse, second = x[b * kBlock + i + 1] * inverse;
      const float larger = std::fabs(first) > std::fabs(second) ? std::fabs(first) : std::fabs(second);
      const float multiplier = clamped(std::ceil(larger * (1.0f / kPairLevels)), kPairMultiplierMax);
      const int32_t q0 = rounded(first / multiplier, kPairLevels), q1 = rounded(second / multiplier, kPairLevels);
      put_pair(quad[b], lane, i, q0, q1, int32_t(multiplier));
      sum += (q0 + q1) * int32_t(multiplier);
    }
    quad[b].offset[lane] = -128 * sum;
    quad[b].sum[lane] = float(sum);
  }
  return zero ? 0.0f : row_top / (kPairLevels * kPairMultiplierMax);
}

#endif

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
  auto* tops = reinterpret_cast<int32_t*>(row.staging + blocks * kBlock);
  if (kind == WeightKind::int4) {
    *row.unit = quantise_q8(x, tops, blocks, static_cast<Q8Block*>(row.quad), row.lane);
  } else if (kind == WeightKind::int8) {
    *row.unit = quantise_pairs(x, tops, blocks, static_cast<PairBlock*>(row.quad), row.lane);
  } else {
    auto* quad = static_cast<FloatBlock*>(row.quad);
    for (int64_t i = 0; i < blocks * kBlock; ++i) quad[i / kBlock].x[i % kBlock][row.lane] = x[i];
    *row.unit = 1.0f;
  }
}

}  // namespace gemm
}  // namespace OUTRIDER_ISA
}  // namespace outrider
