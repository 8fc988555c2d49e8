// Scans over a row of logits. Eight lanes on every instruction set, no fused multiply-add, and integers
// where sums are taken: the results are the same bits everywhere.
#include <cmath>
#include <cstring>
#include <limits>

#include "../philox.h"
#include "../sampling.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace outrider {
namespace OUTRIDER_ISA {
namespace {

constexpr int kLanes = 8;
typedef float Float8 __attribute__((vector_size(32)));
typedef int32_t Int8 __attribute__((vector_size(32)));

constexpr float kLowest = -std::numeric_limits<float>::infinity();

inline Float8 load(const float* p) {
  Float8 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Float8 splat(float x) { return Float8{x, x, x, x, x, x, x, x}; }

inline Float8 larger(Float8 a, Float8 b) {  // b where either is NaN
#if defined(__AVX2__)
  return (Float8)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// The last, incomplete block of a row, padded.
struct Tail {
  float values[kBlock];
  Tail(const float* x, int64_t n, float padding) {
    for (int64_t i = 0; i < kBlock; ++i) values[i] = i < n ? x[i] : padding;
  }
};

// The maximum of a block; lanes of `nan` become non-zero where a NaN was.
inline float block_maximum(const float* x, Int8& nan) {
  Float8 a = splat(kLowest), b = a;
  for (int64_t i = 0; i < kBlock; i += 2 * kLanes) {
    const Float8 v = load(x + i), w = load(x + i + kLanes);
    nan |= (v != v) | (w != w);
    a = larger(v, a);
    b = larger(w, b);
  }
  a = larger(b, a);
  float best = a[0];
  for (int lane = 1; lane < kLanes; ++lane) best = a[lane] > best ? a[lane] : best;
  return best;
}

bool block_maxima(const float* x, int64_t n, float* maxima) {
  Int8 nan = {};
  const int64_t full = n / kBlock;
  for (int64_t b = 0; b < full; ++b) maxima[b] = block_maximum(x + b * kBlock, nan);
  if (n % kBlock) maxima[full] = block_maximum(Tail(x + full * kBlock, n % kBlock, kLowest).values, nan);
  for (int lane = 0; lane < kLanes; ++lane)
    if (nan[lane]) return false;
  return true;
}

int64_t gather(const float* x, const float* maxima, int64_t n, float max, float inv_t, float low, float high,
               int32_t* ids, float* scaled) {
  int64_t count = 0;
  const auto take = [&](int64_t i) {
    const float s = (x[i] - max) * inv_t;
    if (s >= low && s < high) {
      ids[count] = static_cast<int32_t>(i);
      scaled[count++] = s;
    }
  };
  for (int64_t b = 0; b < num_blocks(n); ++b) {
    if (!(maxima[b] >= low)) continue;
    const int64_t begin = b * kBlock, end = begin + kBlock < n ? begin + kBlock : n;
    int64_t i = begin;
#if defined(__AVX2__)
    const __m256 vmax = _mm256_set1_ps(max), vinv = _mm256_set1_ps(inv_t), vlow = _mm256_set1_ps(low);
    for (; i + kLanes <= end; i += kLanes) {
      const __m256 s = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), vmax), vinv);
      unsigned mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(s, vlow, _CMP_GE_OQ)));
      for (; mask; mask &= mask - 1) take(i + __builtin_ctz(mask));
    }
#endif
    for (; i < end; ++i) take(i);
  }
  return count;
}

// exp(s) for s <= 0, to about one unit in the last place; exactly 1 at 0; 0 in effect below -87.
inline Float8 exp_lanes(Float8 s) {
  s = larger(s, splat(-87.0f));
  const Float8 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Float8 shifted = s * splat(1.44269504f) + magic;
  const Float8 n = shifted - magic;
  const Float8 r = (s - n * splat(0.693359375f)) + n * splat(2.12194440e-4f);
  Float8 p = splat(1.0f / 5040.0f);
  p = p * r + splat(1.0f / 720.0f);
  p = p * r + splat(1.0f / 120.0f);
  p = p * r + splat(1.0f / 24.0f);
  p = p * r + splat(1.0f / 6.0f);
  p = p * r + splat(0.5f);
  p = p * r + splat(1.0f);
  p = p * r + splat(1.0f);
  return (Float8)((Int8)p + ((Int8)shifted << 23));  // times 2^n
}

inline Int8 weight_lanes(Float8 s) {
  return __builtin_convertvector(exp_lanes(s) * splat(1073741824.0f) + splat(0.5f), Int8);
}

void weights(const float* scaled, int64_t n, uint32_t* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Int8 w = weight_lanes(load(scaled + i));
    std::memcpy(out + i, &w, sizeof w);
  }
  if (i < n) {
    float rest[kLanes] = {};
    std::memcpy(rest, scaled + i, sizeof(float) * static_cast<size_t>(n - i));
    const Int8 w = weight_lanes(load(rest));
    std::memcpy(out + i, &w, sizeof(uint32_t) * static_cast<size_t>(n - i));
  }
}

