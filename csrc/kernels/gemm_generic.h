// Block kernels of the linear op in plain C++: the definition that the others equal bit for bit.
#pragma once

#include "../gemm_impl.h"
#include "simd_math.h"

namespace outrider {
namespace OUTRIDER_ISA {
namespace gemm {

constexpr int kWide = kQuad;
constexpr int64_t kAhead = 0;  // nothing is fetched early

inline float load_half(const uint8_t* p) {
  uint16_t half;
  __builtin_memcpy(&half, p, 2);
  return half_to_float(half);
}

// acc[token][row] += multiplier * (sum of q * w) * scale, then += sum * minimum, for one block of a tile.
template <bool Min>
struct Int4 {
  using Block = Q8Block;
  static constexpr int64_t unpacked_bytes = 0;

  template <int T, Pass>
  static void block(const uint8_t* w, const uint8_t*, uint8_t*, const Block& x, float* acc) {
    for (int r = 0; r < kTileRows; ++r) {
      const float scale = load_half(w + 256 + 2 * r);
      const float minimum = Min ? load_half(w + 288 + 2 * r) : -8.0f * scale;
      for (int t = 0; t < T; ++t) {
        int32_t sum = 0;
        for (int i = 0; i < 16; ++i) {
          const uint8_t byte = w[(i / 4 * kTileRows + r) * 4 + i % 4];
          sum += (byte & 15) * x.q[t][i] + (byte >> 4) * x.q[t][i + 16];
        }
        float& a = acc[t * kTileRows + r];
        a = math::fma(float(sum * x.multiplier[t][0]), scale, a);
        a = math::fma(x.sum[t], minimum, a);
      }
    }
  }
};

template <bool Min>
struct Int8 {
  using Block = PairBlock;
  static constexpr int64_t unpacked_bytes = 0;

  template <int T, Pass>
  static void block(const uint8_t* w, const uint8_t*, uint8_t*, const Block& x, float* acc) {
    for (int r = 0; r < kTileRows; ++r) {
      const float scale = load_half(w + 512 + 2 * r);
      for (int t = 0; t < T; ++t) {
        int32_t sum = 0;
        for (int i = 0; i < kBlock; ++i)
          sum += (w[(i / 4 * kTileRows + r) * 4 + i % 4] - 128) * (x.q[t][i] * x.multiplier[t][i / 2]);
        float& a = acc[t * kTileRows + r];
        a = math::fma(float(sum), scale, a);
        if (Min) a = math::fma(x.sum[t], load_half(w + 544 + 2 * r), a);
      }
    }
  }
};

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

template <WeightKind Kind>
struct Float {
  using Block = FloatBlock;
  static constexpr int64_t unpacked_bytes = 0;

  template <int T, Pass>
  static void block(const uint8_t* w, const uint8_t*, uint8_t*, const Block& x, float* acc) {
    for (int64_t i = 0; i < kBlock; ++i)
      for (int64_t r = 0; r < kTileRows; ++r) {
        const float value = load_weight<Kind>(w, i * kTileRows + r);
        for (int t = 0; t < T; ++t) acc[t * kTileRows + r] = math::fma(value, x.x[i][t], acc[t * kTileRows + r]);
      }
  }
};

}  // namespace gemm
}  // namespace OUTRIDER_ISA
}  // namespace outrider
