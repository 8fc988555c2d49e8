// Filters, the draw itself, and log-probabilities.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "isa.h"
#include "philox.h"
#include "sampling.h"
#include "thread_pool.h"

namespace outrider {

OUTRIDER_DECLARE_KERNELS(SamplingKernels, sampling_kernels)

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kSlab = 2.0f;  // how far a search from the top down goes at once
constexpr int32_t kAnyId = std::numeric_limits<int32_t>::max();

struct Candidate {
  float value;
  int32_t id;
  uint32_t weight;
};

bool before(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// Every filter keeps a prefix of the order (value descending, id ascending): what comes before or is this.
struct Cut {
  float value = -kInfinity;
  int32_t id = kAnyId;

  bool keeps(float v, int32_t i) const { return v > value || (v == value && i <= id); }
  bool is_off() const { return value == -kInfinity; }
};

// Buffers of one thread, kept from row to row.
struct Scratch {
  std::vector<float> row, maxima, scaled, order;
  std::vector<int32_t> ids;
  std::vector<uint32_t> weights;
  std::vector<Candidate> candidates;

  void reserve(int64_t vocab) {
    const size_t n = static_cast<size_t>(vocab);
    if (row.size() >= n) return;
    for (auto* buffer : {&row, &scaled}) buffer->resize(n);
    maxima.resize(static_cast<size_t>(num_blocks(vocab)));
    ids.resize(n);
    weights.resize(n);
  }
};

// One row on its way to a token.
class Row {
 public:
  Row(const SamplingKernels& kernels, Scratch& scratch, const float* logits, int64_t vocab)
      : kernels_(kernels), scratch_(scratch), logits_(logits), vocab_(vocab), num_blocks_(num_blocks(vocab)) {
    if (!kernels.block_maxima(logits, vocab, scratch.maxima.data())) return;
    const float* maxima = scratch.maxima.data();
    const float* best = std::max_element(maxima, maxima + num_blocks_);  // the first of equals
    max_ = *best;
    if (!is_valid()) return;
    argmax_ = (best - maxima) * kBlock;
    while (logits_[argmax_] != max_) ++argmax_;
  }

  // There is a token to draw: no NaN, no +inf, not everything masked.
  bool is_valid() const { return std::isfinite(max_); }
  float max() const { return max_; }

  int32_t argmax() const { return static_cast<int32_t>(argmax_); }

  // From here on values are (logit - max) * inv_t.
  void scale(float inv_t) {
    inv_t_ = inv_t;
    offset_ = max_;
    for (int64_t b = 0; b < num_blocks_; ++b) scratch_.maxima[b] = (scratch_.maxima[b] - offset_) * inv_t;
  }

  Cut filter(int32_t top_k, double top_p, double min_p);
  int32_t draw(const Cut& cut, uint64_t seed, int64_t position) const;
  // As `draw`, for columns that stand for the ids of a vocabulary -> the best two columns, -1 if there is but one.
  std::pair<int64_t, int64_t> draw_columns(const DraftVocabulary& vocabulary, uint64_t total_weight, const Cut& cut,
                                           uint64_t seed, int64_t position) const;
  int64_t second_best() const;  // after argmax; -1 if it is masked
  uint32_t weight(int64_t column) const;  // as it goes into total_weight; after `scale`
  uint64_t total_weight() const;
  // The first `count` in order, sorted.
  void top(int64_t count, std::vector<Candidate>& result) const;

 private:
  float value(int64_t i) const { return (logits_[i] - offset_) * inv_t_; }
  int64_t gather(float low, float high) const {
    return kernels_.gather(logits_, scratch_.maxima.data(), vocab_, offset_, inv_t_, low, high,
                           scratch_.ids.data(), scratch_.scaled.data());
  }
  uint64_t gather_candidates(float low, float high, std::vector<Candidate>& result) const;
  void keep_top(int64_t count, std::vector<Candidate>& result) const;
  Cut cut_top_p(double top_p, bool of_candidates) const;

  const SamplingKernels& kernels_;
  Scratch& scratch_;
  const float* logits_;
  int64_t vocab_, num_blocks_, argmax_ = -1;
  float max_ = kInfinity, offset_ = 0.0f, inv_t_ = 1.0f;
};

// The tokens with values in [low, high) -> their total weight.
uint64_t Row::gather_candidates(float low, float high, std::vector<Candidate>& result) const {
  const int64_t count = gather(low, high);
  kernels_.weights(scratch_.scaled.data(), count, scratch_.weights.data());
  result.clear();
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    result.push_back({scratch_.scaled[i], scratch_.ids[i], scratch_.weights[i]});
    sum += scratch_.weights[i];
  }
  return sum;
}

// The first `count` candidates in order; the last of them is at the end.
void Row::keep_top(int64_t count, std::vector<Candidate>& result) const {
  float low = -kInfinity;
  if (count <= num_blocks_) {
    // `count` blocks have a value at least as large as the count-th largest block maximum.
    scratch_.order.assign(scratch_.maxima.begin(), scratch_.maxima.begin() + num_blocks_);
    const auto nth = scratch_.order.begin() + (count - 1);
    std::nth_element(scratch_.order.begin(), nth, scratch_.order.end(), std::greater<float>());
    low = *nth;
  }
  gather_candidates(low, kInfinity, result);
  const auto nth = result.begin() + (count - 1);
  std::nth_element(result.begin(), nth, result.end(), before);
  result.resize(static_cast<size_t>(count));
}

void Row::top(int64_t count, std::vector<Candidate>& result) const {
  result.clear();
  if ((count = std::min(count, vocab_)) <= 0) return;
  keep_top(count, result);
  std::sort(result.begin(), result.end(), before);
}

// The candidate at which the running weight, in order, reaches `target`.
Candidate crossing(std::vector<Candidate>& candidates, uint64_t target) {
  auto begin = candidates.begin(), end = candidates.end();
  while (end - begin > 1) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, before);
    uint64_t upper = 0;
    for (auto it = begin; it != middle; ++it) upper += it->weight;
    if (upper >= target) {
      end = middle;
    } else {
      target -= upper;
      begin = middle;
    }
  }
  return *begin;
}

