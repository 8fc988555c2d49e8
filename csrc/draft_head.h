// A draft head: a small program that reads hidden states of the target and drafts some tokens ahead.
//
// Its cache mirrors the target's: same blocks, same slots. The slot of position i holds what the head made of
// token i and the target's hidden state at i - 1 (zeros before the first token); its row there predicts token i + 1.
// So a slot depends on tokens up to its own, and blocks that requests share for their prefix are shared here too.
// The target's hidden states are kept by slot, in bfloat16. Thus the head can catch up with a request at any time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "program.h"
#include "sampling.h"

namespace outrider {

struct DraftRequest {
  const int32_t* token_ids = nullptr;  // final tokens that the head has not been fed
  int64_t num_tokens = 0;
  int64_t start = 0;                   // position of the first; all before it have been fed
  const int32_t* block_table = nullptr;
  int steps = 0;                       // tokens to draft, which takes as many slots less one after the last token
  const SamplerState* state = nullptr;  // needed to draft
};

struct DraftResults {
  int32_t* token_ids = nullptr;
  float* probabilities = nullptr;
  int32_t* second_ids = nullptr;
  float* second_probabilities = nullptr;
};

class DraftHead {
 public:
  // `logits` and `hidden` are buffers of `program`: logits of the vocabulary's ids for the gathered rows, and all
  // rows before the final norm, which the head reads back when it goes on after its own tokens.
  // Who is behind by more than a few tokens gets all but the last through `feeder` (or null): a program that does no
  // more than write the cache, which takes a fifth of the time. One layer's keys and values depend on nothing else.
  DraftHead(std::shared_ptr<Program> program, int logits, int hidden, int64_t num_blocks, int block_size,
            std::vector<int32_t> token_ids, int64_t vocab_size, std::shared_ptr<Program> feeder);

  // The target has computed these rows at these slots.
  void keep(const float* hidden, int64_t rows, const int32_t* slots);

  // The target has moved its keys and values from slot to slot, one after the other.
  void move(const int32_t* from_slots, const int32_t* to_slots, int64_t count);

  // Feeds all requests, then drafts. Row r of each result, `max_steps` wide, belongs to request r: its draft, and
  // beside each token the one that would have been drawn without it. A draft that ended early goes on with -1.
  // Throws std::invalid_argument, having changed nothing, when something is out of range.
  void draft(const std::vector<DraftRequest>& requests, int64_t max_blocks, int max_steps, const DraftResults& results);

  // How many of the first `num_blocks` blocks of a table have been fed, before the first that has not.
  int64_t count_fed(const int32_t* block_table, int64_t num_blocks) const;

  const DraftVocabulary& vocabulary() const { return vocabulary_; }
  int64_t max_rows() const { return program_->max_rows(); }
  int64_t width() const { return width_; }
  int64_t num_slots() const { return num_blocks_ * block_size_; }
  int64_t nbytes() const;  // of what it keeps, touched or not

 private:
  struct Step;
  void check(const std::vector<DraftRequest>& requests, int64_t max_blocks, int max_steps) const;
  void feed(const std::vector<DraftRequest>& requests, int64_t max_blocks, Step& step);
  std::vector<DraftRequest> feed_ahead(const std::vector<DraftRequest>& requests, int64_t max_blocks, Step& step);
  static void run(Step& step, Program& program);

  std::shared_ptr<Program> program_, feeder_;
  int logits_, hidden_;
  int64_t num_blocks_, block_size_, width_;
  DraftVocabulary vocabulary_;
  std::unique_ptr<uint16_t[]> kept_;  // [slots, width] bfloat16; touched when written
  std::vector<uint8_t> is_fed_;       // by block: the head has been fed all its tokens
};

}  // namespace outrider
