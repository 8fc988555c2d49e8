// What the block kernels for x86 have in common.
#pragma once

#include <immintrin.h>

#include "../gemm_impl.h"

namespace outrider {
namespace OUTRIDER_ISA {
namespace gemm {

#define OUTRIDER_INLINE inline __attribute__((always_inline))
// Keeps the compiler from computing all products first and spilling them.
#define OUTRIDER_PIN(v) asm volatile("" : "+x"(v))

OUTRIDER_INLINE __m256 load_half8(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}
OUTRIDER_INLINE __m256i load_bytes(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
OUTRIDER_INLINE void store_bytes(uint8_t* p, __m256i v) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), v); }
OUTRIDER_INLINE __m256 load_floats(const uint8_t* p) { return _mm256_load_ps(reinterpret_cast<const float*>(p)); }
OUTRIDER_INLINE void store_floats(uint8_t* p, __m256 v) { _mm256_store_ps(reinterpret_cast<float*>(p), v); }
OUTRIDER_INLINE __m256i splat4(const void* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}

// A thread's memory requests run this far ahead of its arithmetic.
constexpr int64_t kAhead = 8192;
template <Pass pass, int Bytes>
OUTRIDER_INLINE void prefetch(const uint8_t* p) {
  constexpr int half = (Bytes + 127) / 128 * 64;
  constexpr int begin = pass == Pass::second ? half : 0;
  constexpr int end = pass == Pass::later ? 0 : pass == Pass::first ? half : Bytes;
#pragma GCC unroll 32
  for (int i = begin; i < end; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T1);
}
// Whether weights come from scratch.
constexpr bool is_unpacked(Pass pass) { return pass == Pass::second || pass == Pass::later; }

}  // namespace gemm
}  // namespace OUTRIDER_ISA
}  // namespace outrider
