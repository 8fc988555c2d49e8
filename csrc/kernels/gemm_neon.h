// Block kernels of the linear op for ARM with dot products. Four rows of a tile are the lanes of one register. See
// gemm_generic.h for what they compute.
#pragma once

#include <arm_neon.h>

#include "../gemm_impl.h"

namespace outrider {
namespace OUTRIDER_ISA {
namespace gemm {

#define OUTRIDER_INLINE inline __attribute__((always_inline))

constexpr int kWide = kQuad;
constexpr int64_t kAhead = 2048;
template <Pass pass, int Bytes>
OUTRIDER_INLINE void prefetch(const uint8_t* p) {
  constexpr int half = (Bytes + 127) / 128 * 64;
  constexpr int begin = pass == Pass::second ? half : 0;
  constexpr int end = pass == Pass::later ? 0 : pass == Pass::first ? half : Bytes;
#pragma GCC unroll 32
  for (int i = begin; i < end; i += 64) __builtin_prefetch(p + i, 0, 3);
}

OUTRIDER_INLINE float32x4_t load_half4(const uint8_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
}

// sum[t][g] += four weights of each of four rows times the four activations in lane j of x[t].
template <int T, int J>
OUTRIDER_INLINE void add_dots(int32x4_t (&sum)[T][4], const int8x16_t (&w)[4], const int8x16_t (&x)[T]) {
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) sum[t][g] = vdotq_laneq_s32(sum[t][g], w[g], x[t], J);
}

template <bool Min>
struct Int4 {
  using Block = Q8Block;
  static constexpr int64_t unpacked_bytes = 0;  // unpacking costs three operations for 32 weights

  template <int T, int J>
  static OUTRIDER_INLINE void eight_inputs(const uint8_t* w, int32x4_t (&sum)[T][4], const int8x16_t (&first)[T],
                                           const int8x16_t (&second)[T]) {
    int8x16_t low[4], high[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const uint8x16_t both = vld1q_u8(w + 64 * J + 16 * g);
      low[g] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
      high[g] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
    }
    add_dots<T, J>(sum, low, first);
    add_dots<T, J>(sum, high, second);
  }

  template <int T, Pass pass>
  static OUTRIDER_INLINE void block(const uint8_t* w, const uint8_t* fetch, uint8_t*, const Block& x, float* acc) {
    prefetch<pass, Min ? 320 : 288>(fetch);
    int32x4_t sum[T][4];
    int8x16_t first[T], second[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      first[t] = vld1q_s8(x.q[t]), second[t] = vld1q_s8(x.q[t] + 16);
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) sum[t][g] = vdupq_n_s32(0);
    }
    eight_inputs<T, 0>(w, sum, first, second);
    eight_inputs<T, 1>(w, sum, first, second);
    eight_inputs<T, 2>(w, sum, first, second);
    eight_inputs<T, 3>(w, sum, first, second);
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const float32x4_t scale = load_half4(w + 256 + 8 * g);
      const float32x4_t minimum = Min ? load_half4(w + 288 + 8 * g) : vmulq_n_f32(scale, -8.0f);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        float* a = acc + t * kTileRows + 4 * g;
        const float32x4_t value = vcvtq_f32_s32(vmulq_n_s32(sum[t][g], x.multiplier[t][0]));
        vst1q_f32(a, vfmaq_n_f32(vfmaq_f32(vld1q_f32(a), value, scale), minimum, x.sum[t]));
      }
    }
  }
};

template <bool Min>
struct Int8 {
  using Block = PairBlock;
  static constexpr int64_t unpacked_bytes = 0;

  template <int T, int J>
  static OUTRIDER_INLINE void four_inputs(const uint8_t* w, int32x4_t (&sum)[T][4], const int8x16_t (&x)[T]) {
    int8x16_t q[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g)
      q[g] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + 64 * J + 16 * g), vdupq_n_u8(128)));
    add_dots<T, J>(sum, q, x);
  }

  // The block times one byte of each activation.
  template <int T>
  static OUTRIDER_INLINE void add_bytes(const uint8_t* w, int32x4_t (&sum)[T][4], const int8_t* const (&bytes)[T]) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      int8x16_t x[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) x[t] = vld1q_s8(bytes[t] + 16 * half);
      four_inputs<T, 0>(w + 256 * half, sum, x);
      four_inputs<T, 1>(w + 256 * half, sum, x);
      four_inputs<T, 2>(w + 256 * half, sum, x);
      four_inputs<T, 3>(w + 256 * half, sum, x);
    }
  }

  template <int T, Pass pass>
  static OUTRIDER_INLINE void block(const uint8_t* w, const uint8_t* fetch, uint8_t*, const Block& x, float* acc) {
    prefetch<pass, Min ? 576 : 544>(fetch);
    int32x4_t sum[T][4];
    const int8_t *high[T], *low[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      high[t] = x.q[t], low[t] = reinterpret_cast<const int8_t*>(x.multiplier[t]);
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) sum[t][g] = vdupq_n_s32(0);
    }
    add_bytes<T>(w, sum, high);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) sum[t][g] = vshlq_n_s32(sum[t][g], 8);
    add_bytes<T>(w, sum, low);
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const float32x4_t scale = load_half4(w + 512 + 8 * g);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        float* a = acc + t * kTileRows + 4 * g;
        float32x4_t v = vfmaq_f32(vld1q_f32(a), vcvtq_f32_s32(sum[t][g]), scale);
        if (Min) v = vfmaq_n_f32(v, load_half4(w + 544 + 8 * g), x.sum[t]);
        vst1q_f32(a, v);
      }
    }
  }
};

template <WeightKind Kind>
OUTRIDER_INLINE float32x4_t load_weights(const uint8_t* p, int64_t i) {
  if (Kind == WeightKind::f16) return load_half4(p + 2 * i);
  if (Kind == WeightKind::bf16)
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p + 2 * i)), 16));
  return vld1q_f32(reinterpret_cast<const float*>(p) + i);
}

template <WeightKind Kind>
struct Float {
  using Block = FloatBlock;
  static constexpr int64_t unpacked_bytes = 0;

  template <int T, Pass pass>
  static OUTRIDER_INLINE void block(const uint8_t* w, const uint8_t* fetch, uint8_t*, const Block& x, float* acc) {
    prefetch<pass, Kind == WeightKind::f32 ? 2048 : 1024>(fetch);
    float32x4_t sum[T][4];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) sum[t][g] = vld1q_f32(acc + t * kTileRows + 4 * g);
    for (int i = 0; i < kBlock; ++i) {
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) {
        const float32x4_t weights = load_weights<Kind>(w, i * kTileRows + 4 * g);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) sum[t][g] = vfmaq_n_f32(sum[t][g], weights, x.x[i][t]);
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) vst1q_f32(acc + t * kTileRows + 4 * g, sum[t][g]);
  }
};

}  // namespace gemm
}  // namespace OUTRIDER_ISA
}  // namespace outrider
