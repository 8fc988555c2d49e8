// One token for each row of logits.
//
// Everything here is a pure function of the row: of its logits, its request's state, the drafted tokens
// before it, its position and the seed. Wherever values are compared, larger comes first and of equal
// values the lower token id.
//
// Order of work on a row:
//   repetition penalty (prompt and output) -> frequency and presence penalty (output) -> logit bias ->
//   min_tokens mask -> bad words -> grammar mask -> temperature -> top-k -> top-p -> min-p ->
//   argmax of value + noise.
// Penalties, masks and bad words count the row's drafted prefix as if it had been emitted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace outrider {

struct SamplerParams {
  float temperature = 1.0f;  // 0: argmax
  int32_t top_k = 0;         // 0: off
  double top_p = 1.0;
  double min_p = 0.0;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  float repetition_penalty = 1.0f;
  std::vector<int32_t> logit_bias_ids;
  std::vector<float> logit_bias_values;
  int32_t min_tokens = 0;
  std::vector<int32_t> masked_until_min_tokens;
  std::vector<std::vector<int32_t>> bad_words;
  uint64_t seed = 0;
  int32_t num_logprobs = -1;  // -1: none; k: the chosen token's and the k best
};

// A run of token ids that is not owned.
struct TokenSpan {
  const int32_t* data = nullptr;
  int64_t size = 0;
};

// The tokens that a grammar allows: bit i % 32 of word i / 32, for every token of the vocabulary. Null: all.
using TokenMask = const uint32_t*;

// The tokens that a drafter knows: ascending ids, and of each 128 ids of the vocabulary the first that it knows.
class DraftVocabulary {
 public:
  DraftVocabulary(std::vector<int32_t> ids, int64_t vocab_size);
  int64_t size() const { return static_cast<int64_t>(ids_.size()); }
  int64_t vocab_size() const { return vocab_size_; }
  const int32_t* ids() const { return ids_.data(); }
  int64_t num_groups() const { return static_cast<int64_t>(first_.size()) - 1; }
  int64_t first(int64_t group) const { return first_[static_cast<size_t>(group)]; }
  int64_t column(int32_t id) const { return columns_[static_cast<size_t>(id)]; }  // -1: not known

 private:
  std::vector<int32_t> ids_;
  std::vector<int64_t> first_;
  std::vector<int32_t> columns_;
  int64_t vocab_size_;
};

// What sampling remembers of one request. Grows with the distinct tokens of the request, and only when a
// penalty needs them.
class SamplerState {
 public:
  SamplerState(SamplerParams params, TokenSpan prompt);

  void append(TokenSpan tokens);  // tokens that were emitted, in order

  // The logits of a row after penalties, bias and masks: `raw` itself when nothing applies, else `scratch`
  // [vocab], filled. `raw` is never written.
  const float* process(const float* raw, int64_t vocab, TokenSpan prefix, float* scratch,
                       TokenMask mask = nullptr, const DraftVocabulary* known_ids = nullptr) const;

  const SamplerParams& params() const { return params_; }
  int32_t largest_id() const { return largest_id_; }  // of all ids given: the vocabulary must be larger
  int64_t num_output() const { return num_output_; }

 private:
  void see(int32_t token, int32_t count);
  float penalised(float logit, int32_t output_count) const;
  void penalise(const float* raw, TokenSpan prefix, float* row, const DraftVocabulary* known_ids) const;
  bool completes(const std::vector<int32_t>& word, TokenSpan prefix) const;

  SamplerParams params_;
  bool penalties_;  // any penalty is on
  size_t tail_size_ = 0;
  int32_t largest_id_ = -1;
  int64_t num_output_ = 0;
  std::vector<int32_t> seen_;    // distinct tokens, by first appearance (the prompt's only with repetition penalty)
  std::vector<int32_t> counts_;  // how often each was emitted
  std::unordered_map<int32_t, int32_t> index_;  // token -> place in seen_
  std::vector<int32_t> tail_;    // the last tokens, as many as the longest bad word needs
};

// Scans over a row, per instruction set; every one gives the same bits (csrc/kernels/sampling.cpp).
// `maxima` holds the maximum of each run of kBlock values. The scaled value of x is (x - max) * inv_t.
constexpr int64_t kBlock = 64;
constexpr float kNoWeight = -22.0f;  // the weight of smaller scaled values is 0
inline __attribute__((always_inline)) int64_t num_blocks(int64_t n) { return (n + kBlock - 1) / kBlock; }

struct SamplingKernels {
  // Fills maxima; false when the row holds a NaN.
  bool (*block_maxima)(const float* x, int64_t n, float* maxima);
  // Ids, ascending, and scaled values in [low, high) -> count. `maxima` are scaled.
  int64_t (*gather)(const float* x, const float* maxima, int64_t n, float max, float inv_t, float low,
                    float high, int32_t* ids, float* scaled);
  // weight(s) = round(exp(s) * 2^30) for s <= 0; integers, so that sums do not depend on their order.
  void (*weights)(const float* scaled, int64_t n, uint32_t* weights);
  uint64_t (*sum_weights)(const float* x, const float* maxima, int64_t n, float max, float inv_t);
  double (*sum_exp)(const float* x, int64_t n, float max);
  // Tokens that come before (value, id).
  int64_t (*count_before)(const float* x, int64_t n, float value, int64_t id);
  // Of the 128 tokens from 16 * first_group on, those whose coarse noise byte is 255, in any order.
  int (*top_noise)(uint64_t seed, int64_t position, uint32_t first_group, int32_t* ids);
};
const SamplingKernels& sampling_kernels();

struct RowLogprobs {
  float logprob = 0;
  int32_t rank = 0;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
};

// The token of one row; -1 when there is none: the row holds a NaN or +inf, or every token is masked.
// `logprobs` may be null; it is of the raw logits.
int32_t sample_row(const float* logits, int64_t vocab, const SamplerState& state, TokenSpan prefix,
                   int64_t position, RowLogprobs* logprobs, TokenMask mask = nullptr);

struct DraftToken {
  int32_t id = -1;  // -1: there is none
  float probability = 0;
};
struct Draft {
  DraftToken first, second;  // what is drawn, and what would be drawn without it
};

// The tokens that a drafter draws from logits [vocabulary.size()], as sample_row would with the same noise, and their
// probabilities among the tokens of the vocabulary at the request's temperature (at 0: at temperature 1). Nothing
// depends on a draft, so very unlikely tokens may be left out of the draw. A row without a distribution has neither.
Draft draft_row(const float* logits, const DraftVocabulary& vocabulary, const SamplerState& state,
                     TokenSpan prefix, int64_t position);

struct SampleBatch {
  const float* logits;  // [rows, vocab]
  int64_t rows, vocab;
  const SamplerState* const* states;
  const int32_t* row_state;     // [rows] index into states
  const int64_t* positions;     // [rows] absolute position of the token to be drawn
  const int32_t* prefix_start;  // [rows + 1]
  const int32_t* prefix_ids;
  const TokenMask* masks = nullptr;  // [rows], or null: no row has one
};
// logprobs: [rows], used for the rows whose state asks for them; null when none does. Threads of the pool
// share the rows when there are several.
void sample_batch(const SampleBatch& batch, int32_t* token_ids, RowLogprobs* logprobs);

}  // namespace outrider
