// Where did the last n tokens occur before, and what came after them?
//
// An index over one request's tokens (prompt, then output), for every n from max_n down to min_n. It only
// grows: drafts never enter it, so a rejection undoes nothing.
//
// Invariant: for each n-gram that occurs in the text with a token after it, the table of its size holds the
// last place where it does. Entries are places, and are compared by the tokens there: hash collisions
// cost time, never a wrong match.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace outrider {

class NgramIndex {
 public:
  NgramIndex(int min_n, int max_n);

  // Amortised constant time a token.
  void append(const int32_t* token_ids, size_t count);

  // The newest earlier occurrence of the longest indexed n-gram that ends the text followed by `after` (which is
  // not indexed), and up to `limit` tokens that followed it. Where the text ends, the draft goes on with `after`
  // and then with itself: after "ababab" it is "abab...".
  // Returns the length of the match (it may exceed max_n; counted up to kLongestMatch), 0 if there is none.
  int propose(const std::vector<int32_t>& after, int limit, std::vector<int32_t>& draft) const;

  size_t size() const { return tokens_.size(); }
  size_t memory_bytes() const;

  static constexpr int kLongestMatch = 64;

 private:
  // Open addressing; an entry is the place of an n-gram's last token, -1 where empty.
  struct Table {
    std::vector<int32_t> slots;
    size_t used = 0;
  };

  bool same_ngram(int64_t place, const int32_t* end, int n) const;  // the one that ends there, the one before `end`
  // The slot that holds the n-gram before `end`, or the empty one where it belongs.
  size_t find(const Table& table, int n, const int32_t* end, uint64_t hash) const;
  void insert(Table& table, int n, int64_t end, uint64_t hash);
  void grow(Table& table, int n) const;

  int min_n_, max_n_;
  std::vector<int32_t> tokens_;
  std::vector<Table> tables_;  // [n - min_n]
};

}  // namespace outrider
