// Attention of a tile of query rows to the chunks of one kv head. What fixes the bits: attention_reduce.h.
#include "kernels/attention_kernels.h"
#include "kernels/attention_reduce.h"
#include "kernels/simd_norm.h"
#include "kernels/simd_rope.h"

namespace outrider {
namespace OUTRIDER_ISA {
namespace {

// From so many rows on, a chunk is first converted to floats. An instruction that converts eight at once hides
// behind the products of every row block: then the cache is read as it is.
#if defined(__AVX2__) || defined(__ARM_NEON)
constexpr int kPanelRows = 1 << 30;
#else
constexpr int kPanelRows = 2;
#endif
constexpr int kAppendRows = 64;  // rows of k transposed at a time

int64_t append_floats(int head_dim) { return int64_t(2) * kAppendRows * head_dim; }

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

void set_limits(const AttentionBatch& batch, const AttentionArgs& args, const AttentionUnit& unit, Tile& tile) {
  int i = 0;
  for (int64_t row = unit.row_begin; row < unit.row_end; ++row)
    for (int g = 0; g < tile.group; ++g, ++i) {
      tile.last[i] = batch.positions[row] + 1;
      tile.in_order[i] = batch.trees ? batch.trees->in_order(row) : tile.last[i];
      tile.first[i] = args.window > 0 ? max_of(tile.last[i] - args.window, 0) : 0;
    }
}

void load_queries(const AttentionBatch& batch, const AttentionArgs& args, const AttentionUnit& unit, Tile& tile) {
  const int d = tile.head_dim, group = args.heads / args.cache->kv_heads;
  const F8 scale = splat8(args.scale);
  float* query = tile.query;
  for (int64_t row = unit.row_begin; row < unit.row_end; ++row)
    for (int g = 0; g < group; ++g, query += d) {
      const float* head = args.q + row * args.q_stride + (unit.kv_head * group + g) * d;
      prepare(args, head, args.q_norm, batch.positions[row], query);
      for (int j = 0; j < d; j += 8) store8(query + j, math::mul(load8(query + j), scale));
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

// Rows that go to neighbouring slots are prepared together, so that keys are written in runs of positions.
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

Tile make_tile(const AttentionArgs& args, const AttentionUnit& unit, float* scratch) {
  const int group = args.heads / args.cache->kv_heads;
  return Tile(scratch, int(unit.row_end - unit.row_begin) * group, group, args.cache->head_dim);
}

// Memory that another core has had is asked for before it is written: stores would wait for it line by line.
void take_over(float* memory, int64_t floats) {
  for (int64_t i = 0; i < floats; i += 16) {
#if defined(__AVX2__)
    asm volatile("prefetchw %0" ::"m"(memory[i]));
#else
    __builtin_prefetch(memory + i, 1, 3);
#endif
  }
}

template <class T>
void attend_typed(const AttentionBatch& batch, const AttentionArgs& args, const AttentionUnit& unit, float* scratch) {
  Tile tile = make_tile(args, unit, scratch);
  float* staging = scratch + Tile::floats(tile.rows, tile.head_dim);
  set_limits(batch, args, unit, tile);
  const auto chunk_at = [&](int chunk) {
    int lo, hi;
    tile.see(chunk, lo, hi);
    return CacheChunk<T>(batch, args, unit, chunk, lo, hi);
  };
  CacheChunk<T> here = chunk_at(unit.chunk_begin);
  Fetch(here, here.key_blocks).all_now();
  if (unit.append)
    append_typed<T>(batch, args, unit.row_begin, unit.row_end, unit.kv_head, int64_t(unit.chunk_begin) * kChunk,
                    int64_t(unit.chunk_end) * kChunk, staging);
  load_queries(batch, args, unit, tile);
  Branches<T> branches(batch, args, unit, tile, staging + append_floats(tile.head_dim));
  if (branches) branches.score(tile, Fetch(here, here.key_blocks));

  const int64_t stride = partial_floats(tile.rows, tile.head_dim);
  if (!unit.partials) tile.total.clear(tile.rows);
  for (int chunk = unit.chunk_begin; chunk < unit.chunk_end; ++chunk) {
    const Partial part =
        unit.partials ? Partial(unit.partials + (chunk - unit.chunk_begin) * stride, tile.rows) : tile.part;
    if (unit.partials) take_over(part.maximum, stride);
    const CacheChunk<T> next = chunk_at(min_of(chunk + 1, unit.chunk_end - 1));
    tile.look_at(chunk);
    const auto reduce = [&](const auto& source) {
      score(source, tile, here.lo, here.hi, Fetch(here, here.value_blocks));
      if (branches) branches.place_scores(tile);
      find_maxima(tile, part);
      exponentiate(tile, part);
      weigh(source, tile, branches, part, here.lo, here.hi, Fetch(next, next.key_blocks));
    };
    if (tile.rows >= kPanelRows)
      reduce(to_panels(here, tile.keys, tile.values));
    else
      reduce(here);
    if (!unit.partials)
      merge_chunk(tile.total, part, tile.rows, tile.head_dim, tile.scale_old, tile.scale_new);
    here = next;
  }
  if (!unit.partials) write_result(args, unit, tile.total);
}

void attend(const AttentionBatch& batch, const AttentionArgs& args, const AttentionUnit& unit, float* scratch) {
  const auto typed = args.cache->type == CacheType::f16    ? attend_typed<Half>
                     : args.cache->type == CacheType::bf16 ? attend_typed<BFloat>
                                                           : attend_typed<float>;
  typed(batch, args, unit, scratch);
}

void merge(const AttentionArgs& args, const AttentionUnit& unit, float* scratch) {
  Tile tile = make_tile(args, unit, scratch);
  const int64_t stride = partial_floats(tile.rows, tile.head_dim);
  tile.total.clear(tile.rows);
  for (int chunk = unit.chunk_begin; chunk < unit.chunk_end; ++chunk)
    merge_chunk(tile.total, Partial(unit.partials + (chunk - unit.chunk_begin) * stride, tile.rows), tile.rows,
                tile.head_dim, tile.scale_old, tile.scale_new);
  write_result(args, unit, tile.total);
}

int64_t scratch_floats(int rows, int head_dim, int panels) {
  return Tile::floats(rows, head_dim) + append_floats(head_dim) + int64_t(rows) * panels * kPanelSlots;
}

}  // namespace

const AttentionKernels& attention_kernels() {
  static const AttentionKernels kernels{scratch_floats, append, attend, merge};
  return kernels;
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
