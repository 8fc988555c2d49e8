// 128 positions of keys and values: where they lie in the cache, or converted to floats.
#pragma once

#include "kernels/attention_kernels.h"
#include "kernels/simd.h"

namespace outrider {
namespace OUTRIDER_ISA {

// One chunk of the cache where it lies; only blocks that hold positions [lo, hi) of it are known.
template <class T>
struct CacheChunk {
  using Type = T;
  static constexpr bool kWide = true;
  const T* key_blocks[kChunk / 16];
  const T* value_blocks[kChunk / 16];
  int block_size, head_dim, lo, hi;

  CacheChunk(const AttentionBatch& batch, const AttentionArgs& args, const AttentionUnit& unit, int chunk, int lo,
             int hi)
      : block_size(args.cache->block_size), head_dim(args.cache->head_dim), lo(lo), hi(hi) {
    const KVCache& cache = *args.cache;
    const int64_t slab = int64_t(block_size) * head_dim;
    const T* keys = reinterpret_cast<const T*>(cache.keys(args.layer)) + unit.kv_head * slab;
    const T* values = reinterpret_cast<const T*>(cache.values(args.layer)) + unit.kv_head * slab;
    const int per_chunk = kChunk / block_size;
    const int32_t* table = batch.block_tables + unit.request * batch.max_blocks + int64_t(chunk) * per_chunk;
    for (int i = lo / block_size; i * block_size < hi; ++i) {  // other entries may hold anything
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

// Brings memory near while there is something else to do: a context is read once a step, and its blocks lie
// anywhere. Loops ask for a little at each turn; more at a time than the core has buffers for would stall them.
// What is asked for need not be needed, nor be there: a prefetch does nothing but move memory.
struct Fetch {
  const void* const* block;  // the keys or values of a chunk, in blocks
  int block_bytes, left;
  int at = 0;         // in the current block
  int64_t step = 64;  // bytes a turn

  template <class T>
  Fetch(const CacheChunk<T>& chunk, const T* const* blocks)  // its key_blocks or value_blocks
      : block(reinterpret_cast<const void* const*>(blocks + chunk.lo / chunk.block_size)),
        block_bytes(chunk.block_size * chunk.head_dim * int(sizeof(T))),
        left(((chunk.hi - 1) / chunk.block_size - chunk.lo / chunk.block_size + 1) * block_bytes) {}

  // The whole is wanted within so many turns.
  void pace(int turns) { step = min_of((left + turns - 1) / turns, 64); }

  // Where the next turns of a loop start to ask.
  const char* take(int turns) {
    const char* from = static_cast<const char*>(*block) + at;
    const int bytes = int(turns * step);
    if (left <= bytes) return from;
    left -= bytes, at += bytes;
    if (at >= block_bytes) ++block, at -= block_bytes;
    return from;
  }

  void all_now() {
    for (; left > 0; left -= block_bytes, ++block)
      for (int i = 0; i < block_bytes; i += 64) __builtin_prefetch(static_cast<const char*>(*block) + i, 0, 3);
  }
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
PanelChunk to_panels(const CacheChunk<T>& chunk, float* keys, float* values) {
  const int d = chunk.head_dim;
  for (int position = chunk.lo / 16 * 16; position < chunk.hi; position += 16) {
    const T* from = chunk.key(position);
    float* to = keys + position * d;
    for (int i = 0; i < d; ++i, from += chunk.key_stride(), to += 16) {
      store8(to, load8(from));
      store8(to + 8, load8(from + 8));
    }
  }
  for (int position = chunk.lo; position < chunk.hi; ++position) {
    const T* from = chunk.value(position, 0);
    for (int i = 0; i < d; i += 8) store8(values + (i / 16 * kChunk + position) * 16 + i % 16, load8(from + i));
  }
  return {keys, values, d};
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
