// The cache's memory, and the plan of a step: which thread reduces which chunks for which rows.
//
// The plan never changes a bit (see csrc/kernels/attention.cpp). A group is a tile of rows of one
// request with one kv head; it is one unit when it is cheap, else several runs of chunks whose partials
// the thread that finishes last merges, left to right.
#include "attention.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels/attention_kernels.h"

namespace outrider {

struct KVCache::Impl {
  uint8_t* memory;
  int64_t layer_bytes;  // of keys, and of values
};

static void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

KVCache::KVCache(int num_layers, int64_t num_blocks, int block_size, int kv_heads, int head_dim, CacheType type)
    : num_layers(num_layers), block_size(block_size), kv_heads(kv_heads), head_dim(head_dim), num_blocks(num_blocks),
      type(type) {
  require(block_size == 16 || block_size == 32 || block_size == 64 || block_size == 128,
          "block_size must be 16, 32, 64 or 128, got " + std::to_string(block_size));
  require(head_dim >= 8 && head_dim <= 512 && head_dim % 8 == 0,
          "the native backend needs a head_dim that is a multiple of 8 up to 512, got " + std::to_string(head_dim));
  require(num_layers >= 1 && num_blocks >= 1 && kv_heads >= 1, "a KV cache needs layers, blocks and heads");
  const int64_t layer = num_blocks * block_size * kv_heads * head_dim * (type == CacheType::f32 ? 4 : 2);
  void* memory = mmap(nullptr, size_t(2 * num_layers * layer), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  impl_ = new Impl{static_cast<uint8_t*>(memory), layer};
}

KVCache::~KVCache() {
  munmap(impl_->memory, size_t(nbytes()));
  delete impl_;
}

uint8_t* KVCache::keys(int layer) const { return impl_->memory + 2 * layer * impl_->layer_bytes; }
uint8_t* KVCache::values(int layer) const { return keys(layer) + impl_->layer_bytes; }
int64_t KVCache::nbytes() const { return 2 * num_layers * impl_->layer_bytes; }

namespace {

template <class T>  // an integer of the elements' size
void move_head(T* keys, T* values, const KVCache& cache, int head, const int32_t* from, const int32_t* to,
               int64_t num_moves) {
  const int64_t d = cache.head_dim, size = cache.block_size;
  for (int64_t i = 0; i < num_moves; ++i) {
    const int64_t source = (from[i] / size * cache.kv_heads + head) * size * d, first = from[i] % size;
    const int64_t target = (to[i] / size * cache.kv_heads + head) * size * d, second = to[i] % size;
    for (int64_t j = 0; j < d; ++j) keys[target + j * size + second] = keys[source + j * size + first];
    std::copy_n(values + source + first * d, d, values + target + second * d);
  }
}

}  // namespace

void KVCache::move_slots(const int32_t* from, const int32_t* to, int64_t num_moves) {
  const int64_t num_slots = num_blocks * block_size;
  for (const int32_t* slots : {from, to})
    for (int64_t i = 0; i < num_moves; ++i)
      require(slots[i] >= 0 && slots[i] < num_slots, "slot " + std::to_string(slots[i]) + " is not in the cache");
  for (int layer = 0; layer < num_layers; ++layer)
    for (int head = 0; head < kv_heads; ++head)
      if (type == CacheType::f32)
        move_head(reinterpret_cast<uint32_t*>(keys(layer)), reinterpret_cast<uint32_t*>(values(layer)), *this, head,
                  from, to, num_moves);
      else
        move_head(reinterpret_cast<uint16_t*>(keys(layer)), reinterpret_cast<uint16_t*>(values(layer)), *this, head,
                  from, to, num_moves);
}

namespace {

constexpr int kUnitsPerThread = 3;  // at least; cutting costs, and so does waiting for the last one

// Rows of one request that share their keys, and the run of chunks that one unit takes of theirs.
struct Group {
  int64_t request, row_begin, row_end;
  int chunk_begin, chunk_end;
  int cuts;              // chunks that a run may begin with: what branches of a tree see is never cut
  int runs;              // 1: a unit does all chunks
  int64_t first_unit;    // of its runs, per kv head
  int64_t first_float;   // of its partials, for kv head 0
  int64_t first_counter;

  int chunk_of_run(int run) const { return run == runs ? chunk_end : chunk_begin + int(int64_t(cuts) * run / runs); }
};

struct Plan {
  std::vector<Group> groups;
  std::vector<int32_t> group_of_unit;
  bool append_first;     // some rows read keys of other units' rows
  int64_t num_counters, num_floats;
  int max_rows;
};

// Query tokens of a tile: as many as share one reading well, unless that makes too few tiles for the threads.
// Cutting between rows costs less than between chunks, whose partials go from core to core.
int tile_tokens(const AttentionBatch& batch, int kv_heads, int group_heads, int threads) {
  int tokens = 1;
  for (int rows : {kTileRows, 24, 12, 6}) {
    tokens = std::max(1, rows / group_heads);
    int64_t units = 0;
    for (int64_t i = 0; i < batch.num_requests; ++i)
      units += (batch.query_start_loc[i + 1] - batch.query_start_loc[i] + tokens - 1) / tokens * kv_heads;
    if (threads == 1 || units >= threads * kUnitsPerThread) break;
  }
  return tokens;
}

// Every thread makes its own, all the same.
void make_plan(const AttentionBatch& batch, const AttentionArgs& args, int threads, Plan& plan) {
  const int kv_heads = args.cache->kv_heads, group_heads = args.heads / kv_heads;
  const int tile = tile_tokens(batch, kv_heads, group_heads, threads);
  plan.groups.clear();
  plan.append_first = false;
  plan.max_rows = 0;
  int64_t total = 0;
  const auto cost = [&](const Group& group) {
    return (group.chunk_end - group.chunk_begin) * ((group.row_end - group.row_begin) * group_heads + 4);
  };
  for (int64_t request = 0; request < batch.num_requests; ++request) {
    const int64_t begin = batch.query_start_loc[request], end = batch.query_start_loc[request + 1];
    if (end - begin > tile) plan.append_first = true;
    for (int64_t last = end; last > begin;) {  // the longest contexts first
      const int64_t first = std::max(begin, last - tile);
      const auto [low, high] = std::minmax_element(batch.positions + first, batch.positions + last);
      const int from = args.window > 0 ? std::max(*low + 1 - args.window, 0) : 0;
      const int begins = from / kChunk, ends = *high / kChunk + 1;
      const int last_cut = batch.trees ? std::min(batch.trees->first_listed(request) / kChunk + 1, ends) : ends;
      plan.groups.push_back({request, first, last, begins, ends, std::max(last_cut - begins, 1), 1, 0, 0, 0});
      plan.max_rows = std::max(plan.max_rows, int(last - first) * group_heads);
      total += cost(plan.groups.back()) * kv_heads;
      last = first;
    }
  }
  const int64_t target = threads == 1 ? total : total / (threads * kUnitsPerThread) + 1;
  plan.group_of_unit.clear();
  plan.num_counters = plan.num_floats = 0;
  for (Group& group : plan.groups) {
    const int chunks = group.chunk_end - group.chunk_begin;
    group.runs = int(std::min<int64_t>(group.cuts, (cost(group) + target - 1) / target));
    group.first_unit = int64_t(plan.group_of_unit.size());
    plan.group_of_unit.insert(plan.group_of_unit.end(), size_t(group.runs), int32_t(&group - plan.groups.data()));
    if (group.runs == 1) continue;
    group.first_counter = plan.num_counters;
    group.first_float = plan.num_floats;
    plan.num_counters += kv_heads;
    plan.num_floats += kv_heads * chunks *
                       partial_floats((group.row_end - group.row_begin) * group_heads, args.cache->head_dim);
  }
}

uint8_t* aligned(std::vector<uint8_t>& bytes) {
  return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) & ~uintptr_t(63));
}

using Counter = std::atomic<int32_t>;  // runs of a group that are done; 0 outside of a step

// Groups that are cut cost more than 1 / (threads * kUnitsPerThread) of the whole, so there are fewer of them.
// Counters keep their place whatever the plan, at the front of the shared memory: partials must not run over them.
size_t counter_bytes(size_t threads) { return (threads * kUnitsPerThread * sizeof(Counter) + 63) / 64 * 64; }

// Makes room, by one thread while the others wait; all see the same sizes and so agree to come here.
void reserve(Team& team, AttentionScratch& scratch, const Plan& plan, size_t thread_bytes) {
  const size_t known = scratch.per_thread.size(), threads = std::max(known, size_t(team.size()));
  const size_t shared = counter_bytes(threads) + size_t(plan.num_floats) * 4 + 64;
  if (known == threads && scratch.shared.size() >= shared && scratch.per_thread[0].size() >= thread_bytes) return;
  team.barrier();
  if (team.rank() == 0) {
    if (known < threads || scratch.shared.size() < shared) scratch.shared.assign(shared * 2, 0);
    const size_t bytes = std::max(thread_bytes, known ? scratch.per_thread[0].size() : 0);
    scratch.per_thread.resize(threads);
    for (std::vector<uint8_t>& memory : scratch.per_thread) memory.resize(bytes);
  }
  team.barrier();
}

}  // namespace

