// Feeding a draft head, and its loop over its own tokens.
#include "draft_head.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace outrider {

namespace {

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(std::string("draft head: ") + message);
}

}  // namespace

// The arrays of one run of the program, and who drafts in it.
struct DraftHead::Step {
  std::vector<int32_t> token_ids, positions, slots, starts, lengths, tables, logits_indices;
  std::vector<float> hidden;
  std::vector<int64_t> drafting;  // requests, in the order of the rows of logits
  int64_t max_blocks = 0;

  void clear() {
    for (auto* part : {&token_ids, &positions, &slots, &starts, &lengths, &tables, &logits_indices}) part->clear();
    starts.push_back(0);
    hidden.clear();
    drafting.clear();
  }

  void add_row(int32_t token, int64_t position, const int32_t* table, int64_t block_size) {
    token_ids.push_back(token);
    positions.push_back(static_cast<int32_t>(position));
    slots.push_back(static_cast<int32_t>(table[position / block_size] * block_size + position % block_size));
  }

  void end_request(const int32_t* table, int64_t length) {
    starts.push_back(static_cast<int32_t>(token_ids.size()));
    lengths.push_back(static_cast<int32_t>(length));
    tables.insert(tables.end(), table, table + max_blocks);
  }
};

DraftHead::DraftHead(std::shared_ptr<Program> program, int logits, int hidden, int64_t num_blocks, int block_size,
                     std::vector<int32_t> token_ids, int64_t vocab_size, std::shared_ptr<Program> feeder)
    : program_(std::move(program)), feeder_(std::move(feeder)), logits_(logits), hidden_(hidden), num_blocks_(num_blocks), block_size_(block_size),
      width_(program_->hidden_width()), vocabulary_(std::move(token_ids), vocab_size) {
  require(num_blocks > 0 && block_size > 0 && width_ > 0, "it must read hidden states and have a cache");
  require(!feeder_ || (feeder_->hidden_width() == width_ && feeder_->max_rows() >= program_->max_rows()),
          "what feeds it must take as many rows of the same width");
  require(program_->buffer_width(hidden) == width_, "its hidden rows must be as wide as those that it reads");
  require(program_->buffer_width(logits) == vocabulary_.size(), "it needs a token id for each of its logits");
  for (int64_t i = 0; i < vocabulary_.size(); ++i)
    require(vocabulary_.ids()[i] >= 0 && vocabulary_.ids()[i] < vocab_size &&
                (i == 0 || vocabulary_.ids()[i - 1] < vocabulary_.ids()[i]),
            "its token ids must be in the vocabulary and ascend");
  kept_.reset(new uint16_t[static_cast<size_t>(num_slots() * width_)]);
  is_fed_.assign(static_cast<size_t>(num_blocks), 0);
}

int64_t DraftHead::nbytes() const { return num_slots() * width_ * int64_t{sizeof(uint16_t)}; }

void DraftHead::keep(const float* hidden, int64_t rows, const int32_t* slots) {
  for (int64_t r = 0; r < rows; ++r) require(slots[r] >= 0 && slots[r] < num_slots(), "slot out of range");
  for (int64_t r = 0; r < rows; ++r) {
    uint16_t* kept = kept_.get() + slots[r] * width_;
    const float* row = hidden + r * width_;
    for (int64_t i = 0; i < width_; ++i) kept[i] = to_bf16(row[i]);
    // A block is filled in order: whoever begins it anew has other tokens.
    if (slots[r] % block_size_ == 0) is_fed_[static_cast<size_t>(slots[r] / block_size_)] = 0;
  }
}

void DraftHead::move(const int32_t* from_slots, const int32_t* to_slots, int64_t count) {
  for (const int32_t* slots : {from_slots, to_slots})
    for (int64_t i = 0; i < count; ++i) require(slots[i] >= 0 && slots[i] < num_slots(), "slot out of range");
  for (int64_t i = 0; i < count; ++i)
    std::copy_n(kept_.get() + from_slots[i] * width_, width_, kept_.get() + to_slots[i] * width_);
}

int64_t DraftHead::count_fed(const int32_t* block_table, int64_t num_blocks) const {
  int64_t count = 0;
  while (count < num_blocks && block_table[count] >= 0 && block_table[count] < num_blocks_ &&
         is_fed_[static_cast<size_t>(block_table[count])])
    ++count;
  return count;
}

void DraftHead::check(const std::vector<DraftRequest>& requests, int64_t max_blocks, int max_steps) const {
  int64_t rows = 0, drafting = 0;
  for (const DraftRequest& request : requests) {
    require(request.num_tokens > 0 && request.start >= 0, "every request needs tokens");
    require(request.steps >= 0 && request.steps <= max_steps, "steps out of range");
    const int64_t length = request.start + request.num_tokens + std::max(request.steps - 1, 0);
    require(length <= max_blocks * block_size_, "the block table is too short");
    for (int64_t i = 0; i * block_size_ < length; ++i)
      require(request.block_table[i] >= 0 && request.block_table[i] < num_blocks_, "block out of range");
    require(request.steps == 0 || (request.state && request.state->largest_id() < vocabulary_.vocab_size()),
            "to draft takes a sampler state of this vocabulary");
    rows += request.num_tokens;
    drafting += request.steps > 0;
  }
  require(rows <= program_->max_rows(), "too many tokens");
  require(drafting <= program_->max_logits_rows(), "too many requests");
}

