// Rows of a draft tree whose path leaves the block table's slots: the positions from there on.
//
// The keys of all such slots of a request are scored by slot, once, as if they were positions of a chunk; then
// each row's scores are put where its positions are. Maxima, exponentials and sums take no notice. Values are
// added to a row's chains in position order, from the slots of its own path. So a row has the bits of plain
// decoding.
#pragma once

#include "kernels/attention_multiply.h"
#include "kernels/attention_tile.h"

namespace outrider {
namespace OUTRIDER_ISA {

template <class T>
class Branches {
 public:
  // `memory`: [rows, panels * kPanelSlots] floats.
  Branches(const AttentionBatch& batch, const AttentionArgs& args, const AttentionUnit& unit, const Tile& tile,
           float* memory)
      : request_(unit.request), row_begin_(unit.row_begin), scores_(memory), head_dim_(tile.head_dim),
        block_size_(args.cache->block_size) {
    bool any = false;
    for (int r = 0; r < tile.rows; r += tile.group)
      any = any || (tile.in_order[r] < tile.last[r] && tile.in_order[r] < unit.chunk_end * kChunk);
    if (!any) return;
    trees_ = batch.trees;
    width_ = trees_->num_panels(request_) * kPanelSlots;
    const int64_t slab = int64_t(block_size_) * head_dim_;
    block_stride_ = args.cache->kv_heads * slab;
    keys_ = reinterpret_cast<const T*>(args.cache->keys(args.layer)) + unit.kv_head * slab;
    values_ = reinterpret_cast<const T*>(args.cache->values(args.layer)) + unit.kv_head * slab;
  }

  // Whether any row of the tile leaves the block table within the unit's chunks.
  explicit operator bool() const { return trees_ != nullptr; }

  // Every row with the keys of every listed slot of its request.
  void score(const Tile& tile, Fetch fetch) {
    fetch.step = 0;
    const int32_t* panels = trees_->panels(request_);
    for (int at = 0; at < width_; at += kPanelSlots) {
      const int slot = panels[at / kPanelSlots] * kPanelSlots;
      const T* keys = keys_ + slot / block_size_ * block_stride_ + slot % block_size_;
      for (int b = 0; b < tile.num_blocks; ++b) {
        const RowBlock& block = tile.blocks[b];
        multiply_rows<T, kPanelSlots / 8, true>(block.count, tile.query + block.first * head_dim_, head_dim_, keys,
                                                block_size_, scores_ + block.first * width_ + at, width_, head_dim_,
                                                fetch);
      }
    }
  }

  void place_scores(Tile& tile) const {
    for (int r = 0; r < tile.rows; ++r) {
      const int shift = tile.chunk * kChunk - tile.in_order[r];
      const int32_t* column = trees_->columns(row_begin_ + r / tile.group);
      for (int i = tile.leave[r]; i < tile.hi[r]; ++i)
        tile.weight[r * kChunk + i] = scores_[r * width_ + column[i + shift]];
    }
  }

  // value[rows][8 NV] += weights * values of positions [leave, hi) of the current chunk.
  template <int NV>
  void weigh(const Tile& tile, const RowBlock& block, const Partial& part, int column, Fetch& fetch) const {
    const int end = block.first + block.count;
    for (int r = block.first, rows; r < end; r += rows) {
      rows = tile.alike(r, end);
      const int shift = tile.chunk * kChunk - tile.in_order[r];
      const int32_t* slots = trees_->slots(row_begin_ + r / tile.group);
      for (int i = tile.leave[r], run; i < tile.hi[r]; i += run) {
        const int slot = slots[i + shift];
        run = 1;
        while (i + run < tile.hi[r] && slots[i + run + shift] == slot + run && (slot + run) % block_size_) ++run;
        const T* values = values_ + slot / block_size_ * block_stride_ + slot % block_size_ * head_dim_ + column;
        multiply_rows<T, NV, false>(rows, tile.weight + r * kChunk + i, kChunk, values, head_dim_,
                                    part.value + r * head_dim_ + column, head_dim_, run, fetch);
      }
    }
  }

 private:
  const DraftTrees* trees_ = nullptr;
  int64_t request_, row_begin_, block_stride_ = 0;
  const T *keys_ = nullptr, *values_ = nullptr;
  float* scores_;
  int width_ = 0, head_dim_, block_size_;
};

}  // namespace OUTRIDER_ISA
}  // namespace outrider
