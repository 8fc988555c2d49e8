// Block kernels of the linear op for AVX2 + FMA + F16C. See gemm_generic.h for what they compute.
#pragma once

#include "gemm_x86.h"

namespace outrider {
namespace OUTRIDER_ISA {
namespace gemm {

#if defined(OUTRIDER_ISA_avxvnni)

// Four products of 4-bit weights and activations a 32-bit lane.
OUTRIDER_INLINE __m256i add_products(__m256i sum, __m256i w, __m256i q) { return _mm256_dpbusd_avx_epi32(sum, w, q); }
OUTRIDER_INLINE __m256i products(__m256i w, __m256i q) { return add_products(_mm256_setzero_si256(), w, q); }
// The sum of a block times its multiplier, rounded once: both are exact in fp32.
OUTRIDER_INLINE __m256 multiplied(__m256i sum, const Q8Block& x, int t) {
  return _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_broadcast_ss(x.factor + t));
}
// Pairs of 16-bit sums times their multipliers.
OUTRIDER_INLINE __m256i add_multiplied(__m256i sum, __m256i pairs, __m256i multipliers) {
  return _mm256_dpwssd_avx_epi32(sum, pairs, multipliers);
}

#else

// Two products a 16-bit lane: eight times two products of 4 and 8 bits fit.
OUTRIDER_INLINE __m256i products(__m256i w, __m256i q) { return _mm256_maddubs_epi16(w, q); }
OUTRIDER_INLINE __m256i add_products(__m256i sum, __m256i w, __m256i q) {
  return _mm256_add_epi16(sum, products(w, q));
}
OUTRIDER_INLINE __m256 multiplied(__m256i sum, const Q8Block& x, int t) {
  return _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, splat4(x.multiplier[t])));
}
OUTRIDER_INLINE __m256i add_multiplied(__m256i sum, __m256i pairs, __m256i multipliers) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, multipliers));
}

#endif

constexpr int kWide = kQuad;  // rows that a pass takes at most: their sums fill the registers

template <bool Min>
struct Int4 {
  using Block = Q8Block;
  static constexpr int64_t unpacked_bytes = 512 + 64 + 64;  // 16 registers of weights, scales, minimums

  template <int T, Pass pass>
  static OUTRIDER_INLINE void block(const uint8_t* w, const uint8_t* fetch, uint8_t* unpacked, const Block& x,
                                    float* acc) {
    const __m256i mask = _mm256_set1_epi8(15);
    prefetch<pass, Min ? 320 : 288>(fetch);
    __m256i sum[T][2];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        uint8_t* place = unpacked + 128 * j + 64 * half;
        __m256i a, b;
        if (is_unpacked(pass)) {
          a = load_bytes(place), b = load_bytes(place + 32);
        } else {
          a = load_bytes(w + 64 * j), b = load_bytes(w + 64 * j + 32);
          if (half) a = _mm256_srli_epi16(a, 4), b = _mm256_srli_epi16(b, 4);
          a = _mm256_and_si256(a, mask), b = _mm256_and_si256(b, mask);
          if (pass == Pass::first) store_bytes(place, a), store_bytes(place + 32, b);
        }
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const __m256i q = splat4(x.q[t] + 16 * half + 4 * j);
          if (j + half) {
            sum[t][0] = add_products(sum[t][0], a, q), sum[t][1] = add_products(sum[t][1], b, q);
          } else {
            sum[t][0] = products(a, q), sum[t][1] = products(b, q);
          }
          OUTRIDER_PIN(sum[t][0]);
          OUTRIDER_PIN(sum[t][1]);
        }
      }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      uint8_t* place = unpacked + 512 + 32 * h;
      __m256 scale, minimum;
      if (is_unpacked(pass)) {
        scale = load_floats(place), minimum = load_floats(place + 64);
      } else {
        scale = load_half8(w + 256 + 16 * h);
        minimum = Min ? load_half8(w + 288 + 16 * h) : _mm256_mul_ps(scale, _mm256_set1_ps(-8.0f));
        if (pass == Pass::first) store_floats(place, scale), store_floats(place + 64, minimum);
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        float* a = acc + t * kTileRows + 8 * h;
        const __m256 v = _mm256_fmadd_ps(multiplied(sum[t][h], x, t), scale, _mm256_load_ps(a));
        _mm256_store_ps(a, _mm256_fmadd_ps(_mm256_broadcast_ss(x.sum + t), minimum, v));
      }
    }
  }
};

