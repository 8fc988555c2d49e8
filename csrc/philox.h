// The noise of sampling: Philox 4x32-10 (Salmon et al. 2011) turned into Gumbel noise.
//
// The noise of a token is a pure function of (request seed, absolute position, token id), made of
// integers and of IEEE double operations in one fixed order, so it is the same bits everywhere.
//
// It is made in two parts, so that a row of 50,000 tokens needs few of them in full. One Philox call
// gives the coarse byte h of 16 neighbouring tokens; a second, made only for tokens that can still win,
// gives a token's 32 fine bits f. With u = (h * 2^32 + f + 1/2) / 2^40 the noise is -log(-log(u)), which
// lies in (-3.4, 28.5).
#pragma once

#include <cstdint>
#include <cstring>

// Included by kernels that are compiled for several instruction sets: what is not inlined could be shared
// between them.
#define OUTRIDER_INLINE inline __attribute__((always_inline))

namespace outrider {

struct PhiloxBlock {
  uint32_t word[4];
};

OUTRIDER_INLINE PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Natural logarithm of a positive normal double, to about one unit in the last place.
OUTRIDER_INLINE double log_portable(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
  bits = (bits & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
  double m;
  std::memcpy(&m, &bits, 8);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  // log(m) = 2 atanh(f), |f| < 0.172: eleven terms of the series reach 1e-18.
  const double f = (m - 1.0) / (m + 1.0), f2 = f * f;
  double sum = 1.0 / 21.0;
  for (int k = 19; k >= 1; k -= 2) sum = sum * f2 + 1.0 / k;
  const double n = static_cast<double>(exponent);
  return n * 0x1.62e42fefa38p-1 + (2.0 * f * sum + n * 0x1.ef35793c7673p-45);
}

OUTRIDER_INLINE double gumbel_from_bits(uint32_t coarse, uint32_t fine) {
  const double u = (static_cast<double>((uint64_t{coarse} << 32) | fine) + 0.5) * 0x1p-40;
  return -log_portable(-log_portable(u));
}

// The noise of one request at one position.
struct Noise {
  uint32_t key0, key1, position0, position1;

  OUTRIDER_INLINE Noise(uint64_t seed, int64_t position)
      : key0(static_cast<uint32_t>(seed)), key1(static_cast<uint32_t>(seed >> 32)),
        position0(static_cast<uint32_t>(position)),
        position1(static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32)) {}

  // Byte j of the result, counted from the low byte of word 0, belongs to token 16 * group + j.
  OUTRIDER_INLINE PhiloxBlock coarse(uint32_t group) const {
    return philox4x32({{group, 0, position0, position1}}, key0, key1);
  }
  OUTRIDER_INLINE uint32_t fine(uint32_t token) const {
    return philox4x32({{token, 1, position0, position1}}, key0, key1).word[0];
  }
  OUTRIDER_INLINE static uint32_t coarse_of(const PhiloxBlock& block, uint32_t token) {
    return (block.word[(token >> 2) & 3] >> (8 * (token & 3))) & 0xFF;
  }
  OUTRIDER_INLINE double gumbel(uint32_t token) const {
    return gumbel_from_bits(coarse_of(coarse(token >> 4), token), fine(token));
  }
};

}  // namespace outrider
