#include "ngram.h"

#include <algorithm>
#include <stdexcept>

namespace outrider {

namespace {

// Hashes run from the last token backwards, so that one pass gives those of all sizes.
uint64_t extend(uint64_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 32);
}

constexpr uint64_t kSeed = 0x243F6A8885A308D3ull;

uint64_t hash_of(const int32_t* end, int n) {
  uint64_t hash = kSeed;
  for (int i = 1; i <= n; ++i) hash = extend(hash, end[-i]);
  return hash;
}

}  // namespace

NgramIndex::NgramIndex(int min_n, int max_n) : min_n_(min_n), max_n_(max_n) {
  if (min_n < 1 || max_n < min_n || max_n > kLongestMatch)
    throw std::invalid_argument("n-gram sizes must satisfy 1 <= min_n <= max_n <= 64");
  tables_.resize(static_cast<size_t>(max_n - min_n + 1));
}

bool NgramIndex::same_ngram(int64_t place, const int32_t* end, int n) const {
  return std::equal(end - n, end, tokens_.data() + place + 1 - n);
}

size_t NgramIndex::find(const Table& table, int n, const int32_t* end, uint64_t hash) const {
  const size_t mask = table.slots.size() - 1;
  size_t slot = hash & mask;
  while (table.slots[slot] >= 0 && !same_ngram(table.slots[slot], end, n)) slot = (slot + 1) & mask;
  return slot;
}

void NgramIndex::grow(Table& table, int n) const {
  std::vector<int32_t> old(std::max<size_t>(16, table.slots.size() * 2), -1);
  old.swap(table.slots);
  for (int32_t end : old)
    if (end >= 0) table.slots[find(table, n, tokens_.data() + end + 1, hash_of(tokens_.data() + end + 1, n))] = end;
}

void NgramIndex::insert(Table& table, int n, int64_t end, uint64_t hash) {
  if (2 * (table.used + 1) > table.slots.size()) grow(table, n);
  int32_t& entry = table.slots[find(table, n, tokens_.data() + end + 1, hash)];
  table.used += entry < 0;
  entry = static_cast<int32_t>(end);
}

void NgramIndex::append(const int32_t* token_ids, size_t count) {
  if (tokens_.size() + count > static_cast<size_t>(INT32_MAX)) throw std::length_error("too many tokens to index");
  for (size_t i = 0; i < count; ++i) {
    // Only now has what ended the text a token after it.
    const int64_t end = static_cast<int64_t>(tokens_.size()) - 1;
    tokens_.push_back(token_ids[i]);
    uint64_t hash = kSeed;
    for (int n = 1; n <= max_n_ && n <= end + 1; ++n) {
      hash = extend(hash, tokens_[static_cast<size_t>(end - n + 1)]);
      if (n >= min_n_) insert(tables_[static_cast<size_t>(n - min_n_)], n, end, hash);
    }
  }
}

int NgramIndex::propose(const std::vector<int32_t>& after, int limit, std::vector<int32_t>& draft) const {
  draft.clear();
  if (limit <= 0) return 0;
  std::vector<int32_t> joined;
  const std::vector<int32_t>* text = &tokens_;
  if (!after.empty()) {
    const size_t keep = std::min(tokens_.size(), static_cast<size_t>(kLongestMatch));
    joined.assign(tokens_.end() - static_cast<std::ptrdiff_t>(keep), tokens_.end());
    joined.insert(joined.end(), after.begin(), after.end());
    text = &joined;
  }
  const int64_t size = static_cast<int64_t>(text->size()), indexed = static_cast<int64_t>(tokens_.size());
  const int32_t* end = text->data() + size;
  for (int n = static_cast<int>(std::min<int64_t>(max_n_, size)); n >= min_n_; --n) {
    const Table& table = tables_[static_cast<size_t>(n - min_n_)];
    if (table.slots.empty()) continue;
    const int64_t place = table.slots[find(table, n, end, hash_of(end, n))];
    if (place < 0) continue;
    int length = n;
    while (length < kLongestMatch && length <= place && length < size && tokens_[place - length] == end[-1 - length])
      ++length;
    for (int64_t next = place + 1; static_cast<int>(draft.size()) < limit; ++next) {
      const size_t beyond = static_cast<size_t>(std::max<int64_t>(next - indexed, 0));
      if (next < indexed) draft.push_back(tokens_[next]);
      else draft.push_back(beyond < after.size() ? after[beyond] : draft[beyond - after.size()]);
    }
    return length;
  }
  return 0;
}

size_t NgramIndex::memory_bytes() const {
  size_t bytes = sizeof *this + tokens_.capacity() * sizeof(int32_t) + tables_.capacity() * sizeof(Table);
  for (const Table& table : tables_) bytes += table.slots.capacity() * sizeof(int32_t);
  return bytes;
}

}  // namespace outrider