void check_attention(const AttentionArgs& args) {
  const KVCache& cache = *args.cache;
  require(args.heads > 0 && args.heads % cache.kv_heads == 0,
          "attention heads must be a multiple of the " + std::to_string(cache.kv_heads) + " kv heads, got " +
              std::to_string(args.heads));
  require(!args.rope || (args.rope->rotary_dim <= cache.head_dim && args.rope->rotary_dim % 2 == 0),
          "rotary_dim must be even and at most head_dim");
}

void append_cache(Team& team, const AttentionBatch& batch, const AttentionArgs& args) {
  const AttentionKernels& kernels = OUTRIDER_SELECT_KERNELS(attention_kernels);
  const KVCache& cache = *args.cache;
  static thread_local std::vector<float> scratch;
  const size_t floats = size_t(kernels.scratch_floats(1, cache.head_dim, 0));
  if (scratch.size() < floats + 16) scratch.resize(floats + 16);
  float* own = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  constexpr int64_t kRun = 32;
  team.for_each((batch.num_rows + kRun - 1) / kRun * cache.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i / cache.kv_heads * kRun, last = std::min(first + kRun, batch.num_rows);
      kernels.append(batch, args, first, last, int(i % cache.kv_heads), 0, INT64_MAX, own);
    }
  });
}

