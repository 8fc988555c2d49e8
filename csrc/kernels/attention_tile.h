// The query rows that share one reading of a chunk, what each sees of it, and what is known so far.
#pragma once

#include "kernels/attention_kernels.h"
#include "kernels/simd.h"

namespace outrider {
namespace OUTRIDER_ISA {

#if defined(__AVX512F__)
constexpr int kRowBlock = 12;  // query rows of a micro-kernel over 16 columns
#else
constexpr int kRowBlock = 6;
#endif
constexpr int kWideRows = 3;  // so few are taken over 32 columns, for enough chains to run at once

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// What a tile of rows knows of one chunk, or of all chunks so far.
struct Partial {
  float* maximum;  // [rows rounded up to 8]; -inf: nothing seen
  float* sum;      // [rows rounded up to 8]
  float* value;    // [rows, head_dim], not yet divided by the sum

  Partial(float* memory, int rows)
      : maximum(memory), sum(memory + round_up(rows, 8)), value(memory + 2 * round_up(rows, 8)) {}

  void clear(int rows) const {
    for (int r = 0; r < rows; ++r) maximum[r] = kMinusInfinity, sum[r] = 0;
  }
};

// Rows of a micro-kernel, and the positions (in the chunk) that some or all of them see: all of them only
// where the block table says, and some below `table_hi`.
struct RowBlock {
  int first, count;
  int some_lo, some_hi, all_lo, all_hi, table_hi;
};

struct Tile {
  int chunk = -1;  // what lo, hi and leave are of
  int rows, head_dim, group, num_blocks;  // `group` rows, the heads of one query, see the same
  Partial total, part;
  float* query;           // [rows, head_dim], normed, rotated, scaled
  float* weight;          // [rows, chunk]: scores, then their exponentials
  float *keys, *values;   // panels
  float *scale_old, *scale_new;  // [rows rounded up to 8] of a merge
  int *first, *last;      // [rows] absolute positions a row sees: first <= position < last
  int* in_order;          // [rows] where the row's path leaves the block table's slots; `last`: it does not
  int *lo, *hi;           // [rows] first and last in the current chunk; lo == hi: nothing
  int* leave;             // [rows] in_order in the current chunk, lo <= leave <= hi
  RowBlock* blocks;       // [num_blocks]

  static int64_t floats(int rows, int d) {
    const int64_t padded = round_up(rows, 8);
    return round_up(2 * partial_floats(rows, d) + rows * int64_t(d + kChunk) + 8 * padded +
                        padded * int64_t(sizeof(RowBlock) / sizeof(int)) + kChunk * (d + round_up(d, 16)),
                    16);
  }

  Tile(float* memory, int rows, int group, int d)
      : rows(rows), head_dim(d), group(group), num_blocks((rows + kRowBlock - 1) / kRowBlock), total(memory, rows),
        part(memory + partial_floats(rows, d), rows) {
    memory += 2 * partial_floats(rows, d);
    const int64_t padded = round_up(rows, 8);
    const auto take = [&memory](int64_t n) {
      float* start = memory;
      memory += n;
      return start;
    };
    keys = take(int64_t(kChunk) * d);
    values = take(kChunk * round_up(d, 16));
    query = take(int64_t(rows) * d);
    weight = take(int64_t(rows) * kChunk);
    scale_old = take(padded);
    scale_new = take(padded);
    first = reinterpret_cast<int*>(take(padded));
    last = reinterpret_cast<int*>(take(padded));
    in_order = reinterpret_cast<int*>(take(padded));
    lo = reinterpret_cast<int*>(take(padded));
    hi = reinterpret_cast<int*>(take(padded));
    leave = reinterpret_cast<int*>(take(padded));
    blocks = reinterpret_cast<RowBlock*>(memory);
    for (int i = 0, at = 0; i < num_blocks; ++i) {
      blocks[i].first = at;
      blocks[i].count = rows / num_blocks + (i < rows % num_blocks);
      at += blocks[i].count;
    }
  }

  // What the rows together see of a chunk, holes included: from <= position < to.
  void see(int chunk, int& from, int& to) const {
    from = kChunk, to = 0;
    for (int r = 0; r < rows; ++r) {
      from = min_of(from, max_of(first[r] - chunk * kChunk, 0));
      to = max_of(to, min_of(last[r] - chunk * kChunk, kChunk));
    }
  }

  // How many of rows [r, end) belong to the same query as row r.
  int alike(int r, int end) const { return min_of(end, (r / group + 1) * group) - r; }

  // Sets lo, hi, leave and the blocks' ranges.
  void look_at(int which) {
    chunk = which;
    for (int b = 0; b < num_blocks; ++b) {
      RowBlock& block = blocks[b];
      block.some_lo = kChunk, block.some_hi = 0, block.all_lo = 0, block.all_hi = kChunk, block.table_hi = 0;
      for (int r = block.first; r < block.first + block.count; ++r) {
        lo[r] = max_of(first[r] - chunk * kChunk, 0);
        hi[r] = min_of(last[r] - chunk * kChunk, kChunk);
        if (lo[r] >= hi[r]) {
          lo[r] = hi[r] = leave[r] = 0;
          continue;
        }
        block.some_lo = min_of(block.some_lo, lo[r]), block.some_hi = max_of(block.some_hi, hi[r]);
        leave[r] = min_of(max_of(in_order[r] - chunk * kChunk, lo[r]), hi[r]);
        block.all_lo = max_of(block.all_lo, lo[r]), block.all_hi = min_of(block.all_hi, leave[r]);
        block.table_hi = max_of(block.table_hi, leave[r]);
      }
      block.all_hi = max_of(block.all_hi, block.all_lo);
    }
  }
};

}  // namespace OUTRIDER_ISA
}  // namespace outrider
