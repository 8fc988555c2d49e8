// Quantising fp32 weights: one fp16 scale (and minimum) a group, chosen for the least squared error.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "gemm_impl.h"

namespace outrider {
namespace {

// w = scale * q + minimum with q in [low, high]; scale and minimum are fp16 values.
struct Grid {
  float scale = 0, minimum = 0;
  int low = 0, high = 0;

  int nearest(float w) const {
    if (scale == 0) return std::min(std::max(0, low), high);
    const float q = std::nearbyint((w - minimum) / scale);
    return int(std::min(std::max(q, float(low)), float(high)));
  }
  double error(const float* w, int64_t count) const {
    double total = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float e = scale * float(nearest(w[i])) + minimum - w[i];
      total += double(e) * e;
    }
    return total;
  }
};

float to_half_value(float x) { return half_to_float(float_to_half(x)); }

// The extreme value of a group goes to the end of the range; a range that is a little too small pays where the
// extreme is alone, so a few are tried.
constexpr float kShrink[] = {1.0f, 0.94f, 0.88f, 0.82f};

Grid best_grid(const float* w, int64_t count, int bits, bool with_min) {
  float low = w[0], high = w[0];
  for (int64_t i = 1; i < count; ++i) low = std::min(low, w[i]), high = std::max(high, w[i]);
  Grid best;
  double best_error = std::numeric_limits<double>::infinity();
  for (float shrink : kShrink) {
    Grid grid;
    if (with_min) {
      const float middle = 0.5f * (low + high), half_width = 0.5f * shrink * (high - low);
      grid.low = bits == 4 ? 0 : -128;
      grid.high = grid.low + (1 << bits) - 1;
      grid.scale = to_half_value(2 * half_width / float((1 << bits) - 1));
      grid.minimum = to_half_value(middle - half_width - grid.scale * float(grid.low));
    } else if (bits == 4) {
      grid.low = -8, grid.high = 7;
      grid.scale = to_half_value(shrink * (high > -low ? high : low) / -8.0f);
    } else {
      grid.low = -127, grid.high = 127;
      grid.scale = to_half_value(shrink * std::max(high, -low) / 127.0f);
    }
    const double error = grid.error(w, count);
    if (error < best_error) best_error = error, best = grid;
    if (bits == 8) break;  // finer than any gain from clipping
  }
  return best;
}

void quantize_row(const PackedWeight::Impl& weight, int64_t r, const float* w, int bits, int64_t group) {
  PackedRow row(weight, r);
  Grid grid;
  for (int64_t begin = 0; begin < weight.k; begin += kBlock, row.next()) {
    if (begin % group == 0) grid = best_grid(w + begin, std::min(group, weight.k - begin), bits, weight.has_min);
    const uint16_t scale = float_to_half(grid.scale), minimum = float_to_half(grid.minimum);
    std::memcpy(row.scale(), &scale, 2);
    if (weight.has_min) std::memcpy(row.minimum(), &minimum, 2);
    int8_t q[kBlock] = {};
    const int offset = bits == 4 && !weight.has_min ? 8 : 0;
    for (int64_t i = 0; i < std::min(kBlock, weight.k - begin); ++i)
      q[i] = int8_t(grid.nearest(w[begin + i]) + offset);
    if (bits == 4)
      row.put_int4(q);
    else
      row.put_int8(q);
  }
}

}  // namespace

PackedWeight quantize(const float* data, int64_t n, int64_t k, int bits, int group, bool with_min) {
  if (bits != 4 && bits != 8)
    throw std::invalid_argument("cannot quantise to " + std::to_string(bits) + " bits; use 4 or 8");
  if (group != 0 && group != 32 && group != 64 && group != 128)
    throw std::invalid_argument("cannot quantise in groups of " + std::to_string(group) +
                                "; use 32, 64, 128, or 0 for one scale an output channel");
  const WeightKind kind = bits == 4 ? WeightKind::int4 : WeightKind::int8;
  auto impl = std::make_shared<PackedWeight::Impl>(kind, n, k, with_min, false);
  const int64_t step = group ? group : (k + kBlock - 1) / kBlock * kBlock;
  run_team([&](Team& team) {
    team.for_each(n, 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) quantize_row(*impl, r, data + r * k, bits, step);
    });
  });
  return PackedWeight(std::move(impl));
}

}  // namespace outrider
