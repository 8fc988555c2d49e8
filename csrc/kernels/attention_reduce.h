// One chunk reduced for a tile of rows, and chunks merged.
//
// What fixes a row's bits, and nothing else does:
//   score(position)  one chain of fma over head_dim, ascending, from zero
//   chunk maximum    order does not matter
//   chunk sum        16 lanes (position mod 16), folded in one order; masked positions add +0
//   chunk values     per head_dim lane one chain of fma over the row's visible positions, ascending
//   merge            chunks left to right, `merge_chunk`
// Tiles, panels and micro-kernels below only choose how many such chains run side by side. Values of
// masked positions are never read for a row; scores of masked positions are replaced by -inf.
#pragma once

#include "kernels/attention_chunk.h"
#include "kernels/attention_multiply.h"
#include "kernels/attention_tile.h"
#include "kernels/attention_tree.h"

namespace outrider {
namespace OUTRIDER_ISA {

template <int n>
struct Width {
  static constexpr int value = n;
};

// Scores of positions [lo, hi) for the rows that see them; lo and hi are rounded outwards, the rest is masked
// later.
template <class Chunk>
void score(const Chunk& chunk, Tile& tile, int lo, int hi, Fetch fetch) {
  using T = typename Chunk::Type;
  const int d = tile.head_dim;
  const bool few = tile.num_blocks == 1 && tile.blocks[0].count <= kWideRows;
  fetch.pace(((hi - lo / 16 * 16) + 15) / (few && chunk.has_32_keys(0) ? 32 : 16) * d * tile.num_blocks + 1);
  for (int at = lo / 16 * 16, width; at < hi; at += width) {
    const bool wide = few && chunk.has_32_keys(at) && at + 16 < hi;
    width = wide ? 32 : 16;
    const T* keys = chunk.key(at);
    for (int b = 0; b < tile.num_blocks; ++b) {
      const RowBlock& block = tile.blocks[b];
      if (at >= block.table_hi || at + width <= block.some_lo) continue;
      const float* query = tile.query + block.first * d;
      float* to = tile.weight + block.first * kChunk + at;
      if (wide)
        multiply_rows<T, 4, true>(block.count, query, d, keys, chunk.key_stride(), to, kChunk, d, fetch);
      else
        multiply_rows<T, 2, true>(block.count, query, d, keys, chunk.key_stride(), to, kChunk, d, fetch);
    }
  }
}

// The chunk's maximum of each row, and its masked scores replaced by -inf.
inline void find_maxima(Tile& tile, const Partial& part) {
  for (int b = 0; b < tile.num_blocks; ++b) {
    const RowBlock& block = tile.blocks[b];
    const int begin = block.some_lo / 16 * 16, end = int(round_up(block.some_hi, 16));
    for (int r = block.first; r < block.first + block.count; ++r) {
      float* score = tile.weight + r * kChunk;
      F16 most = splat16(kMinusInfinity);
      for (int i = begin; i < end; i += 16) {
        F16 x = load16(score + i);
        if (i < tile.lo[r] || i + 16 > tile.hi[r]) {
          x = keep_inside16(x, i, tile.lo[r], tile.hi[r]);
          store16(score + i, x);
        }
        most = max16(x, most);
      }
      part.maximum[r] = max_lanes(max8(low_half(most), high_half(most)));
    }
  }
}

// Scores to exponentials, with the chunk's sums. A row that sees nothing gets zeros.
inline void exponentiate(Tile& tile, const Partial& part) {
  for (int b = 0; b < tile.num_blocks; ++b) {
    const RowBlock& block = tile.blocks[b];
    const int begin = block.some_lo / 16 * 16, end = int(round_up(block.some_hi, 16));
    for (int r = block.first; r < block.first + block.count; ++r) {
      float* weight = tile.weight + r * kChunk;
      const F16 shift = splat16(tile.lo[r] == tile.hi[r] ? 0.0f : part.maximum[r]);
      F16 sum = splat16(0.0f);
      for (int i = begin; i < end; i += 16) {
        const F16 x = exp16(sub16(load16(weight + i), shift));
        store16(weight + i, x);
        sum = add16(sum, x);
      }
      part.sum[r] = sum_lanes(math::add(low_half(sum), high_half(sum)));
    }
  }
}

// value[rows][8 NV] += weights * values of positions [lo, hi).
template <int NV, class Chunk>
inline void weigh_run(const Chunk& chunk, int rows, const float* weight, int lo, int hi, int column, float* value,
                      int64_t stride, Fetch& fetch) {
  while (lo < hi) {
    const int run = min_of(hi - lo, chunk.value_run(lo));
    multiply_rows<typename Chunk::Type, NV, false>(rows, weight + lo, kChunk, chunk.value(lo, column),
                                                   chunk.value_stride(), value, stride, run, fetch);
    lo += run;
  }
}

// Positions that only some rows of a block see are taken query by query: a chain runs over what its row sees and
// nothing else, and in order.
template <int NV, class Chunk, class T>
inline void weigh_columns(const Chunk& chunk, const Tile& tile, const RowBlock& block, const Branches<T>& branches,
                          const Partial& part, int column, Fetch& fetch) {
  const int d = tile.head_dim, end = block.first + block.count;
  const auto ragged = [&](int from, int to) {
    for (int r = block.first, rows; r < end; r += rows) {
      rows = tile.alike(r, end);
      weigh_run<NV>(chunk, rows, tile.weight + r * kChunk, max_of(tile.lo[r], from), min_of(tile.leave[r], to), column,
                    part.value + r * d + column, d, fetch);
    }
  };
  if (block.some_lo < block.all_lo) ragged(0, block.all_lo);
  weigh_run<NV>(chunk, block.count, tile.weight + block.first * kChunk, block.all_lo, block.all_hi, column,
                part.value + block.first * d + column, d, fetch);
  if (block.all_hi < block.table_hi) ragged(block.all_hi, kChunk);
  if (branches) branches.template weigh<NV>(tile, block, part, column, fetch);
}

// The chunk's weighted values. Few rows are taken over wide runs of columns, so that enough chains run at once.
template <class Chunk, class T>
void weigh(const Chunk& chunk, const Tile& tile, const Branches<T>& branches, const Partial& part, int lo, int hi,
           Fetch fetch) {
  const int d = tile.head_dim;
  for (int i = 0; i < tile.rows * d; i += 8) store8(part.value + i, splat8(0.0f));
  int column = 0;
  const bool wide = Chunk::kWide && tile.num_blocks == 1 && tile.blocks[0].count <= kWideRows;
  fetch.pace(d / (wide ? 32 : 16) * (hi - lo) * tile.num_blocks + 1);
  const auto columns = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    for (; column + 8 * kWidth <= d; column += 8 * kWidth)
      for (int b = 0; b < tile.num_blocks; ++b)
        if (tile.blocks[b].some_lo < tile.blocks[b].some_hi)
          weigh_columns<kWidth>(chunk, tile, tile.blocks[b], branches, part, column, fetch);
  };
  if (wide) columns(Width<4>());
  columns(Width<2>());
  columns(Width<1>());
}

// total = total merged with the chunk to its right. Rows that see nothing of the chunk stay as they are.
inline void merge_chunk(const Partial& total, const Partial& part, int rows, int d, float* scale_old,
                        float* scale_new) {
  for (int r = 0; r < rows; r += 8) {
    const F8 old_maximum = load8(total.maximum + r), new_maximum = load8(part.maximum + r);
    const F8 maximum = max8(new_maximum, old_maximum);
    store8(scale_old + r, math::exp(math::sub(old_maximum, maximum)));
    store8(scale_new + r, math::exp(math::sub(new_maximum, maximum)));
  }
  for (int r = 0; r < rows; ++r) {
    if (part.maximum[r] == kMinusInfinity) continue;
    float* to = total.value + r * d;
    const float* from = part.value + r * d;
    if (total.maximum[r] == kMinusInfinity) {
      total.maximum[r] = part.maximum[r];
      total.sum[r] = part.sum[r];
      for (int i = 0; i < d; i += 8) store8(to + i, load8(from + i));
      continue;
    }
    const F8 a = splat8(scale_old[r]), b = splat8(scale_new[r]);
    total.maximum[r] = part.maximum[r] > total.maximum[r] ? part.maximum[r] : total.maximum[r];
    total.sum[r] = total.sum[r] * scale_old[r] + part.sum[r] * scale_new[r];
    for (int i = 0; i < d; i += 8)
      store8(to + i, math::fma(load8(to + i), a, math::mul(load8(from + i), b)));
  }
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
