// Scans over a row of logits. No fused multiply-add, integers where sums are taken, and float sums in eight
// fixed lanes: the results are the same bits on every instruction set.
#include <cmath>
#include <cstring>
#include <limits>

#include "../philox.h"
#include "../sampling.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace outrider {
namespace OUTRIDER_ISA {
namespace {

#if defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

constexpr float kLowest = -std::numeric_limits<float>::infinity();

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Floats splat(float x) { return x - Floats{}; }

inline Floats larger(Floats a, Floats b) {  // b where either is NaN
#if defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (Floats)_mm_max_ps((__m128)a, (__m128)b);
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
inline float block_maximum(const float* x, Ints& nan) {
  Floats a = splat(kLowest), b = a;
  for (int64_t i = 0; i < kBlock; i += 2 * kLanes) {
    const Floats v = load(x + i), w = load(x + i + kLanes);
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
  Ints nan = {};
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
inline Floats exp_lanes(Floats s) {
  s = larger(s, splat(-87.0f));
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = s * splat(1.44269504f) + magic;
  const Floats n = shifted - magic;
  const Floats r = (s - n * splat(0.693359375f)) + n * splat(2.12194440e-4f);
  Floats p = splat(1.0f / 5040.0f);
  p = p * r + splat(1.0f / 720.0f);
  p = p * r + splat(1.0f / 120.0f);
  p = p * r + splat(1.0f / 24.0f);
  p = p * r + splat(1.0f / 6.0f);
  p = p * r + splat(0.5f);
  p = p * r + splat(1.0f);
  p = p * r + splat(1.0f);
  return (Floats)((Ints)p + ((Ints)shifted << 23));  // times 2^n
}

inline Ints weight_lanes(Floats s) {
  return __builtin_convertvector(exp_lanes(s) * splat(1073741824.0f) + splat(0.5f), Ints);
}

void weights(const float* scaled, int64_t n, uint32_t* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Ints w = weight_lanes(load(scaled + i));
    std::memcpy(out + i, &w, sizeof w);
  }
  if (i < n) {
    float rest[kLanes] = {};
    std::memcpy(rest, scaled + i, sizeof(float) * static_cast<size_t>(n - i));
    const Ints w = weight_lanes(load(rest));
    std::memcpy(out + i, &w, sizeof(uint32_t) * static_cast<size_t>(n - i));
  }
}

// Weights added up in 32-bit lanes, high and low halves apart, so that thousands of blocks cannot overflow.
class WeightSum {
 public:
  void add_block(const float* x, float max, float inv_t) {
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Ints w = weight_lanes((load(x + i) - splat(max)) * splat(inv_t));
      low_ += w & 0xFFFF;
      high_ += w >> 16;
    }
    if (++num_blocks_ == kMostBlocks) flush();
  }

  uint64_t total() {
    flush();
    return total_;
  }

 private:
  static constexpr int kMostBlocks = 2048;  // times 16 vectors of 4 lanes times 0xFFFF: just under 2^31

  void flush() {
    for (int lane = 0; lane < kLanes; ++lane)
      total_ += static_cast<uint64_t>(low_[lane]) + (static_cast<uint64_t>(high_[lane]) << 16);
    low_ = high_ = Ints{};
    num_blocks_ = 0;
  }

  Ints low_ = {}, high_ = {};
  int num_blocks_ = 0;
  uint64_t total_ = 0;
};

uint64_t sum_weights(const float* x, const float* maxima, int64_t n, float max, float inv_t) {
  WeightSum sum;
  for (int64_t b = 0; b < num_blocks(n); ++b) {
    if (!(maxima[b] >= kNoWeight)) continue;
    const int64_t rest = n - b * kBlock;
    if (rest >= kBlock)
      sum.add_block(x + b * kBlock, max, inv_t);
    else
      sum.add_block(Tail(x + b * kBlock, rest, kLowest).values, max, inv_t);
  }
  return sum.total();
}

inline double block_exp(const float* x, float max) {
  constexpr int kSums = 8;
  Floats sums[kSums / kLanes] = {};
  for (int64_t i = 0; i < kBlock; i += kSums)
    for (int part = 0; part < kSums / kLanes; ++part)
      sums[part] += exp_lanes(load(x + i + part * kLanes) - splat(max));
  double total = 0;
  for (int i = 0; i < kSums; ++i) total += static_cast<double>(sums[i / kLanes][i % kLanes]);
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
    Ints before = {};  // minus the count of each lane
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