void append_attention(Team& team, const AttentionBatch& batch, const AttentionArgs& args, AttentionScratch& scratch) {
  const AttentionKernels& kernels = OUTRIDER_SELECT_KERNELS(attention_kernels);
  const KVCache& cache = *args.cache;
  static thread_local Plan plan;
  make_plan(batch, args, team.size(), plan);
  const int panels = batch.trees ? batch.trees->max_panels() : 0;
  reserve(team, scratch, plan, size_t(4 * kernels.scratch_floats(plan.max_rows, cache.head_dim, panels) + 64));
  float* own = reinterpret_cast<float*>(aligned(scratch.per_thread[size_t(team.rank())]));
  Counter* counters = reinterpret_cast<Counter*>(aligned(scratch.shared));
  float* partials = reinterpret_cast<float*>(aligned(scratch.shared) + counter_bytes(scratch.per_thread.size()));

  if (plan.append_first) {
    constexpr int64_t kRun = 32;
    team.for_each((batch.num_rows + kRun - 1) / kRun * cache.kv_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i / cache.kv_heads * kRun, last = std::min(first + kRun, batch.num_rows);
        kernels.append(batch, args, first, last, int(i % cache.kv_heads), 0, INT64_MAX, own);
      }
    });
  }
  const int64_t num_units = int64_t(plan.group_of_unit.size()) * cache.kv_heads;
  team.for_each(num_units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Group& group = plan.groups[size_t(plan.group_of_unit[size_t(i / cache.kv_heads)])];
      const int run = int(i / cache.kv_heads - group.first_unit), head = int(i % cache.kv_heads);
      AttentionUnit unit{group.request, group.row_begin, group.row_end, head, group.chunk_of_run(run),
                         group.chunk_of_run(run + 1), !plan.append_first, nullptr};
      if (group.runs == 1) {
        kernels.attend(batch, args, unit, own);
        continue;
      }
      const int64_t rows = (group.row_end - group.row_begin) * (args.heads / cache.kv_heads);
      const int64_t stride = partial_floats(rows, cache.head_dim);
      float* all = partials + group.first_float + head * stride * (group.chunk_end - group.chunk_begin);
      unit.partials = all + stride * (unit.chunk_begin - group.chunk_begin);
      kernels.attend(batch, args, unit, own);
      Counter& finished = counters[group.first_counter + head];
      if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < group.runs) continue;
      finished.store(0, std::memory_order_relaxed);
      unit.chunk_begin = group.chunk_begin, unit.chunk_end = group.chunk_end, unit.partials = all;
      kernels.merge(args, unit, own);
    }
  });
}

}  // namespace outrider
