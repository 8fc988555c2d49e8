// The paged cache and append attention.
//
// New keys and values are written to their slots (after optional per-head norm and RoPE), then every
// row attends to all positions <= its own. A row reduces over keys in chunks of 128 absolute
// positions; inside a chunk in position order; chunks are merged left to right. So a row's bits do not
// depend on block size, on the rows beside it, on how its context was computed, or on threads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "draft_tree.h"
#include "thread_pool.h"

namespace outrider {

enum class CacheType { f16, bf16, f32 };
constexpr int kChunk = 128;

// Per layer: keys [num_blocks, kv_heads, head_dim, block_size] (positions innermost, so that scores are
// vectorised over positions and each score is one chain over head_dim) and values
// [num_blocks, kv_heads, block_size, head_dim]. block_size is 16, 32, 64 or 128. Memory is mapped lazily:
// untouched blocks cost nothing.
class KVCache {
 public:
  KVCache(int num_layers, int64_t num_blocks, int block_size, int kv_heads, int head_dim, CacheType type);
  ~KVCache();
  KVCache(const KVCache&) = delete;
  int num_layers, block_size, kv_heads, head_dim;
  int64_t num_blocks;
  CacheType type;
  uint8_t* keys(int layer) const;
  uint8_t* values(int layer) const;
  int64_t nbytes() const;

  // Copies keys and values of every layer from slot `from[i]` to `to[i]`, one after the other in order of i.
  // Throws std::invalid_argument, having changed nothing, when a slot is out of range.
  void move_slots(const int32_t* from, const int32_t* to, int64_t num_moves);

 private:
  struct Impl;
  Impl* impl_;
};

enum class RopeLayout { half, interleaved };  // pairs (i, i + d/2) or (2i, 2i + 1)

struct RopeTable {  // cos and sin, [max_position, rotary_dim / 2]
  int64_t max_position = 0;
  int rotary_dim = 0;
  RopeLayout layout = RopeLayout::half;
  std::vector<float> cos, sin;
};

// What a step tells attention; all arrays live as long as the step.
struct AttentionBatch {
  int64_t num_rows = 0;
  int64_t num_requests = 0;
  const int32_t* positions = nullptr;        // [rows] absolute position
  const int32_t* slot_mapping = nullptr;     // [rows] block * block_size + offset, where K/V go
  const int32_t* query_start_loc = nullptr;  // [requests + 1] rows of each request
  const int32_t* seq_lens = nullptr;         // [requests] slots in use after this step's rows
  const int32_t* block_tables = nullptr;     // [requests, max_blocks]
  int64_t max_blocks = 0;
  const int32_t* parents = nullptr;   // [rows] row of the token before, -1: it is in the cache; null: no trees
  const DraftTrees* trees = nullptr;  // made of `parents`; null when every path lies in order
};

struct AttentionArgs {
  const float *q = nullptr, *k = nullptr, *v = nullptr;  // [rows, heads * head_dim], pre-RoPE
  int64_t q_stride = 0, k_stride = 0, v_stride = 0;
  int heads = 0;
  KVCache* cache = nullptr;
  int layer = 0;
  float scale = 0;
  int window = 0;                  // 0: full; w: a row sees positions > own - w
  const RopeTable* rope = nullptr;  // null: none
  const float *q_norm = nullptr, *k_norm = nullptr;  // [head_dim] RMSNorm per head before RoPE, or null
  float norm_eps = 0;
  float* out = nullptr;  // [rows, heads * head_dim]
  int64_t out_stride = 0;
};

struct AttentionScratch {
  std::vector<uint8_t> shared;
  std::vector<std::vector<uint8_t>> per_thread;
};

// Throws std::invalid_argument when heads, cache and RoPE do not fit together. Ask before the team starts.
void check_attention(const AttentionArgs& args);

// Collective; ends with a barrier. Writes keys and values of all rows to their slots, without attending: of `args`
// only k, v, cache, layer, rope and k_norm count.
void append_cache(Team& team, const AttentionBatch& batch, const AttentionArgs& args);

// Collective; ends with a barrier. Scratch grows as needed: a fresh one is fine, one that is kept is faster.
void append_attention(Team& team, const AttentionBatch& batch, const AttentionArgs& args, AttentionScratch& scratch);

}  // namespace outrider
