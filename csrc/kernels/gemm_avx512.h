// Block kernels of the linear op for AVX-512 (F, BW, DQ, VL) and, where there is VNNI, with it. A tile's 16 rows are
// the lanes of one register. See gemm_generic.h for what they compute.
#pragma once

#include "gemm_x86.h"

namespace outrider {
namespace OUTRIDER_ISA {
namespace gemm {

OUTRIDER_INLINE __m512i load_tile(const uint8_t* p) { return _mm512_loadu_si512(p); }
OUTRIDER_INLINE __m512 load_half16(const uint8_t* p) { return _mm512_cvtph_ps(load_bytes(p)); }
OUTRIDER_INLINE __m512 load_floats16(const uint8_t* p) { return _mm512_load_ps(p); }
OUTRIDER_INLINE __m512i splat4_wide(const void* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}

#if defined(OUTRIDER_ISA_avx512vnni)

// Four products of 4-bit weights and activations a 32-bit lane.
OUTRIDER_INLINE __m512i add_products(__m512i sum, __m512i w, __m512i q) { return _mm512_dpbusd_epi32(sum, w, q); }
OUTRIDER_INLINE __m512i add_sums(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
// The sum of a block times its multiplier, rounded once: both are exact in fp32.
OUTRIDER_INLINE __m512 multiplied(__m512i sum, const Q8Block& x, int t) {
  return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(x.factor[t]));
}
// Pairs of 16-bit sums times their multipliers.
OUTRIDER_INLINE __m512i add_multiplied(__m512i sum, __m512i pairs, __m512i multipliers) {
  return _mm512_dpwssd_epi32(sum, pairs, multipliers);
}

#else

// Two products a 16-bit lane: eight times two products of 4 and 8 bits fit.
OUTRIDER_INLINE __m512i add_products(__m512i sum, __m512i w, __m512i q) {
  return _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, q));
}
OUTRIDER_INLINE __m512i add_sums(__m512i a, __m512i b) { return _mm512_add_epi16(a, b); }
OUTRIDER_INLINE __m512 multiplied(__m512i sum, const Q8Block& x, int t) {
  return _mm512_cvtepi32_ps(_mm512_madd_epi16(sum, splat4_wide(x.multiplier[t])));
}
OUTRIDER_INLINE __m512i add_multiplied(__m512i sum, __m512i pairs, __m512i multipliers) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, multipliers));
}

#endif

constexpr int kWide = 2 * kQuad;  // rows that a pass takes at most

// Row t of a pass: in the first or in the second quad.
template <class Block>
OUTRIDER_INLINE const Block& quad_of(int t, const Block& x, const Block& y) {
  return t < kQuad ? x : y;
}

template <bool Min>
struct Int4 {
  using Block = Q8Block;
  static constexpr int64_t unpacked_bytes = 512 + 64 + 64;  // 8 registers of weights, scales, minimums

  template <int T, Pass pass>
  static OUTRIDER_INLINE void block(const uint8_t* w, const uint8_t* fetch, uint8_t* unpacked, const Block& x,
                                    const Block& y, float* acc) {
    const __m512i mask = _mm512_set1_epi8(15);
    prefetch<pass, Min ? 320 : 288>(fetch);
    // With few rows two chains each, over the low and the high nibbles; with many the rows are chains enough.
    constexpr bool two = T < kQuad;
    __m512i low[T], high[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) low[t] = high[t] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512i a, b;
      if (is_unpacked(pass)) {
        a = load_tile(unpacked + 128 * j), b = load_tile(unpacked + 128 * j + 64);
      } else {
        const __m512i both = load_tile(w + 64 * j);
        a = _mm512_and_si512(both, mask), b = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        if (pass == Pass::first) {
          _mm512_store_si512(unpacked + 128 * j, a);
          _mm512_store_si512(unpacked + 128 * j + 64, b);
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const int8_t* q = quad_of(t, x, y).q[t % kQuad] + 4 * j;
        low[t] = add_products(low[t], a, splat4_wide(q));
        (two ? high[t] : low[t]) = add_products(two ? high[t] : low[t], b, splat4_wide(q + 16));
      }
    }
    __m512 scale, minimum;
    if (is_unpacked(pass)) {
      scale = load_floats16(unpacked + 512), minimum = load_floats16(unpacked + 576);
    } else {
      scale = load_half16(w + 256);
      minimum = Min ? load_half16(w + 288) : _mm512_mul_ps(scale, _mm512_set1_ps(-8.0f));
      if (pass == Pass::first) _mm512_store_ps(unpacked + 512, scale), _mm512_store_ps(unpacked + 576, minimum);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      float* a = acc + t * kTileRows;
      const Block& quad = quad_of(t, x, y);
      const __m512 sum = multiplied(two ? add_sums(low[t], high[t]) : low[t], quad, t % kQuad);
      const __m512 v = _mm512_fmadd_ps(sum, scale, _mm512_load_ps(a));
      _mm512_store_ps(a, _mm512_fmadd_ps(_mm512_set1_ps(quad.sum[t % kQuad]), minimum, v));
    }
  }
};