// The smallest prefix that holds top_p of the weight: of the candidates that top-k left, or of the whole row.
Cut Row::cut_top_p(double top_p, bool of_candidates) const {
  auto& candidates = scratch_.candidates;
  uint64_t total = 0;
  if (of_candidates)
    for (const Candidate& c : candidates) total += c.weight;
  else
    total = kernels_.sum_weights(logits_, scratch_.maxima.data(), vocab_, offset_, inv_t_);
  auto target = std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(top_p * static_cast<double>(total))));
  if (!of_candidates) {
    // From the top down in slabs, until the next holds the rest. Below the last every weight is 0.
    float high = kInfinity;
    for (float low = -kSlab; low >= kNoWeight; high = low, low -= kSlab) {
      const uint64_t weight = gather_candidates(low, high, candidates);
      if (weight >= target) break;
      target -= weight;
    }
  }
  const Candidate last = crossing(candidates, target);
  return {last.value, last.id};
}

Cut Row::filter(int32_t top_k, double top_p, double min_p) {
  Cut cut;
  const bool by_rank = top_k > 0 && top_k < vocab_;
  if (by_rank) {
    keep_top(top_k, scratch_.candidates);
    cut = {scratch_.candidates.back().value, scratch_.candidates.back().id};
  }
  if (top_p < 1.0) cut = cut_top_p(top_p, by_rank);
  if (min_p > 0.0) {
    // p >= min_p * p_max, in logarithms.
    const float low = static_cast<float>(log_portable(min_p));
    if (low > cut.value) cut = {low, kAnyId};
  }
  return cut;
}

// The largest noise of a coarse byte, a little generous: the logarithms may be off by an ulp.
const double* noise_bounds() {
  static const auto bounds = [] {
    std::vector<double> b(256);
    for (uint32_t h = 0; h < 256; ++h) b[h] = gumbel_from_bits(h, 0xFFFFFFFFu) + 1e-9;
    return b;
  }();
  return bounds.data();
}

// The best of value + noise so far, of the tokens that a cut keeps; or the best two.
template <bool kTwo = false>
class Race {
 public:
  Race(const Noise& noise, const Cut& cut) : noise_(noise), cut_(cut), bounds_(noise_bounds()) {}

