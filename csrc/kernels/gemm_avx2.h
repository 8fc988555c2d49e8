// Block kernels of the linear op for AVX2 + FMA + F16C.
#pragma once

#include <immintrin.h>

#include "../gemm_impl.h"

namespace outrider {
namespace OUTRIDER_ISA {
namespace gemm {

inline __m256 load_half8(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256i load_bytes(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i splat4(const void* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}

// Keeps the compiler from computing all products first and spilling them.
#define OUTRIDER_PIN(v) asm volatile("" : "+x"(v))

template <int T, bool Min>
inline __attribute__((always_inline)) void int4_block(const uint8_t* block, const Q8Block& x, float* acc) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i sum[T][2];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m256i a = load_bytes(block + 64 * j), b = load_bytes(block + 64 * j + 32);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i wa = _mm256_and_si256(half ? _mm256_srli_epi16(a, 4) : a, mask);
      const __m256i wb = _mm256_and_si256(half ? _mm256_srli_epi16(b, 4) : b, mask);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i q = splat4(x.q[t] + 16 * half + 4 * j);
        const __m256i pa = _mm256_maddubs_epi16(wa, q), pb = _mm256_maddubs_epi16(wb, q);
        sum[t][0] = j + half ? _mm256_add_epi16(sum[t][0], pa) : pa;
        sum[t][1] = j + half ? _mm256_add_epi16(sum[t][1], pb) : pb;
        OUTRIDER_PIN(sum[t][0]);
        OUTRIDER_PIN(sum[t][1]);
      }
    }
  }
  const __m256 minus8 = _mm256_set1_ps(-8.0f);
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m256 scale = load_half8(block + 256 + 16 * h);
    const __m256 minimum = Min ? load_half8(block + 288 + 16 * h) : _mm256_mul_ps(scale, minus8);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256i wide = _mm256_madd_epi16(sum[t][h], splat4(x.multiplier[t]));
      float* a = acc + t * kTileRows + 8 * h;
      const __m256 v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(wide), scale, _mm256_load_ps(a));
      _mm256_store_ps(a, _mm256_fmadd_ps(_mm256_broadcast_ss(x.sum + t), minimum, v));
    }
  }
}

template <int T, bool Min>
inline __attribute__((always_inline)) void int8_block(const uint8_t* block, const Q16Block& x, float* acc) {
  const __m256i low_bytes = _mm256_set1_epi16(255);
  __m256i sum[T][2];
  for (int t = 0; t < T; ++t) sum[t][0] = sum[t][1] = _mm256_set1_epi32(x.offset[t]);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const __m256i a = load_bytes(block + 64 * j), b = load_bytes(block + 64 * j + 32);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i wa = half ? _mm256_srli_epi16(a, 8) : _mm256_and_si256(a, low_bytes);
      const __m256i wb = half ? _mm256_srli_epi16(b, 8) : _mm256_and_si256(b, low_bytes);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i q = splat4(x.q[t] + 4 * j + 2 * half);
        sum[t][0] = _mm256_add_epi32(sum[t][0], _mm256_madd_epi16(wa, q));
        sum[t][1] = _mm256_add_epi32(sum[t][1], _mm256_madd_epi16(wb, q));
        OUTRIDER_PIN(sum[t][0]);
        OUTRIDER_PIN(sum[t][1]);
      }
    }
  }
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m256 scale = load_half8(block + 512 + 16 * h);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      float* a = acc + t * kTileRows + 8 * h;
      __m256 v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[t][h]), scale, _mm256_load_ps(a));
      if (Min) v = _mm256_fmadd_ps(_mm256_broadcast_ss(x.sum + t), load_half8(block + 544 + 16 * h), v);
      _mm256_store_ps(a, v);
    }
  }
}

template <WeightKind Kind>
inline __m256 load_weights(const uint8_t* p, int64_t i) {
  if (Kind == WeightKind::f16) return load_half8(p + 2 * i);
  if (Kind == WeightKind::bf16) {
    const __m128i bits = _mm_load_si128(reinterpret_cast<const __m128i*>(p + 2 * i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  return _mm256_load_ps(reinterpret_cast<const float*>(p) + i);
}

template <int T, WeightKind Kind>
inline __attribute__((always_inline)) void float_block(const uint8_t* block, const FloatBlock& x, float* acc) {
  __m256 sum[T][2];
  for (int t = 0; t < T; ++t)
    for (int h = 0; h < 2; ++h) sum[t][h] = _mm256_load_ps(acc + t * kTileRows + 8 * h);
  for (int i = 0; i < kBlock; ++i) {
    const __m256 a = load_weights<Kind>(block, i * kTileRows), b = load_weights<Kind>(block, i * kTileRows + 8);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256 v = _mm256_broadcast_ss(x.x[i] + t);
      sum[t][0] = _mm256_fmadd_ps(a, v, sum[t][0]);
      sum[t][1] = _mm256_fmadd_ps(b, v, sum[t][1]);
    }
  }
  for (int t = 0; t < T; ++t)
    for (int h = 0; h < 2; ++h) _mm256_store_ps(acc + t * kTileRows + 8 * h, sum[t][h]);
}

}  // namespace gemm
}  // namespace OUTRIDER_ISA
}  // namespace outrider
