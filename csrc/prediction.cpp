#include "prediction.h"

#include <algorithm>
#include <numeric>

namespace outrider {

namespace {

constexpr size_t kNear = 24;      // tokens around the expected place where a single agreeing token is believed
constexpr int kFarAgreement = 3;  // tokens that must agree elsewhere

}  // namespace

Prediction::Prediction(std::vector<int32_t> token_ids) : tokens_(std::move(token_ids)), order_(tokens_.size()) {
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [this](int32_t a, int32_t b) { return tokens_[a] < tokens_[b]; });
  place_.agreed = kBeginning;
}

int Prediction::agreement(const std::vector<int32_t>& recent, size_t next) const {
  int length = 0;
  while (length < kMostAgreement && static_cast<size_t>(length) < std::min(next, recent.size()) &&
         tokens_[next - 1 - static_cast<size_t>(length)] == recent[recent.size() - 1 - static_cast<size_t>(length)])
    ++length;
  return length;
}

Prediction::Place Prediction::search(const std::vector<int32_t>& recent, size_t expected) const {
  const int32_t last = recent.back();
  auto first = std::lower_bound(order_.begin(), order_.end(), last,
                                [this](int32_t place, int32_t token) { return tokens_[place] < token; });
  Place best{expected, 0};
  size_t best_distance = 0;
  for (; first != order_.end() && tokens_[static_cast<size_t>(*first)] == last; ++first) {
    const size_t next = static_cast<size_t>(*first) + 1;
    const size_t distance = next > expected ? next - expected : expected - next;
    const int agreed = agreement(recent, next);
    if (agreed < kFarAgreement && distance > kNear) continue;
    if (agreed > best.agreed || (agreed == best.agreed && distance < best_distance)) {
      best = {next, agreed};
      best_distance = distance;
    }
  }
  return best;
}

void Prediction::advance(const Prediction& of, std::vector<int32_t>& recent, Place& place, int32_t token) {
  recent.push_back(token);
  if (place.next < of.tokens_.size() && of.tokens_[place.next] == token) {
    ++place.next;
    place.agreed = place.agreed == kBeginning ? kFarAgreement + 1 : std::min(place.agreed + 1, kMostAgreement);
    return;
  }
  // One token was put in the place of another, unless the text says better.
  place = of.search(recent, std::min(place.next + 1, of.tokens_.size()));
}

void Prediction::append(const int32_t* token_ids, size_t count) {
  for (size_t i = 0; i < count; ++i) advance(*this, recent_, place_, token_ids[i]);
  if (recent_.size() > 4 * static_cast<size_t>(kMostAgreement)) {
    const size_t old = recent_.size() - static_cast<size_t>(kMostAgreement);
    recent_.erase(recent_.begin(), recent_.begin() + static_cast<std::ptrdiff_t>(old));
    num_old_ += old;
  }
}

void Prediction::propose(const std::vector<int32_t>& after, int limit, std::vector<int32_t>& draft, int& agreed) const {
  Place place = place_;
  if (!after.empty()) {
    std::vector<int32_t> recent = recent_;
    for (int32_t token : after) advance(*this, recent, place, token);
  }
  draft.clear();
  agreed = place.agreed;
  const size_t most = static_cast<size_t>(std::max(limit, 0));
  for (size_t i = place.next; i < tokens_.size() && draft.size() < most; ++i) draft.push_back(tokens_[i]);
}

size_t Prediction::memory_bytes() const {
  return sizeof *this + (tokens_.capacity() + order_.capacity() + recent_.capacity()) * sizeof(int32_t);
}

}  // namespace outrider