  void enter(float value, int32_t id) {
    const uint32_t group = static_cast<uint32_t>(id) >> 4;
    if (group != group_) coarse_ = noise_.coarse(group_ = group);
    enter(value, id, Noise::coarse_of(coarse_, static_cast<uint32_t>(id)));
  }

  void enter(float value, int32_t id, uint32_t coarse) {
    if (!cut_.keeps(value, id) || value + bounds_[coarse] < to_beat()) return;
    const uint32_t fine = noise_.fine(static_cast<uint32_t>(id));
    // At the top, noise <= -log(1 - u), which the leading zeros of 1 - u bound without a logarithm.
    if (coarse == 255 && fine != 0xFFFFFFFFu && value + (9 + __builtin_clz(~fine)) * 0.6931472 < to_beat()) return;
    const double score = value + gumbel_from_bits(coarse, fine);
    if (score > score_ || (score == score_ && id < id_)) {
      if (kTwo && id != id_) second_score_ = score_, second_id_ = id_;
      score_ = score;
      id_ = id;
    } else if (kTwo && id != id_ && score > second_score_) {
      second_score_ = score, second_id_ = id;
    }
  }

  int32_t winner() const { return id_; }
  int32_t second() const { return second_id_; }
  // No token below this can win, unless its coarse byte is 255.
  float floor() const { return std::max(cut_.value, static_cast<float>(to_beat() - bounds_[254] - 1e-5)); }
  // Nor below this, whatever its noise.
  float last_floor() const { return std::max(cut_.value, static_cast<float>(to_beat() - bounds_[255] - 1e-5)); }

 private:
  double to_beat() const { return kTwo ? second_score_ : score_; }
  const Noise& noise_;
  const Cut& cut_;
  const double* bounds_;
  double score_ = -std::numeric_limits<double>::infinity(), second_score_ = score_;
  int32_t id_ = -1, second_id_ = -1;
  uint32_t group_ = 0xFFFFFFFFu;
  PhiloxBlock coarse_ = {};
};

int32_t Row::draw(const Cut& cut, uint64_t seed, int64_t position) const {
  const Noise noise(seed, position);
  Race<> race(noise, cut);
  race.enter(0.0f, argmax());
  // Likely tokens, from the top down in slabs: with each the floor may rise.
  float high = kInfinity, low = 0.0f;
  while (race.floor() < high) {
    low = std::max(race.floor(), low - kSlab);
    const int64_t count = gather(low, high);
    for (int64_t i = 0; i < count; ++i) race.enter(scratch_.scaled[i], scratch_.ids[i]);
    high = low;
  }
  if (cut.value >= high) return race.winner();  // nothing below survives
  // Unlikely ones can win only with a coarse byte of 255: one in 256, found 128 at a time.
  const float* maxima = scratch_.maxima.data();
  int32_t lucky[128];
  for (int64_t b = 0; b < num_blocks_; b += 2) {
    const float best = b + 1 < num_blocks_ ? std::max(maxima[b], maxima[b + 1]) : maxima[b];
    if (best < race.last_floor()) continue;
    const int count = kernels_.top_noise(seed, position, static_cast<uint32_t>(b * kBlock / 16), lucky);
    for (int i = 0; i < count; ++i)
      if (lucky[i] < vocab_ && value(lucky[i]) < high) race.enter(value(lucky[i]), lucky[i], 255);
  }
  return race.winner();
}

// Tokens below the likely ones win this seldom at most when their luck is not looked at, in 64ths.
constexpr uint64_t kTailShare = 64;

