// The linear op's kernels: what is the same on every instruction set. Block kernels come from gemm_*.h.
#include "../gemm_impl.h"

#include <cmath>
#include <cstring>

#include "simd_math.h"
#include "simd_norm.h"

#if defined(OUTRIDER_ISA_generic)
#include "gemm_generic.h"
#elif defined(__AVX2__)
#include "gemm_avx2.h"
#else
#include "gemm_generic.h"
#endif

namespace outrider {
namespace OUTRIDER_ISA {
namespace gemm {
namespace {

int64_t blocks_of(int64_t k) { return (k + kBlock - 1) / kBlock; }

// Largest absolute value; NaN counts as larger than infinity, so that it reaches the result.
float absolute_max(const float* x, int64_t count) {
  int32_t top = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  float out;
  std::memcpy(&out, &top, 4);
  return out;
}

int32_t round_to_int(float x, float limit) {
  x = !(x >= -limit) ? -limit : x;  // NaN, too
  return int32_t(std::lrint(x > limit ? limit : x));
}

float quantise_q8(const float* x, int64_t blocks, Q8Block* quad, int lane) {
  float top[64];
  float row_top = absolute_max(x, blocks * kBlock);
  const float unit = row_top / (kQ8Levels * kMultiplierMax);
  const bool zero = row_top < kTinyRow;
  for (int64_t b = 0; b < blocks; ++b) {
    Q8Block& block = quad[b];
    top[0] = absolute_max(x + b * kBlock, kBlock);
    const float exact = zero ? 1.0f : std::ceil(top[0] * (kMultiplierMax / row_top));
    const float multiplier = !(exact >= 1.0f) ? 1.0f : exact > kMultiplierMax ? kMultiplierMax : exact;
    const float inverse = zero ? 0.0f : 1.0f / (unit * multiplier);
    int32_t sum = 0;
    for (int i = 0; i < kBlock; ++i) {
      const int32_t q = round_to_int(x[b * kBlock + i] * inverse, kQ8Levels);
      block.q[lane][i] = int8_t(q);
      sum += q;
    }
    block.multiplier[lane][0] = block.multiplier[lane][1] = int16_t(multiplier);
    block.sum[lane] = float(sum * int32_t(multiplier));
  }
  return zero ? 0.0f : unit;
}

float quantise_q16(const float* x, int64_t blocks, Q16Block* quad, int lane) {
  static constexpr int order[4] = {0, 2, 1, 3};
  const float top = absolute_max(x, blocks * kBlock);
  const bool zero = top < kTinyRow;
  const float inverse = zero ? 0.0f : kQ16Levels / top;
  for (int64_t b = 0; b < blocks; ++b) {
    int32_t sum = 0;
    for (int i = 0; i < kBlock; ++i) {
      const int32_t q = round_to_int(x[b * kBlock + i] * inverse, kQ16Levels);
      quad[b].q[lane][i / 4 * 4 + order[i % 4]] = int16_t(q);
      sum += q;
    }
    quad[b].offset[lane] = -128 * sum;
    quad[b].sum[lane] = float(sum);
  }
  return zero ? 0.0f : top / kQ16Levels;
}

void prologue(WeightKind kind, const PrologueRow& row) {
  const int64_t blocks = blocks_of(row.k);
  float* x = row.staging;
  if (row.norm_weight)
    rms_norm(x, row.x, row.norm_weight, row.norm_eps, row.k);
  else
    std::memcpy(x, row.x, size_t(row.k) * sizeof(float));
  for (int64_t i = row.k; i < blocks * kBlock; ++i) x[i] = 0;
  if (kind == WeightKind::int4) {
    *row.unit = quantise_q8(x, blocks, static_cast<Q8Block*>(row.quad), row.lane);
  } else if (kind == WeightKind::int8) {
    *row.unit = quantise_q16(x, blocks, static_cast<Q16Block*>(row.quad), row.lane);
  } else {
    auto* quad = static_cast<FloatBlock*>(row.quad);
    for (int64_t i = 0; i < blocks * kBlock; ++i) quad[i / kBlock].x[i % kBlock][row.lane] = x[i];
    *row.unit = 1.0f;
  }
}

// The results of one tile and row, from its sums.
void finish(const TileRange& range, int64_t tile, int64_t row, const float* acc) {
  const PackedWeight::Impl& weight = *range.weight;
  const float unit = range.units[row];
  float y[kTileRows];
  for (int i = 0; i < kTileRows; ++i) y[i] = acc[i] * unit;
  const int64_t width = weight.paired ? kTileRows / 2 : kTileRows, columns = weight.paired ? weight.n / 2 : weight.n;
  const int64_t first = tile * width, count = columns - first < width ? columns - first : width;
  if (range.bias)
    for (int64_t i = 0; i < count; ++i) {
      y[i] = y[i] + range.bias[first + i];
      if (weight.paired) y[width + i] = y[width + i] + range.bias[columns + first + i];
    }
  float* out = range.out + row * range.out_stride + first;
  if (range.epilogue == Epilogue::silu_mul || range.epilogue == Epilogue::gelu_mul) {
    for (int64_t i = 0; i < count; ++i)
      out[i] = (range.epilogue == Epilogue::silu_mul ? math::silu(y[i]) : math::gelu(y[i])) * y[width + i];
    return;
  }
  for (int64_t part = 0; part < (weight.paired ? 2 : 1); ++part)
    for (int64_t i = 0; i < count; ++i) {
      float& o = out[part * columns + i];
      o = range.epilogue == Epilogue::add ? o + y[part * width + i] : y[part * width + i];
    }
}

// Runs block(weight block, activation block, acc) over a tile's blocks for T rows of a quad.
template <int T, class Block, class F>
inline void one_quad(const TileRange& range, int64_t tile, int64_t quad, F&& block) {
  alignas(64) float acc[T * kTileRows] = {};
  const PackedWeight::Impl& weight = *range.weight;
  const uint8_t* w = weight.data.get() + tile * weight.tile_bytes();
  const Block* x = static_cast<const Block*>(range.quads) + quad * weight.blocks;
  for (int64_t b = 0; b < weight.blocks; ++b, w += weight.block_bytes) block(w, x[b], acc);
  for (int t = 0; t < T; ++t) finish(range, tile, quad * kQuad + t, acc + t * kTileRows);
}

template <int T>
void quad_of(const TileRange& range, int64_t tile, int64_t quad) {
  const bool has_min = range.weight->has_min;
  switch (range.weight->kind) {
    case WeightKind::int4:
      if (has_min) return one_quad<T, Q8Block>(range, tile, quad, int4_block<T, true>);
      return one_quad<T, Q8Block>(range, tile, quad, int4_block<T, false>);
    case WeightKind::int8:
      if (has_min) return one_quad<T, Q16Block>(range, tile, quad, int8_block<T, true>);
      return one_quad<T, Q16Block>(range, tile, quad, int8_block<T, false>);
    case WeightKind::f16: return one_quad<T, FloatBlock>(range, tile, quad, float_block<T, WeightKind::f16>);
    case WeightKind::bf16: return one_quad<T, FloatBlock>(range, tile, quad, float_block<T, WeightKind::bf16>);
    case WeightKind::f32: return one_quad<T, FloatBlock>(range, tile, quad, float_block<T, WeightKind::f32>);
  }
}

void tiles(const TileRange& range) {
  for (int64_t tile = range.tile_begin; tile < range.tile_end; ++tile)
    for (int64_t quad = 0; quad * kQuad < range.rows; ++quad) switch (range.rows - quad * kQuad) {
        case 1: quad_of<1>(range, tile, quad); break;
        case 2: quad_of<2>(range, tile, quad); break;
        case 3: quad_of<3>(range, tile, quad); break;
        default: quad_of<4>(range, tile, quad); break;
      }
}

}  // namespace
}  // namespace gemm

const GemmKernels& gemm_kernels() {
  static const GemmKernels kernels = {gemm::prologue, gemm::tiles};
  return kernels;
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
