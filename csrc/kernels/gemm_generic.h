// Block kernels of the linear op in plain C++: the definition that the others equal bit for bit.
#pragma once

#include "../gemm_impl.h"
#include "simd_math.h"

namespace outrider {
namespace OUTRIDER_ISA {
namespace gemm {

inline float load_half(const uint8_t* p) {
  uint16_t half;
  __builtin_memcpy(&half, p, 2);
  return half_to_float(half);
}

// acc[token][row] += scale * (multiplier * sum of q * w) + minimum * sum, for one block of a tile.
template <int T, bool Min>
inline void int4_block(const uint8_t* block, const Q8Block& x, float* acc) {
  const uint8_t* scales = block + 256;
  for (int r = 0; r < kTileRows; ++r) {
    const float scale = load_half(scales + 2 * r);
    const float minimum = Min ? load_half(scales + 32 + 2 * r) : -8.0f * scale;
    for (int t = 0; t < T; ++t) {
      int32_t sum = 0;
      for (int i = 0; i < 16; ++i) {
        const uint8_t byte = block[(i / 4 * kTileRows + r) * 4 + i % 4];
        sum += (byte & 15) * x.q[t][i] + (byte >> 4) * x.q[t][i + 16];
      }
      float& a = acc[t * kTileRows + r];
      a = math::fma(float(sum * x.multiplier[t][0]), scale, a);
      a = math::fma(x.sum[t], minimum, a);
    }
  }
}

template <int T, bool Min>
inline void int8_block(const uint8_t* block, const Q16Block& x, float* acc) {
  static constexpr int order[4] = {0, 2, 1, 3};
  const uint8_t* scales = block + 512;
  for (int r = 0; r < kTileRows; ++r) {
    const float scale = load_half(scales + 2 * r);
    for (int t = 0; t < T; ++t) {
      int32_t sum = x.offset[t];
      for (int i = 0; i < kBlock; ++i)
        sum += block[(i / 4 * kTileRows + r) * 4 + i % 4] * x.q[t][i / 4 * 4 + order[i % 4]];
      float& a = acc[t * kTileRows + r];
      a = math::fma(float(sum), scale, a);
      if (Min) a = math::fma(x.sum[t], load_half(scales + 32 + 2 * r), a);
    }
  }
}

template <WeightKind Kind>
inline float load_weight(const uint8_t* p, int64_t i) {
  if (Kind == WeightKind::f16) return load_half(p + 2 * i);
  uint16_t bits = 0;
  float value;
  if (Kind == WeightKind::bf16) {
    __builtin_memcpy(&bits, p + 2 * i, 2);
    return bfloat_to_float(bits);
  }
  __builtin_memcpy(&value, p + 4 * i, 4);
  return value;
}

template <int T, WeightKind Kind>
inline void float_block(const uint8_t* block, const FloatBlock& x, float* acc) {
  for (int64_t i = 0; i < kBlock; ++i)
    for (int64_t r = 0; r < kTileRows; ++r) {
      const float w = load_weight<Kind>(block, i * kTileRows + r);
      for (int t = 0; t < T; ++t) acc[t * kTileRows + r] = math::fma(w, x.x[i][t], acc[t * kTileRows + r]);
    }
}

}  // namespace gemm
}  // namespace OUTRIDER_ISA
}  // namespace outrider