template <bool Min>
struct Int8 {
  using Block = PairBlock;
  static constexpr int64_t unpacked_bytes = 0;

  template <int T, Pass pass>
  static OUTRIDER_INLINE void block(const uint8_t* w, const uint8_t* fetch, uint8_t*, const Block& x, const Block& y,
                                    float* acc) {
    prefetch<pass, Min ? 576 : 544>(fetch);
    constexpr bool two = T < kQuad;  // chains a row
    __m512i even[T], odd[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      even[t] = _mm512_set1_epi32(quad_of(t, x, y).offset[t % kQuad]);
      odd[t] = _mm512_setzero_si512();
    }
#pragma GCC unroll 4
    for (int j = 0; j < 8; j += 2) {
      const __m512i a = load_tile(w + 64 * j), b = load_tile(w + 64 * j + 64);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const int8_t* q = quad_of(t, x, y).q[t % kQuad] + 4 * j;
        const int16_t* multiplier = quad_of(t, x, y).multiplier[t % kQuad] + 2 * j;
        even[t] = add_multiplied(even[t], _mm512_maddubs_epi16(a, splat4_wide(q)), splat4_wide(multiplier));
        (two ? odd[t] : even[t]) = add_multiplied(two ? odd[t] : even[t], _mm512_maddubs_epi16(b, splat4_wide(q + 4)),
                                                  splat4_wide(multiplier + 2));
      }
    }
    const __m512 scale = load_half16(w + 512);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      float* a = acc + t * kTileRows;
      const __m512 sum = _mm512_cvtepi32_ps(two ? _mm512_add_epi32(even[t], odd[t]) : even[t]);
      __m512 v = _mm512_fmadd_ps(sum, scale, _mm512_load_ps(a));
      if (Min) v = _mm512_fmadd_ps(_mm512_set1_ps(quad_of(t, x, y).sum[t % kQuad]), load_half16(w + 544), v);
      _mm512_store_ps(a, v);
    }
  }
};

template <WeightKind Kind>
OUTRIDER_INLINE __m512 load_weights(const uint8_t* p, int64_t i) {
  if (Kind == WeightKind::f16) return load_half16(p + 2 * i);
  if (Kind == WeightKind::bf16)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_bytes(p + 2 * i)), 16));
  return load_floats16(p + 4 * i);
}

template <WeightKind Kind>
struct Float {
  using Block = FloatBlock;
  static constexpr int64_t unpacked_bytes = kBlock * kTileRows * 4;

  template <int T, Pass pass>
  static OUTRIDER_INLINE void block(const uint8_t* w, const uint8_t* fetch, uint8_t* unpacked, const Block& x,
                                    const Block& y, float* acc) {
    prefetch<pass, Kind == WeightKind::f32 ? 2048 : 1024>(fetch);
    __m512 sum[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) sum[t] = _mm512_load_ps(acc + t * kTileRows);
    for (int i = 0; i < kBlock; ++i) {
      __m512 a;
      if (is_unpacked(pass)) {
        a = load_floats16(unpacked + 64 * i);
      } else {
        a = load_weights<Kind>(w, i * kTileRows);
        if (pass == Pass::first) _mm512_store_ps(unpacked + 64 * i, a);
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t)
        sum[t] = _mm512_fmadd_ps(a, _mm512_set1_ps(quad_of(t, x, y).x[i][t % kQuad]), sum[t]);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) _mm512_store_ps(acc + t * kTileRows, sum[t]);
  }
};

}  // namespace gemm
}  // namespace OUTRIDER_ISA
}  // namespace outrider
