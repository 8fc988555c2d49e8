// Penalties, bias and masks: what happens to a row's logits before a token is drawn from them.
#include "sampling.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace outrider {

namespace {
constexpr float kMasked = -std::numeric_limits<float>::infinity();
}

SamplerState::SamplerState(SamplerParams params, TokenSpan prompt) : params_(std::move(params)) {
  penalties_ = params_.repetition_penalty != 1.0f || params_.frequency_penalty != 0.0f ||
               params_.presence_penalty != 0.0f;
  const auto note = [this](int32_t id) { largest_id_ = std::max(largest_id_, id); };
  for (int32_t id : params_.logit_bias_ids) note(id);
  for (int32_t id : params_.masked_until_min_tokens) note(id);
  for (const auto& word : params_.bad_words) {
    for (int32_t id : word) note(id);
    tail_size_ = std::max(tail_size_, word.size() - 1);
  }
  if (params_.repetition_penalty != 1.0f)
    for (int64_t i = 0; i < prompt.size; ++i) {
      note(prompt.data[i]);
      see(prompt.data[i], 0);
    }
  const int64_t kept = std::min<int64_t>(prompt.size, static_cast<int64_t>(tail_size_));
  tail_.assign(prompt.data + prompt.size - kept, prompt.data + prompt.size);
}

void SamplerState::append(TokenSpan tokens) {
  num_output_ += tokens.size;
  for (int64_t i = 0; i < tokens.size; ++i) {
    if (penalties_) {
      largest_id_ = std::max(largest_id_, tokens.data[i]);
      see(tokens.data[i], 1);
    }
    if (tail_size_ == 0) continue;
    if (tail_.size() == tail_size_) tail_.erase(tail_.begin());
    tail_.push_back(tokens.data[i]);
  }
}

void SamplerState::see(int32_t token, int32_t count) {
  const auto [place, is_new] = index_.try_emplace(token, static_cast<int32_t>(seen_.size()));
  if (is_new) {
    seen_.push_back(token);
    counts_.push_back(0);
  }
  counts_[static_cast<size_t>(place->second)] += count;
}

// The one place where a seen token's logit changes: a pure function of the logit and of how often the
// token was emitted, so that a drafted prefix and an emitted one give the same bits.
float SamplerState::penalised(float logit, int32_t output_count) const {
  if (params_.repetition_penalty != 1.0f)
    logit = logit > 0.0f ? logit / params_.repetition_penalty : logit * params_.repetition_penalty;
  if (output_count > 0) {
    logit -= params_.frequency_penalty * static_cast<float>(output_count);
    logit -= params_.presence_penalty;
  }
  return logit;
}

void SamplerState::penalise(const float* raw, TokenSpan prefix, float* row, const DraftVocabulary* known_ids) const {
  const auto penalise_token = [&](int32_t token, int32_t count) {
    const int64_t column = known_ids ? known_ids->column(token) : token;
    if (column >= 0) row[column] = penalised(raw[column], count);
  };
  for (size_t i = 0; i < seen_.size(); ++i) penalise_token(seen_[i], counts_[i]);
  for (int64_t i = 0; i < prefix.size; ++i) {
    const int32_t token = prefix.data[i];
    const auto place = index_.find(token);
    const int32_t known = place == index_.end() ? 0 : counts_[static_cast<size_t>(place->second)];
    const int32_t drafted = static_cast<int32_t>(std::count(prefix.data, prefix.data + i + 1, token));
    penalise_token(token, known + drafted);
  }
}

// Whether the word's last token would complete it, after prompt, output and prefix.
bool SamplerState::completes(const std::vector<int32_t>& word, TokenSpan prefix) const {
  const size_t needed = word.size() - 1;
  const size_t from_prefix = std::min(needed, static_cast<size_t>(prefix.size));
  const size_t from_tail = needed - from_prefix;
  return from_tail <= tail_.size() &&
         std::equal(word.begin(), word.begin() + static_cast<int64_t>(from_tail),
                    tail_.end() - static_cast<int64_t>(from_tail)) &&
         std::equal(prefix.data + prefix.size - from_prefix, prefix.data + prefix.size,
                    word.begin() + static_cast<int64_t>(from_tail));
}

namespace {
// Per 32 tokens the fewer of two things: what is allowed is copied into what is masked, or the other way round.
void apply_mask(TokenMask mask, const float* row, int64_t vocab, float* result) {
  for (int64_t begin = 0; begin < vocab; begin += 32) {
    const int64_t size = std::min<int64_t>(32, vocab - begin);
    const uint32_t all = size == 32 ? ~uint32_t{0} : (uint32_t{1} << size) - 1;
    uint32_t allowed = mask[begin / 32] & all;
    if (__builtin_popcount(allowed) > 16) {
      if (row != result) std::memcpy(result + begin, row + begin, sizeof(float) * static_cast<size_t>(size));
      for (uint32_t rest = ~allowed & all; rest; rest &= rest - 1) result[begin + __builtin_ctz(rest)] = kMasked;
    } else if (row != result) {
      std::fill_n(result + begin, size, kMasked);
      for (; allowed; allowed &= allowed - 1) {
        const int64_t token = begin + __builtin_ctz(allowed);
        result[token] = row[token];
      }
    } else {
      for (uint32_t rest = ~allowed & all; rest; rest &= rest - 1) result[begin + __builtin_ctz(rest)] = kMasked;
    }
  }
}

}  // namespace

const float* SamplerState::process(const float* raw, int64_t vocab, TokenSpan prefix, float* scratch,
                                   TokenMask mask, const DraftVocabulary* known_ids) const {
  const float* row = raw;
  const auto writable = [&] {
    if (row == raw) std::memcpy(scratch, raw, sizeof(float) * static_cast<size_t>(vocab));
    row = scratch;
    return scratch;
  };
  float unknown;  // stands for what the row lacks
  const auto at = [&](int32_t id) -> float& {
    const int64_t column = known_ids ? known_ids->column(id) : id;
    return column >= 0 ? writable()[column] : unknown = 0.0f;
  };
  if (penalties_ && (!seen_.empty() || prefix.size > 0)) penalise(raw, prefix, writable(), known_ids);
  for (size_t i = 0; i < params_.logit_bias_ids.size(); ++i)
    at(params_.logit_bias_ids[i]) += params_.logit_bias_values[i];
  if (num_output_ + prefix.size < params_.min_tokens)
    for (int32_t id : params_.masked_until_min_tokens) at(id) = kMasked;
  for (const auto& word : params_.bad_words)
    if (completes(word, prefix)) at(word.back()) = kMasked;
  if (mask == nullptr) return row;
  apply_mask(mask, row, vocab, scratch);
  return scratch;
}

}  // namespace outrider