template <bool Min>
struct Int8 {
  using Block = PairBlock;
  static constexpr int64_t unpacked_bytes = 0;

  template <int T, Pass pass>
  static OUTRIDER_INLINE void block(const uint8_t* w, const uint8_t* fetch, uint8_t*, const Block& x, float* acc) {
    prefetch<pass, Min ? 576 : 544>(fetch);
    __m256i sum[T][2];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) sum[t][0] = sum[t][1] = _mm256_set1_epi32(x.offset[t]);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const __m256i a = load_bytes(w + 64 * j), b = load_bytes(w + 64 * j + 32);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i q = splat4(x.q[t] + 4 * j), multiplier = splat4(x.multiplier[t] + 2 * j);
        sum[t][0] = add_multiplied(sum[t][0], _mm256_maddubs_epi16(a, q), multiplier);
        sum[t][1] = add_multiplied(sum[t][1], _mm256_maddubs_epi16(b, q), multiplier);
        OUTRIDER_PIN(sum[t][0]);
        OUTRIDER_PIN(sum[t][1]);
      }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256 scale = load_half8(w + 512 + 16 * h);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        float* a = acc + t * kTileRows + 8 * h;
        __m256 v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[t][h]), scale, _mm256_load_ps(a));
        if (Min) v = _mm256_fmadd_ps(_mm256_broadcast_ss(x.sum + t), load_half8(w + 544 + 16 * h), v);
        _mm256_store_ps(a, v);
      }
    }
  }
};

template <WeightKind Kind>
OUTRIDER_INLINE __m256 load_weights(const uint8_t* p, int64_t i) {
  if (Kind == WeightKind::f16) return load_half8(p + 2 * i);
  if (Kind == WeightKind::bf16) {
    const __m128i bits = _mm_load_si128(reinterpret_cast<const __m128i*>(p + 2 * i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  return _mm256_load_ps(reinterpret_cast<const float*>(p) + i);
}

template <WeightKind Kind>
struct Float {
  using Block = FloatBlock;
  static constexpr int64_t unpacked_bytes = kBlock * kTileRows * 4;

  template <int T, Pass pass>
  static OUTRIDER_INLINE void block(const uint8_t* w, const uint8_t* fetch, uint8_t* unpacked, const Block& x,
                                    float* acc) {
    prefetch<pass, Kind == WeightKind::f32 ? 2048 : 1024>(fetch);
    __m256 sum[T][2];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      sum[t][0] = _mm256_load_ps(acc + t * kTileRows);
      sum[t][1] = _mm256_load_ps(acc + t * kTileRows + 8);
    }
    for (int i = 0; i < kBlock; ++i) {
      uint8_t* place = unpacked + 64 * i;
      __m256 a, b;
      if (is_unpacked(pass)) {
        a = load_floats(place), b = load_floats(place + 32);
      } else {
        a = load_weights<Kind>(w, i * kTileRows), b = load_weights<Kind>(w, i * kTileRows + 8);
        if (pass == Pass::first) store_floats(place, a), store_floats(place + 32, b);
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256 v = _mm256_broadcast_ss(x.x[i] + t);
        sum[t][0] = _mm256_fmadd_ps(a, v, sum[t][0]);
        sum[t][1] = _mm256_fmadd_ps(b, v, sum[t][1]);
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      _mm256_store_ps(acc + t * kTileRows, sum[t][0]);
      _mm256_store_ps(acc + t * kTileRows + 8, sum[t][1]);
    }
  }
};

}  // namespace gemm
}  // namespace OUTRIDER_ISA
}  // namespace outrider