void DraftHead::feed(const std::vector<DraftRequest>& requests, int64_t max_blocks, Step& step) {
  step.clear();
  step.max_blocks = max_blocks;
  for (size_t i = 0; i < requests.size(); ++i) {
    const DraftRequest& request = requests[i];
    if (request.num_tokens == 0) continue;
    const auto slot = [&](int64_t position) {
      return request.block_table[position / block_size_] * block_size_ + position % block_size_;
    };
    const int64_t end = request.start + request.num_tokens;
    for (int64_t position = request.start; position < end; ++position) {
      step.add_row(request.token_ids[position - request.start], position, request.block_table, block_size_);
      const size_t at = step.hidden.size();
      step.hidden.resize(at + static_cast<size_t>(width_));
      if (position == 0) continue;  // zeros
      const uint16_t* kept = kept_.get() + slot(position - 1) * width_;
      for (int64_t j = 0; j < width_; ++j) step.hidden[at + static_cast<size_t>(j)] = from_bf16(kept[j]);
    }
    step.end_request(request.block_table, end);
    if (request.steps > 0) {
      step.drafting.push_back(static_cast<int64_t>(i));
      step.logits_indices.push_back(step.starts.back() - 1);
    }
  }
}

// Returns what is left to feed.
std::vector<DraftRequest> DraftHead::feed_ahead(const std::vector<DraftRequest>& requests, int64_t max_blocks,
                                                Step& step) {
  constexpr int64_t kFew = 8;  // as many rows cost the whole program no more than another call
  std::vector<DraftRequest> left = requests, ahead;
  for (DraftRequest& request : left) {
    if (!feeder_ || request.num_tokens <= kFew) continue;
    ahead.push_back(request);
    const int64_t num = request.num_tokens - (request.steps > 0);
    ahead.back().num_tokens = num, ahead.back().steps = 0;
    request.token_ids += num, request.start += num, request.num_tokens -= num;
  }
  if (!ahead.empty()) {
    feed(ahead, max_blocks, step);
    run(step, *feeder_);
  }
  return left;
}

void DraftHead::run(Step& step, Program& program) {
  StepInputs in;
  in.token_ids = step.token_ids.data();
  in.hidden = step.hidden.data();
  in.logits_indices = step.logits_indices.data();
  in.num_logits = static_cast<int64_t>(step.logits_indices.size());
  in.attention.num_rows = static_cast<int64_t>(step.token_ids.size());
  in.attention.num_requests = static_cast<int64_t>(step.lengths.size());
  in.attention.positions = step.positions.data();
  in.attention.slot_mapping = step.slots.data();
  in.attention.query_start_loc = step.starts.data();
  in.attention.seq_lens = step.lengths.data();
  in.attention.block_tables = step.tables.data();
  in.attention.max_blocks = step.max_blocks;
  program.run(in);
}

void DraftHead::draft(const std::vector<DraftRequest>& requests, int64_t max_blocks, int max_steps,
                      const DraftResults& results) {
  int32_t* const token_ids = results.token_ids;
  const size_t size = requests.size() * static_cast<size_t>(max_steps);
  std::fill_n(token_ids, size, -1);
  std::fill_n(results.second_ids, size, -1);
  std::fill_n(results.probabilities, size, 0.0f);
  std::fill_n(results.second_probabilities, size, 0.0f);
  if (requests.empty()) return;
  check(requests, max_blocks, max_steps);
  Step step, next;
  const std::vector<DraftRequest> left = feed_ahead(requests, max_blocks, step);
  feed(left, max_blocks, step);
  if (!step.token_ids.empty()) run(step, *program_);
  for (const DraftRequest& request : requests) {
    const int64_t end = request.start + request.num_tokens;
    for (int64_t block = request.start / block_size_; (block + 1) * block_size_ <= end; ++block)
      is_fed_[static_cast<size_t>(request.block_table[block])] = 1;
  }

  const float* logits = program_->buffer_data(logits_);
  const float* hidden = program_->buffer_data(hidden_);
  for (int depth = 0; !step.drafting.empty(); ++depth) {
    const auto draw = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t i = step.drafting[static_cast<size_t>(row)];
        const DraftRequest& request = left[static_cast<size_t>(i)];
        const Draft draft =
            draft_row(logits + row * vocabulary_.size(), vocabulary_, *request.state, {token_ids + i * max_steps, depth},
                      request.start + request.num_tokens + depth);
        const int64_t at = i * max_steps + depth;
        token_ids[at] = draft.first.id, results.probabilities[at] = draft.first.probability;
        results.second_ids[at] = draft.second.id, results.second_probabilities[at] = draft.second.probability;
      }
    };
    const int64_t rows = static_cast<int64_t>(step.drafting.size());
    if (rows * vocabulary_.size() < 100000)
      draw(0, rows);
    else
      run_team([&](Team& team) { team.for_each(rows, 1, draw); });

    next.clear();
    next.max_blocks = max_blocks;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t i = step.drafting[static_cast<size_t>(row)];
      const DraftRequest& request = left[static_cast<size_t>(i)];
      const int32_t token = token_ids[i * max_steps + depth];
      if (token < 0 || depth + 1 >= request.steps) continue;
      const int64_t position = request.start + request.num_tokens + depth;
      next.add_row(token, position, request.block_table, block_size_);
      const float* own = hidden + step.logits_indices[static_cast<size_t>(row)] * width_;
      next.hidden.insert(next.hidden.end(), own, own + width_);
      next.end_request(request.block_table, position + 1);
      next.drafting.push_back(i);
      next.logits_indices.push_back(next.starts.back() - 1);
    }
    std::swap(step, next);
    if (!step.drafting.empty()) run(step, *program_);
  }
}

}  // namespace outrider