std::pair<int64_t, int64_t> Row::draw_columns(const DraftVocabulary& vocabulary, uint64_t total_weight,
                                              const Cut& cut, uint64_t seed, int64_t position) const {
  const int32_t* ids = vocabulary.ids();
  const Noise noise(seed, position);
  const Cut cut_of_ids{cut.value, cut.id == kAnyId ? kAnyId : ids[cut.id]};
  Race<true> race(noise, cut_of_ids);
  race.enter(0.0f, ids[argmax()]);
  float high = kInfinity, low = 0.0f;
  uint64_t likely = 0;
  while (race.floor() < high && high > kNoWeight) {
    low = std::max(race.floor(), low - kSlab);
    const int64_t count = gather(low, high);
    for (int64_t i = 0; i < count; ++i) race.enter(scratch_.scaled[i], ids[scratch_.ids[i]]);
    kernels_.weights(scratch_.scaled.data(), count, scratch_.weights.data());
    for (int64_t i = 0; i < count; ++i) likely += scratch_.weights[i];
    high = low;
  }
  if (cut.value < high && total_weight - std::min(total_weight, likely) > total_weight / kTailShare) {
    int32_t lucky[128];
    for (int64_t group = 0; group < vocabulary.num_groups(); ++group) {
      if (vocabulary.first(group) == vocabulary.first(group + 1)) continue;
      const int count = kernels_.top_noise(seed, position, static_cast<uint32_t>(group * 8), lucky);
      for (int i = 0; i < count; ++i) {
        const int64_t column = lucky[i] < vocabulary.vocab_size() ? vocabulary.column(lucky[i]) : -1;
        if (column >= 0 && value(column) < high) race.enter(value(column), lucky[i], 255);
      }
    }
  }
  return {vocabulary.column(race.winner()), race.second() < 0 ? -1 : vocabulary.column(race.second())};
}

int64_t Row::second_best() const {
  const int64_t own = argmax_ / kBlock * kBlock;
  int64_t best = -1;
  const auto look = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < std::min(end, vocab_); ++i)
      if (i != argmax_ && logits_[i] > (best < 0 ? -kInfinity : logits_[best])) best = i;
  };
  look(own, own + kBlock);
  int64_t block = -1;
  for (int64_t b = 0; b < num_blocks_; ++b)
    if (b * kBlock != own && (block < 0 || scratch_.maxima[b] > scratch_.maxima[block])) block = b;
  if (block >= 0) look(block * kBlock, (block + 1) * kBlock);
  return best;
}

uint32_t Row::weight(int64_t column) const {
  const float scaled = value(column);
  uint32_t weight;
  kernels_.weights(&scaled, 1, &weight);
  return weight;
}

uint64_t Row::total_weight() const {
  return kernels_.sum_weights(logits_, scratch_.maxima.data(), vocab_, offset_, inv_t_);
}

void measure_logprobs(const SamplingKernels& kernels, Scratch& scratch, const float* logits, int64_t vocab,
                      int32_t token, int32_t num_top, RowLogprobs& out) {
  const Row row(kernels, scratch, logits, vocab);
  if (!row.is_valid()) return;  // masks can hide a NaN; there is no distribution then
  const double log_sum = log_portable(kernels.sum_exp(logits, vocab, row.max()));
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - static_cast<double>(row.max()) - log_sum);
  };
  out.logprob = logprob(logits[token]);
  out.rank = static_cast<int32_t>(1 + kernels.count_before(logits, vocab, logits[token], token));
  row.top(num_top, scratch.candidates);
  for (const Candidate& c : scratch.candidates) {
    out.top_ids.push_back(c.id);
    out.top_logprobs.push_back(logprob(c.value));
  }
}

// The token of a mask with a single one; else -1.
int32_t only_allowed(TokenMask mask, int64_t vocab) {
  int32_t token = -1;
  for (int64_t word = 0; word * 32 < vocab; ++word) {
    const uint32_t bits = mask[word];
    if (bits == 0) continue;
    if (token >= 0 || (bits & (bits - 1)) != 0) return -1;
    token = static_cast<int32_t>(word * 32 + __builtin_ctz(bits));
  }
  return token < vocab ? token : -1;
}

}  // namespace

