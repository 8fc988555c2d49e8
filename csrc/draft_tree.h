// Draft trees: rows whose tokens follow another row of their step than the one before them.
//
// A node's keys and values go to the slot of its index, since two nodes may stand at one position. So a row
// finds the keys of its path in the block table's order only up to where the path leaves that order; from
// there on every slot is listed here. Once a step, before the team starts; a chain has nothing listed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace outrider {

struct AttentionBatch;

constexpr int kPanelSlots = 16;  // neighbouring slots of one block whose keys are scored together

class DraftTrees {
 public:
  // Whether any row of the batch has slots listed. `batch.parents` must have been checked.
  bool index(const AttentionBatch& batch, int block_size);

  // The row sees the positions below it at the block table's slots, and the others at `slots(row)`.
  int in_order(int64_t row) const { return in_order_[size_t(row)]; }
  const int32_t* slots(int64_t row) const { return slots_.data() + start_[size_t(row)]; }
  // For each of these slots, where its score is found when those of the request's panels stand side by side.
  const int32_t* columns(int64_t row) const { return columns_.data() + start_[size_t(row)]; }

  // The panels that hold the listed slots of a request: slot / kPanelSlots.
  int num_panels(int64_t request) const { return panel_start_[size_t(request) + 1] - panel_start_[size_t(request)]; }
  const int32_t* panels(int64_t request) const { return panels_.data() + panel_start_[size_t(request)]; }
  int max_panels() const { return max_panels_; }
  // The first position of a request whose slot is listed for some row; INT32_MAX: none.
  int first_listed(int64_t request) const { return first_listed_[size_t(request)]; }

 private:
  void add_row(const AttentionBatch& batch, int block_size, int64_t request, int64_t row);
  int column_of(int32_t slot);

  std::vector<int32_t> in_order_, start_, slots_, columns_;   // rows, rows + 1, and the lists
  std::vector<int32_t> panel_start_, panels_, first_listed_;  // requests + 1, all panels, requests
  int max_panels_ = 0;
};

// Throws std::invalid_argument unless every parent is an earlier row of the same request at the position
// before, or -1, which leaves what comes before to the cache. Rows must lie within their requests.
void check_parents(const AttentionBatch& batch);

}  // namespace outrider
