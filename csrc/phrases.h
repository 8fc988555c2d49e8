// How does the target usually go on after these few tokens? A fixed table, made from text that it wrote.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace outrider {

// Contexts of 1 to kLongest tokens, each with its two likeliest next tokens. A context is known by a fingerprint of 32
// bits: that of another one is taken for it once in thousands of lookups, and makes a wrong draft.
class PhraseTable {
 public:
  static constexpr int kLongest = 4;
  static constexpr int kWidth = 2;  // next tokens of a context

  struct Entry {
    int32_t token_ids[kWidth];  // -1: none
    uint8_t chances[kWidth];    // of 255
  };

  // Entries by ascending fingerprint.
  PhraseTable(std::vector<uint32_t> fingerprints, std::vector<Entry> entries);

  static uint32_t fingerprint(const int32_t* token_ids, int length);
  // The entry of the longest known context that ends tail[0 .. size), or null.
  const Entry* find(const int32_t* tail, size_t size) const;

  // A tree (or, without `branches`, a chain) of the likeliest continuations: at most `limit` nodes, none that survives
  // with less than `least`.
  void propose(const std::vector<int32_t>& tail, int limit, bool branches, float least, std::vector<int32_t>& token_ids,
               std::vector<int32_t>& parents, std::vector<float>& survival) const;

  size_t size() const { return fingerprints_.size(); }
  size_t memory_bytes() const;

 private:
  static constexpr int kBucketBits = 16;

  std::vector<uint32_t> fingerprints_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> buckets_;  // first entry by the fingerprint's upper bits
};

}  // namespace outrider
