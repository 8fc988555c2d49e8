#include "phrases.h"

#include <algorithm>
#include <queue>
#include <stdexcept>

namespace outrider {

PhraseTable::PhraseTable(std::vector<uint32_t> fingerprints, std::vector<Entry> entries)
    : fingerprints_(std::move(fingerprints)), entries_(std::move(entries)) {
  if (fingerprints_.size() != entries_.size()) throw std::invalid_argument("every fingerprint needs an entry");
  if (!std::is_sorted(fingerprints_.begin(), fingerprints_.end()))
    throw std::invalid_argument("fingerprints must ascend");
  buckets_.resize((size_t{1} << kBucketBits) + 1);
  size_t next = 0;
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    while (next < fingerprints_.size() && (fingerprints_[next] >> (32 - kBucketBits)) < bucket) ++next;
    buckets_[bucket] = static_cast<uint32_t>(next);
  }
}

uint32_t PhraseTable::fingerprint(const int32_t* token_ids, int length) {
  uint64_t hash = 0x9E3779B97F4A7C15ull * static_cast<uint64_t>(length);
  for (int i = 0; i < length; ++i) {
    hash = (hash ^ static_cast<uint32_t>(token_ids[i])) * 0xD6E8FEB86659FD93ull;
    hash ^= hash >> 32;
  }
  hash *= 0xD6E8FEB86659FD93ull;
  return static_cast<uint32_t>(hash >> 32);
}

const PhraseTable::Entry* PhraseTable::find(const int32_t* tail, size_t size) const {
  for (int length = static_cast<int>(std::min<size_t>(size, kLongest)); length > 0; --length) {
    const uint32_t wanted = fingerprint(tail + size - length, length);
    const size_t bucket = wanted >> (32 - kBucketBits);
    const auto begin = fingerprints_.begin() + buckets_[bucket], end = fingerprints_.begin() + buckets_[bucket + 1];
    const auto at = std::find(begin, end, wanted);
    if (at != end) return &entries_[static_cast<size_t>(at - fingerprints_.begin())];
  }
  return nullptr;
}

void PhraseTable::propose(const std::vector<int32_t>& tail, int limit, bool branches, float least,
                          std::vector<int32_t>& token_ids, std::vector<int32_t>& parents,
                          std::vector<float>& survival) const {
  struct Open {
    float alive;
    int32_t parent, token;
    bool operator<(const Open& other) const { return alive < other.alive; }
  };
  std::priority_queue<Open> open;
  std::vector<int32_t> context;
  auto expand = [&](int32_t node, float alive) {
    // The last kLongest tokens on the path to the node.
    context.clear();
    for (int32_t at = node; at >= 0 && context.size() < static_cast<size_t>(kLongest); at = parents[at])
      context.push_back(token_ids[at]);
    for (size_t i = tail.size(); i > 0 && context.size() < static_cast<size_t>(kLongest); --i)
      context.push_back(tail[i - 1]);
    std::reverse(context.begin(), context.end());
    const Entry* entry = find(context.data(), context.size());
    for (int i = 0; entry != nullptr && i < (branches ? kWidth : 1); ++i) {
      const float chance = static_cast<float>(entry->chances[i]) / 255.0f;
      if (entry->token_ids[i] >= 0 && alive * chance >= least) open.push({alive * chance, node, entry->token_ids[i]});
    }
  };
  expand(-1, 1.0f);
  while (!open.empty() && static_cast<int>(token_ids.size()) < limit) {
    const Open best = open.top();
    open.pop();
    token_ids.push_back(best.token);
    parents.push_back(best.parent);
    survival.push_back(best.alive);
    expand(static_cast<int32_t>(token_ids.size()) - 1, best.alive);
  }
}

size_t PhraseTable::memory_bytes() const {
  return sizeof *this + (fingerprints_.capacity() + buckets_.capacity()) * sizeof(uint32_t) +
         entries_.capacity() * sizeof(Entry);
}

}  // namespace outrider
