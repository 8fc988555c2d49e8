// Attention of a tile of query rows to the chunks of one kv head.
//
// What fixes a row's bits, and nothing else does:
//   score(position)  one chain of fma over head_dim, ascending, from zero
//   chunk maximum    order does not matter
//   chunk sum        16 lanes (position mod 16), folded in one order; masked positions add +0
//   chunk values     per head_dim lane one chain of fma over the row's visible positions, ascending
//   merge            chunks left to right, `merge_chunk`
// Tiles, panels and micro-kernels below only choose how many such chains run side by side. Values of
// masked positions are never read for a row; scores of masked positions are replaced by -inf.
#include "kernels/attention_kernels.h"
#include "kernels/simd.h"
#include "kernels/simd_norm.h"
#include "kernels/simd_rope.h"

namespace outrider {
namespace OUTRIDER_ISA {
namespace {

constexpr int kRowBlock = 6;    // query rows of a micro-kernel
constexpr int kPanelRows = 13;  // from so many rows on, a chunk is converted to float panels first
constexpr int kAppendRows = 64;  // rows of k transposed at a time

template <int n>
struct Width {
  static constexpr int value = n;
};

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// c[R][8 NV] += a[R][k] * b[k][8 NV], each element one chain over k; from zero when `kFromZero`.
template <class T, int R, int NV, bool kFromZero>
inline void multiply(const float* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t ldc, int k) {
  F8 acc[R][NV];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = kFromZero ? splat8(0.0f) : load8(c + r * ldc + 8 * v);
  for (int i = 0; i < k; ++i, b += ldb) {
    F8 column[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) column[v] = load8(b + 8 * v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F8 x = splat8(a[r * lda + i]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[r][v] = math::fma(x, column[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) store8(c + r * ldc + 8 * v, acc[r][v]);
}

template <class T, int NV, bool kFromZero>
inline void multiply_rows(int rows, const float* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t ldc, int k) {
  switch (rows) {
    case 1: return multiply<T, 1, NV, kFromZero>(a, lda, b, ldb, c, ldc, k);
    case 2: return multiply<T, 2, NV, kFromZero>(a, lda, b, ldb, c, ldc, k);
    case 3: return multiply<T, 3, NV, kFromZero>(a, lda, b, ldb, c, ldc, k);
    case 4: return multiply<T, 4, NV, kFromZero>(a, lda, b, ldb, c, ldc, k);
    case 5: return multiply<T, 5, NV, kFromZero>(a, lda, b, ldb, c, ldc, k);
    default: return multiply<T, 6, NV, kFromZero>(a, lda, b, ldb, c, ldc, k);
  }
}

// One chunk of the cache where it lies.
template <class T>
struct CacheChunk {
  using Type = T;
  static constexpr bool kWide = true;
  const T* key_blocks[kChunk / 16];
  const T* value_blocks[kChunk / 16];
  int block_size, head_dim;

  CacheChunk(const AttentionBatch& batch, const AttentionArgs& args, const AttentionUnit& unit, int chunk, int lo, int hi)
      : block_size(args.cache->block_size), head_dim(args.cache->head_dim) {
    const KVCache& cache = *args.cache;
    const int64_t slab = int64_t(block_size) * head_dim;
    const T* keys = reinterpret_cast<const T*>(cache.keys(args.layer)) + unit.kv_head * slab;
    const T* values = reinterpret_cast<const T*>(cache.values(args.layer)) + unit.kv_head * slab;
    const int per_chunk = kChunk / block_size;
    const int32_t* table = batch.block_tables + unit.request * batch.max_blocks + int64_t(chunk) * per_chunk;
    for (int i = lo / block_size; i * block_size < hi; ++i) {  // entries of unneeded blocks may hold anything
      key_blocks[i] = keys + table[i] * cache.kv_heads * slab;
      value_blocks[i] = values + table[i] * cache.kv_heads * slab;
    }
  }

  const T* key(int position) const { return key_blocks[position / block_size] + position % block_size; }
  int64_t key_stride() const { return block_size; }
  bool has_32_keys(int position) const { return block_size % 32 == 0 && position % 32 == 0; }
  const T* value(int position, int column) const {
    return value_blocks[position / block_size] + (position % block_size) * head_dim + column;
  }
  int64_t value_stride() const { return head_dim; }
  int value_run(int position) const { return block_size - position % block_size; }
};

// The same in floats, in the order in which the micro-kernels read: keys [chunk / 16][head_dim][16],
// values [head_dim / 16][chunk][16].
struct PanelChunk {
  using Type = float;
  static constexpr bool kWide = false;  // panels hold 16 columns side by side
  const float* keys;
  const float* values;
  int head_dim;

  const float* key(int position) const { return keys + position * head_dim; }
  int64_t key_stride() const { return 16; }
  bool has_32_keys(int) const { return false; }
  const float* value(int position, int column) const {
    return values + (column / 16 * kChunk + position) * 16 + column % 16;
  }
  int64_t value_stride() const { return 16; }
  int value_run(int position) const { return kChunk - position; }
};

template <class T>
PanelChunk to_panels(const CacheChunk<T>& chunk, int lo, int hi, float* keys, float* values) {
  const int d = chunk.head_dim;
  for (int position = lo / 16 * 16; position < hi; position += 16) {
    const T* from = chunk.key(position);
    float* to = keys + position * d;
    for (int i = 0; i < d; ++i, from += chunk.key_stride(), to += 16) {
      store8(to, load8(from));
      store8(to + 8, load8(from + 8));
    }
  }
  for (int position = lo; position < hi; ++position) {
    const T* from = chunk.value(position, 0);
    for (int i = 0; i < d; i += 8) store8(values + (i / 16 * kChunk + position) * 16 + i % 16, load8(from + i));
  }
  return {keys, values, d};
}

// What a tile of rows knows of one chunk, or of all chunks so far.
struct Partial {
  float* maximum;  // [rows rounded up to 8]; -inf: nothing seen
  float* sum;      // [rows rounded up to 8]
  float* value;    // [rows, head_dim], not yet divided by the sum

  Partial(float* memory, int rows)
      : maximum(memory), sum(memory + round_up(rows, 8)), value(memory + 2 * round_up(rows, 8)) {}
};

// Rows of a micro-kernel, and the positions (in the chunk) that some or all of them see.
struct RowBlock {
  int first, count;
  int some_lo, some_hi, all_lo, all_hi;
};

struct Tile {
  int rows, head_dim, num_blocks;
  float* query;   // [rows, head_dim], normed, rotated, scaled
  float* weight;  // [rows, chunk]: scores, then their exponentials
  int *first, *last;  // [rows] absolute positions a row sees: first <= position < last
  int *lo, *hi;       // [rows] the same in the current chunk; lo == hi: nothing
  RowBlock* blocks;   // [num_blocks]
  float *keys, *values;  // panels
  float *scale_old, *scale_new;  // [rows rounded up to 8]
  Partial total, part;

  static int64_t floats(int rows, int d) {
    const int64_t padded = round_up(rows, 8);
    return 2 * partial_floats(rows, d) + rows * int64_t(d + kChunk) + 6 * padded +
           padded * int64_t(sizeof(RowBlock) / sizeof(int)) + kChunk * (d + round_up(d, 16));
  }

  Tile(float* memory, int rows, int d) : rows(rows), head_dim(d), total(nullptr, rows), part(nullptr, rows) {
    const int64_t padded = round_up(rows, 8);
    const auto take = [&memory](int64_t n) {
      float* start = memory;
      memory += n;
      return start;
    };
    total = Partial(take(partial_floats(rows, d)), rows);
    part = Partial(take(partial_floats(rows, d)), rows);
    keys = take(int64_t(kChunk) * d);
    values = take(kChunk * round_up(d, 16));
    query = take(int64_t(rows) * d);
    weight = take(int64_t(rows) * kChunk);
    scale_old = take(padded);
    scale_new = take(padded);
    first = reinterpret_cast<int*>(take(padded));
    last = reinterpret_cast<int*>(take(padded));
    lo = reinterpret_cast<int*>(take(padded));
    hi = reinterpret_cast<int*>(take(padded));
    blocks = reinterpret_cast<RowBlock*>(memory);
    num_blocks = int(round_up(rows, kRowBlock) / kRowBlock);
    for (int i = 0, at = 0; i < num_blocks; ++i) {
      blocks[i].first = at;
      blocks[i].count = rows / num_blocks + (i < rows % num_blocks);
      at += blocks[i].count;
    }
  }

  // Sets lo, hi and the blocks' ranges; returns what some row sees of the chunk.
  RowBlock look_at(int chunk) {
    RowBlock whole{0, rows, kChunk, 0, 0, 0};
    for (int b = 0; b < num_blocks; ++b) {
      RowBlock& block = blocks[b];
      block.some_lo = kChunk, block.some_hi = 0, block.all_lo = 0, block.all_hi = kChunk;
      for (int r = block.first; r < block.first + block.count; ++r) {
        lo[r] = max_of(first[r] - chunk * kChunk, 0);
        hi[r] = min_of(last[r] - chunk * kChunk, kChunk);
        if (lo[r] >= hi[r]) {
          lo[r] = hi[r] = 0;
          continue;
        }
        block.some_lo = min_of(block.some_lo, lo[r]), block.some_hi = max_of(block.some_hi, hi[r]);
        block.all_lo = max_of(block.all_lo, lo[r]), block.all_hi = min_of(block.all_hi, hi[r]);
      }
      block.all_hi = max_of(block.all_hi, block.all_lo);
      whole.some_lo = min_of(whole.some_lo, block.some_lo), whole.some_hi = max_of(whole.some_hi, block.some_hi);
    }
    return whole;
  }
};

template <class Chunk>
void score(const Chunk& chunk, Tile& tile, int lo, int hi) {
  using T = typename Chunk::Type;
  const int d = tile.head_dim;
  for (int at = lo / 16 * 16, width; at < hi; at += width) {
    const bool wide = tile.num_blocks == 1 && tile.blocks[0].count <= 3 && chunk.has_32_keys(at) && at + 16 < hi;
    width = wide ? 32 : 16;
    const T* keys = chunk.key(at);
    for (int b = 0; b < tile.num_blocks; ++b) {
      const RowBlock& block = tile.blocks[b];
      if (at >= block.some_hi || at + width <= block.some_lo) continue;
      const float* query = tile.query + block.first * d;
      float* to = tile.weight + block.first * kChunk + at;
      if (wide)
        multiply_rows<T, 4, true>(block.count, query, d, keys, chunk.key_stride(), to, kChunk, d);
      else
        multiply_rows<T, 2, true>(block.count, query, d, keys, chunk.key_stride(), to, kChunk, d);
    }
  }
}

// Scores to exponentials, with the chunk's maximum and sum.
void soften(Tile& tile, const Partial& part) {
  for (int b = 0; b < tile.num_blocks; ++b) {
    const RowBlock& block = tile.blocks[b];
    const int begin = block.some_lo / 16 * 16, end = int(round_up(block.some_hi, 16));
    for (int r = block.first; r < block.first + block.count; ++r) {
      float* weight = tile.weight + r * kChunk;
      const int lo = tile.lo[r], hi = tile.hi[r];
      if (lo == hi) {
        for (int i = begin; i < end; i += 8) store8(weight + i, splat8(0.0f));
        part.maximum[r] = kMinusInfinity;
        part.sum[r] = 0;
        continue;
      }
      F8 maximum = splat8(kMinusInfinity);
      for (int i = begin; i < end; i += 8) {
        F8 x = load8(weight + i);
        if (i < lo || i + 8 > hi) {
          x = keep_inside(x, i, lo, hi);
          store8(weight + i, x);
        }
        maximum = max8(x, maximum);
      }
      part.maximum[r] = max_lanes(maximum);
      const F8 shift = splat8(part.maximum[r]);
      F8 sum0 = splat8(0.0f), sum1 = splat8(0.0f);
      for (int i = begin; i < end; i += 16) {
        const F8 x0 = math::exp(math::sub(load8(weight + i), shift));
        const F8 x1 = math::exp(math::sub(load8(weight + i + 8), shift));
        store8(weight + i, x0);
        store8(weight + i + 8, x1);
        sum0 = math::add(sum0, x0);
        sum1 = math::add(sum1, x1);
      }
      part.sum[r] = sum_lanes(math::add(sum0, sum1));
    }
  }
}

// value[rows][8 NV] += weights * values of positions [lo, hi).
template <int NV, class Chunk>
inline void weigh_run(const Chunk& chunk, int rows, const float* weight, int lo, int hi, int column, float* value,
                      int64_t stride) {
  while (lo < hi) {
    const int run = min_of(hi - lo, chunk.value_run(lo));
    multiply_rows<typename Chunk::Type, NV, false>(rows, weight + lo, kChunk, chunk.value(lo, column),
                                                   chunk.value_stride(), value, stride, run);
    lo += run;
  }
}

template <int NV, class Chunk>
inline void weigh_columns(const Chunk& chunk, const Tile& tile, const RowBlock& block, const Partial& part, int column) {
  const int d = tile.head_dim, end = block.first + block.count;
  const auto ragged = [&](int from, int to) {
    for (int r = block.first; r < end; ++r)
      weigh_run<NV>(chunk, 1, tile.weight + r * kChunk, max_of(tile.lo[r], from), min_of(tile.hi[r], to), column,
                    part.value + r * d + column, d);
  };
  if (block.some_lo < block.all_lo) ragged(0, block.all_lo);
  weigh_run<NV>(chunk, block.count, tile.weight + block.first * kChunk, block.all_lo, block.all_hi, column,
                part.value + block.first * d + column, d);
  if (block.all_hi < block.some_hi) ragged(block.all_hi, kChunk);
}

template <class Chunk>
void weigh(const Chunk& chunk, const Tile& tile, const Partial& part) {
  const int d = tile.head_dim;
  for (int i = 0; i < tile.rows * d; i += 8) store8(part.value + i, splat8(0.0f));
  int column = 0;
  const bool wide = Chunk::kWide && tile.num_blocks == 1 && tile.blocks[0].count <= 3;
  const auto columns = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    for (; column + 8 * kWidth <= d; column += 8 * kWidth)
      for (int b = 0; b < tile.num_blocks; ++b)
        if (tile.blocks[b].some_lo < tile.blocks[b].some_hi)
          weigh_columns<kWidth>(chunk, tile, tile.blocks[b], part, column);
  };
  if (wide) columns(Width<4>());
  columns(Width<2>());
  columns(Width<1>());
}

// total = total merged with the chunk to its right. Rows that see nothing of the chunk stay as they are.
void merge_chunk(const Partial& total, const Partial& part, int rows, int d, float* scale_old, float* scale_new) {
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
    for (int i = 0; i < d; i += 8) store8(to + i, math::fma(load8(to + i), a, math::mul(load8(from + i), b)));
  }
}

void clear(const Partial& total, int rows) {
  for (int r = 0; r < rows; ++r) {
    total.maximum[r] = kMinusInfinity;
    total.sum[r] = 0;
  }
}

// Copies a head with norm and RoPE applied.
void prepare(const AttentionArgs& args, const float* head, const float* norm, int32_t position, float* out) {
  const int d = args.cache->head_dim;
  if (norm)
    rms_norm(out, head, norm, args.norm_eps, d);
  else
    for (int i = 0; i < d; i += 8) store8(out + i, load8(head + i));
  if (!args.rope) return;
  const RopeTable& rope = *args.rope;
  const int64_t half = rope.rotary_dim / 2, at = position * half;
  rope_head(out, rope.cos.data() + at, rope.sin.data() + at, half, rope.layout == RopeLayout::interleaved);
}

void load_queries(const AttentionBatch& batch, const AttentionArgs& args, const AttentionUnit& unit, Tile& tile) {
  const int d = tile.head_dim, group = args.heads / args.cache->kv_heads;
  const F8 scale = splat8(args.scale);
  int i = 0;
  for (int64_t row = unit.row_begin; row < unit.row_end; ++row)
    for (int g = 0; g < group; ++g, ++i) {
      const int32_t position = batch.positions[row];
      float* query = tile.query + i * d;
      prepare(args, args.q + row * args.q_stride + (unit.kv_head * group + g) * d, args.q_norm, position, query);
      for (int j = 0; j < d; j += 8) store8(query + j, math::mul(load8(query + j), scale));
      tile.last[i] = position + 1;
      tile.first[i] = args.window > 0 ? max_of(position + 1 - args.window, 0) : 0;
    }
}

void write_result(const AttentionArgs& args, const AttentionUnit& unit, const Partial& total) {
  const int d = args.cache->head_dim, group = args.heads / args.cache->kv_heads;
  int i = 0;
  for (int64_t row = unit.row_begin; row < unit.row_end; ++row)
    for (int g = 0; g < group; ++g, ++i) {
      const F8 inverse = splat8(1.0f / total.sum[i]);
      float* out = args.out + row * args.out_stride + (unit.kv_head * group + g) * d;
      for (int j = 0; j < d; j += 8) store8(out + j, math::mul(load8(total.value + i * d + j), inverse));
    }
}

template <class T>
void append_typed(const AttentionBatch& batch, const AttentionArgs& args, int64_t row_begin, int64_t row_end,
                  int kv_head, int64_t first_position, int64_t last_position, float* scratch) {
  const KVCache& cache = *args.cache;
  const int d = cache.head_dim, block_size = cache.block_size;
  T* staging = reinterpret_cast<T*>(scratch + kAppendRows * d);
  const auto wanted = [&](int64_t row) {
    return batch.positions[row] >= first_position && batch.positions[row] < last_position;
  };
  for (int64_t row = row_begin, rows; row < row_end; row += rows) {
    rows = 1;
    if (!wanted(row)) continue;
    const int64_t slot = batch.slot_mapping[row], block = slot / block_size;
    while (row + rows < row_end && rows < kAppendRows && wanted(row + rows) &&
           batch.slot_mapping[row + rows] == slot + rows && (slot + rows) / block_size == block)
      ++rows;
    const int64_t slab = (block * cache.kv_heads + kv_head) * block_size * d;
    T* keys = reinterpret_cast<T*>(cache.keys(args.layer)) + slab;
    T* values = reinterpret_cast<T*>(cache.values(args.layer)) + slab;
    const int offset = int(slot % block_size);
    for (int64_t r = 0; r < rows; ++r)
      prepare(args, args.k + (row + r) * args.k_stride + kv_head * d, args.k_norm, batch.positions[row + r],
              scratch + r * d);
    for (int64_t i = 0; i < rows * d; i += 8) store8(staging + i, load8(scratch + i));
    for (int i = 0; i < d; ++i)
      for (int64_t r = 0; r < rows; ++r) keys[i * block_size + offset + r] = staging[r * d + i];
    for (int64_t r = 0; r < rows; ++r) {
      const float* value = args.v + (row + r) * args.v_stride + kv_head * d;
      for (int i = 0; i < d; i += 8) store8(values + (offset + r) * d + i, load8(value + i));
    }
  }
}

void append(const AttentionBatch& batch, const AttentionArgs& args, int64_t row_begin, int64_t row_end, int kv_head,
            int64_t first_position, int64_t last_position, float* scratch) {
  const auto typed = args.cache->type == CacheType::f16    ? append_typed<Half>
                     : args.cache->type == CacheType::bf16 ? append_typed<BFloat>
                                                           : append_typed<float>;
  typed(batch, args, row_begin, row_end, kv_head, first_position, last_position, scratch);
}

template <class T>
void attend_typed(const AttentionBatch& batch, const AttentionArgs& args, const AttentionUnit& unit, Tile& tile) {
  const int64_t stride = partial_floats(tile.rows, tile.head_dim);
  if (!unit.partials) clear(tile.total, tile.rows);
  for (int chunk = unit.chunk_begin; chunk < unit.chunk_end; ++chunk) {
    const Partial part =
        unit.partials ? Partial(unit.partials + (chunk - unit.chunk_begin) * stride, tile.rows) : tile.part;
    const RowBlock seen = tile.look_at(chunk);
    const CacheChunk<T> cached(batch, args, unit, chunk, seen.some_lo, seen.some_hi);
    const auto reduce = [&](const auto& source) {
      score(source, tile, seen.some_lo, seen.some_hi);
      soften(tile, part);
      weigh(source, tile, part);
    };
    if (tile.rows >= kPanelRows)
      reduce(to_panels(cached, seen.some_lo, seen.some_hi, tile.keys, tile.values));
    else
      reduce(cached);
    if (!unit.partials)
      merge_chunk(tile.total, part, tile.rows, tile.head_dim, tile.scale_old, tile.scale_new);
  }
  if (!unit.partials) write_result(args, unit, tile.total);
}

int num_rows(const AttentionArgs& args, const AttentionUnit& unit) {
  return int(unit.row_end - unit.row_begin) * (args.heads / args.cache->kv_heads);
}

void attend(const AttentionBatch& batch, const AttentionArgs& args, const AttentionUnit& unit, float* scratch) {
  if (unit.append)
    append(batch, args, unit.row_begin, unit.row_end, unit.kv_head, int64_t(unit.chunk_begin) * kChunk,
           int64_t(unit.chunk_end) * kChunk, scratch);
  Tile tile(scratch, num_rows(args, unit), args.cache->head_dim);
  load_queries(batch, args, unit, tile);
  const auto typed = args.cache->type == CacheType::f16    ? attend_typed<Half>
                     : args.cache->type == CacheType::bf16 ? attend_typed<BFloat>
                                                           : attend_typed<float>;
  typed(batch, args, unit, tile);
}

void merge(const AttentionArgs& args, const AttentionUnit& unit, float* scratch) {
  Tile tile(scratch, num_rows(args, unit), args.cache->head_dim);
  const int64_t stride = partial_floats(tile.rows, tile.head_dim);
  clear(tile.total, tile.rows);
  for (int chunk = unit.chunk_begin; chunk < unit.chunk_end; ++chunk)
    merge_chunk(tile.total, Partial(unit.partials + (chunk - unit.chunk_begin) * stride, tile.rows), tile.rows,
                tile.head_dim, tile.scale_old, tile.scale_new);
  write_result(args, unit, tile.total);
}

int64_t scratch_floats(int rows, int head_dim) {
  const int64_t tile = Tile::floats(rows, head_dim), append = int64_t(2) * kAppendRows * head_dim;
  return tile > append ? tile : append;
}

}  // namespace

const AttentionKernels& attention_kernels() {
  static const AttentionKernels kernels{scratch_floats, append, attend, merge};
  return kernels;
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