int32_t sample_row(const float* logits, int64_t vocab, const SamplerState& state, TokenSpan prefix,
                   int64_t position, RowLogprobs* logprobs, TokenMask mask) {
  static thread_local Scratch scratch;
  static const SamplingKernels& kernels = OUTRIDER_SELECT_KERNELS(sampling_kernels);
  scratch.reserve(vocab);
  const SamplerParams& params = state.params();
  int32_t token = mask == nullptr ? -1 : only_allowed(mask, vocab);
  if (token >= 0) {  // nothing to compare it with
    const float value = state.process(logits, vocab, prefix, scratch.row.data())[token];
    if (!(std::abs(value) < kInfinity)) return -1;
    if (logprobs && params.num_logprobs >= 0)
      measure_logprobs(kernels, scratch, logits, vocab, token, params.num_logprobs, *logprobs);
    return token;
  }
  Row row(kernels, scratch, state.process(logits, vocab, prefix, scratch.row.data(), mask), vocab);
  if (!row.is_valid()) return -1;
  if (params.temperature == 0.0f) {
    token = row.argmax();
  } else {
    // The clamp keeps 0 * inf out of the scaled values; no useful temperature reaches it.
    row.scale(std::min(std::max(1.0f / params.temperature, 1e-30f), 1e30f));
    token = row.draw(row.filter(params.top_k, params.top_p, params.min_p), params.seed, position);
  }
  if (logprobs && params.num_logprobs >= 0)
    measure_logprobs(kernels, scratch, logits, vocab, token, params.num_logprobs, *logprobs);
  return token;
}

DraftVocabulary::DraftVocabulary(std::vector<int32_t> ids, int64_t vocab_size)
    : ids_(std::move(ids)), vocab_size_(vocab_size) {
  for (int64_t group = 0; group * 128 < vocab_size_ + 128; ++group)
    first_.push_back(std::lower_bound(ids_.begin(), ids_.end(), static_cast<int32_t>(group * 128)) - ids_.begin());
  columns_.assign(static_cast<size_t>(vocab_size_), -1);
  for (size_t i = 0; i < ids_.size(); ++i)
    if (ids_[i] >= 0 && ids_[i] < vocab_size_) columns_[static_cast<size_t>(ids_[i])] = static_cast<int32_t>(i);
}

Draft draft_row(const float* logits, const DraftVocabulary& vocabulary, const SamplerState& state,
                TokenSpan prefix, int64_t position) {
  static thread_local Scratch scratch;
  static const SamplingKernels& kernels = OUTRIDER_SELECT_KERNELS(sampling_kernels);
  const SamplerParams& params = state.params();
  const bool is_greedy = params.temperature == 0.0f;
  scratch.reserve(vocabulary.size());
  logits = state.process(logits, vocabulary.size(), prefix, scratch.row.data(), nullptr, &vocabulary);
  Row row(kernels, scratch, logits, vocabulary.size());
  if (!row.is_valid()) return {};
  row.scale(is_greedy ? 1.0f : std::min(std::max(1.0f / params.temperature, 1e-30f), 1e30f));
  const uint64_t total = row.total_weight();
  std::pair<int64_t, int64_t> columns;
  if (is_greedy) {
    columns = {row.argmax(), row.second_best()};
  } else {
    const Cut cut = row.filter(params.top_k, params.top_p, params.min_p);
    columns = row.draw_columns(vocabulary, total, cut, params.seed, position);
  }
  const auto token = [&](int64_t column) -> DraftToken {
    if (column < 0) return {};
    return {vocabulary.ids()[column],
            static_cast<float>(static_cast<double>(row.weight(column)) / static_cast<double>(total))};
  };
  return {token(columns.first), token(columns.second)};
}

void sample_batch(const SampleBatch& batch, int32_t* token_ids, RowLogprobs* logprobs) {
  const auto sample_range = [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const TokenSpan prefix{batch.prefix_ids + batch.prefix_start[r], batch.prefix_start[r + 1] - batch.prefix_start[r]};
      token_ids[r] = sample_row(batch.logits + r * batch.vocab, batch.vocab, *batch.states[batch.row_state[r]], prefix,
                                batch.positions[r], logprobs ? logprobs + r : nullptr, batch.masks ? batch.masks[r] : nullptr);
    }
  };
  // Waking the pool costs some microseconds, a row of 50,000 logits ten and more.
  if (batch.rows < 2 || batch.rows * batch.vocab < 100000)
    sample_range(0, batch.rows);
  else
    run_team([&](Team& team) { team.for_each(batch.rows, 1, sample_range); });
}

}  // namespace outrider
