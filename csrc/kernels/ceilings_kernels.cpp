// One streaming read and one stream of register-only int8 products, for each instruction set.
#include "ceilings.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace outrider {
namespace OUTRIDER_ISA {

namespace {

typedef uint64_t Vector __attribute__((vector_size(32), may_alias));

// Eight sums, each a variable of its own: as an array they would live in memory.
uint64_t read_all(const void* data, size_t bytes) {
  Vector a{}, b{}, c{}, d{}, e{}, f{}, g{}, h{};
  const Vector* at = static_cast<const Vector*>(data);
  for (size_t step = 0; step < bytes / 256; ++step, at += 8) {
    a += at[0], b += at[1], c += at[2], d += at[3];
    e += at[4], f += at[5], g += at[6], h += at[7];
  }
  const Vector total = a + b + c + d + e + f + g + h;
  return total[0] + total[1] + total[2] + total[3];
}

// Each product is made anew although its operands never change: the empty asm claims to change
// one of them and the sum, and emits nothing.
#if defined(OUTRIDER_ISA_avx512vnni)
using Sum = __m512i;
constexpr int kMacs = 64;
inline void multiply_add(Sum& sum, Sum& weights, Sum values) {
  sum = _mm512_dpbusd_epi32(sum, weights, values);
  __asm__ volatile("" : "+v"(sum), "+v"(weights));
}
#elif defined(OUTRIDER_ISA_avx512)
using Sum = __m512i;
constexpr int kMacs = 64;
inline void multiply_add(Sum& sum, Sum& weights, Sum values) {
  sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(weights, values));
  __asm__ volatile("" : "+v"(sum), "+v"(weights));
}
#elif defined(OUTRIDER_ISA_avxvnni)
using Sum = __m256i;
constexpr int kMacs = 32;
inline void multiply_add(Sum& sum, Sum& weights, Sum values) {
  sum = _mm256_dpbusd_avx_epi32(sum, weights, values);
  __asm__ volatile("" : "+x"(sum), "+x"(weights));
}
#elif defined(OUTRIDER_ISA_avx2)
using Sum = __m256i;
constexpr int kMacs = 32;
inline void multiply_add(Sum& sum, Sum& weights, Sum values) {
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, values));
  __asm__ volatile("" : "+x"(sum), "+x"(weights));
}
#elif defined(__ARM_FEATURE_DOTPROD)
using Sum = int32x4_t;
constexpr int kMacs = 16;
inline void multiply_add(Sum& sum, Sum& weights, Sum values) {
  sum = vdotq_s32(sum, vreinterpretq_s8_s32(weights), vreinterpretq_s8_s32(values));
  __asm__ volatile("" : "+w"(sum), "+w"(weights));
}
#else
using Sum = int32_t;
constexpr int kMacs = 1;
inline void multiply_add(Sum& sum, Sum& weights, Sum values) {
  sum = sum + weights * values;
  __asm__ volatile("" : "+r"(sum), "+r"(weights));
}
#endif

int32_t first_lane(Sum sum) {
  int32_t lane;
  std::memcpy(&lane, &sum, sizeof(lane));
  return lane;
}

// Eight independent sums are enough to hide the latency of an addition.
int64_t multiply(int64_t rounds, int32_t* sink) {
  Sum a{}, b{}, c{}, d{}, e{}, f{}, g{}, h{}, weights, values;
  std::memset(&weights, *sink, sizeof(weights));  // known only at run time
  std::memset(&values, *sink, sizeof(values));
  for (int64_t round = 0; round < rounds; ++round) {
    multiply_add(a, weights, values);
    multiply_add(b, weights, values);
    multiply_add(c, weights, values);
    multiply_add(d, weights, values);
    multiply_add(e, weights, values);
    multiply_add(f, weights, values);
    multiply_add(g, weights, values);
    multiply_add(h, weights, values);
  }
  *sink = first_lane(a) ^ first_lane(b) ^ first_lane(c) ^ first_lane(d);
  *sink ^= first_lane(e) ^ first_lane(f) ^ first_lane(g) ^ first_lane(h);
  return rounds * 8 * kMacs;
}

}  // namespace

const CeilingKernels& ceiling_kernels() {
  static const CeilingKernels kernels{read_all, multiply};
  return kernels;
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