inline uint64_t block_weight(const float* x, float max, float inv_t) {
  // High and low halves are summed apart, so that 32-bit lanes cannot overflow.
  Int8 low = {}, high = {};
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const Int8 w = weight_lanes((load(x + i) - splat(max)) * splat(inv_t));
    low += w & 0xFFFF;
    high += w >> 16;
  }
  uint64_t sum_low = 0, sum_high = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    sum_low += static_cast<uint32_t>(low[lane]);
    sum_high += static_cast<uint32_t>(high[lane]);
  }
  return sum_low + (sum_high << 16);
}

uint64_t sum_weights(const float* x, const float* maxima, int64_t n, float max, float inv_t) {
  uint64_t sum = 0;
  for (int64_t b = 0; b < num_blocks(n); ++b) {
    if (!(maxima[b] >= -22.0f)) continue;  // every weight rounds to 0
    const int64_t rest = n - b * kBlock;
    if (rest >= kBlock)
      sum += block_weight(x + b * kBlock, max, inv_t);
    else
      sum += block_weight(Tail(x + b * kBlock, rest, kLowest).values, max, inv_t);
  }
  return sum;
}

inline double block_exp(const float* x, float max) {
  Float8 sum = {};
  for (int64_t i = 0; i < kBlock; i += kLanes) sum += exp_lanes(load(x + i) - splat(max));
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += static_cast<double>(sum[lane]);
  return total;
}

double sum_exp(const float* x, int64_t n, float max) {
  double sum = 0;
  const int64_t full = n / kBlock;
  for (int64_t b = 0; b < full; ++b) sum += block_exp(x + b * kBlock, max);
  if (n % kBlock) sum += block_exp(Tail(x + full * kBlock, n % kBlock, kLowest).values, max);
  return sum;
}

int64_t count_before(const float* x, int64_t n, float value, int64_t id) {
  int64_t count = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    if (end - begin < kBlock || (begin <= id && id < end)) {
      for (int64_t i = begin; i < end; ++i) count += x[i] > value || (x[i] == value && i < id);
      continue;
    }
    Int8 before = {};  // minus the count of each lane
    if (end <= id) {
      for (int64_t i = begin; i < end; i += kLanes) before += load(x + i) >= splat(value);
    } else {
      for (int64_t i = begin; i < end; i += kLanes) before += load(x + i) > splat(value);
    }
    for (int lane = 0; lane < kLanes; ++lane) count -= before[lane];
  }
  return count;
}

#if defined(__AVX2__)
struct Product {
  __m256i high, low;
};

inline Product multiply(__m256i a, __m256i b) {
  const __m256i even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
  return {_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA),
          _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA)};
}

int top_noise(uint64_t seed, int64_t position, uint32_t first_group, int32_t* ids) {
  const Noise noise(seed, position);
  const auto set = [](uint32_t x) { return _mm256_set1_epi32(static_cast<int32_t>(x)); };
  __m256i c[4] = {_mm256_add_epi32(set(first_group), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
                  _mm256_setzero_si256(), set(noise.position0), set(noise.position1)};
  uint32_t key0 = noise.key0, key1 = noise.key1;
  for (int round = 0; round < 10; ++round) {
    const Product p0 = multiply(c[0], set(0xD2511F53u)), p1 = multiply(c[2], set(0xCD9E8D57u));
    c[0] = _mm256_xor_si256(_mm256_xor_si256(p1.high, c[1]), set(key0));
    c[2] = _mm256_xor_si256(_mm256_xor_si256(p0.high, c[3]), set(key1));
    c[1] = p1.low;
    c[3] = p0.low;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  int count = 0;
  for (int word = 0; word < 4; ++word) {
    const __m256i full = _mm256_cmpeq_epi8(c[word], _mm256_set1_epi8(-1));
    for (unsigned mask = static_cast<unsigned>(_mm256_movemask_epi8(full)); mask; mask &= mask - 1) {
      const int bit = __builtin_ctz(mask);  // group bit / 4, byte bit % 4 of this word
      ids[count++] = static_cast<int32_t>(first_group * 16 + (bit >> 2) * 16 + word * 4 + (bit & 3));
    }
  }
  return count;
}
#else
int top_noise(uint64_t seed, int64_t position, uint32_t first_group, int32_t* ids) {
  const Noise noise(seed, position);
  int count = 0;
  for (uint32_t group = first_group; group < first_group + 8; ++group) {
    const PhiloxBlock block = noise.coarse(group);
    for (uint32_t j = 0; j < 16; ++j)
      if (Noise::coarse_of(block, j) == 255) ids[count++] = static_cast<int32_t>(group * 16 + j);
  }
  return count;
}
#endif

}  // namespace

const SamplingKernels& sampling_kernels() {
  static const SamplingKernels kernels = {block_maxima, gather,       weights,  sum_weights,
                                          sum_exp,      count_before, top_noise};
  return kernels;
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
