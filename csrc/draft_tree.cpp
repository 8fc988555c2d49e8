// Which slots the rows of draft trees read, worked out once a step, and what is checked of their parents.
#include "draft_tree.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention.h"

namespace outrider {

void check_parents(const AttentionBatch& batch) {
  for (int64_t request = 0; request < batch.num_requests; ++request) {
    const int64_t first = batch.query_start_loc[request];
    for (int64_t row = first; row < batch.query_start_loc[request + 1]; ++row) {
      const int64_t parent = batch.parents[row];
      if (parent == -1) continue;
      if (parent < first || parent >= row || batch.positions[parent] != batch.positions[row] - 1)
        throw std::invalid_argument("parents[" + std::to_string(row) + "] is " + std::to_string(parent) +
                                    ", must be -1 or an earlier row of the request, one position before");
    }
  }
}

bool DraftTrees::index(const AttentionBatch& batch, int block_size) {
  const size_t rows = size_t(batch.num_rows), requests = size_t(batch.num_requests);
  in_order_.resize(rows);
  start_.assign(1, 0);
  slots_.clear();
  columns_.clear();
  panel_start_.assign(1, 0);
  panels_.clear();
  first_listed_.assign(requests, INT32_MAX);
  max_panels_ = 0;
  for (int64_t request = 0; request < batch.num_requests; ++request) {
    for (int64_t row = batch.query_start_loc[request]; row < batch.query_start_loc[request + 1]; ++row)
      add_row(batch, block_size, request, row);
    panel_start_.push_back(int32_t(panels_.size()));
    max_panels_ = std::max(max_panels_, num_panels(request));
  }
  return !slots_.empty();
}

// Its parent's list, if that has one, and itself.
void DraftTrees::add_row(const AttentionBatch& batch, int block_size, int64_t request, int64_t row) {
  const int32_t position = batch.positions[row], slot = batch.slot_mapping[row];
  const int64_t parent = batch.parents[row];
  const bool follows = parent < 0 || in_order_[size_t(parent)] == position;  // a path that is in order so far
  const int32_t* table = batch.block_tables + request * batch.max_blocks;
  if (follows && slot == table[position / block_size] * block_size + position % block_size) {
    in_order_[size_t(row)] = position + 1;
  } else {
    const int32_t from = follows ? position : in_order_[size_t(parent)];
    in_order_[size_t(row)] = from;
    for (int32_t i = 0, at = follows ? 0 : start_[size_t(parent)]; i < position - from; ++i, ++at) {
      const int32_t listed = slots_[size_t(at)], column = columns_[size_t(at)];
      slots_.push_back(listed);
      columns_.push_back(column);
    }
    slots_.push_back(slot);
    columns_.push_back(column_of(slot));
    first_listed_[size_t(request)] = std::min(first_listed_[size_t(request)], from);
  }
  start_.push_back(int32_t(slots_.size()));
}

// Adds the slot's panel to those of the current request if it is new.
int DraftTrees::column_of(int32_t slot) {
  const int32_t panel = slot / kPanelSlots;
  const auto first = panels_.begin() + panel_start_.back();
  const auto found = std::find(first, panels_.end(), panel);
  const int index = int(found - first);
  if (found == panels_.end()) panels_.push_back(panel);
  return index * kPanelSlots + slot % kPanelSlots;
}

}  // namespace outrider
