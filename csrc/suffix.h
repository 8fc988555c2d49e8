// Suffix trees over token texts: what followed the last tokens before, and how often?
//
// Nodes live in one array and point by index; a node's edge is a piece of a text, not a copy. The label of
// the path from the root to the end of node i's edge is texts[i.text][i.start .. i.start + i.depth).
// Children are found by hash, and the one with the highest count comes first (of equals the one that was
// reached last), so the best continuation of a node costs one look.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace outrider {

// How counts become chances. A token seen c of n times after a context of m tokens is taken to survive with
// (c + weight * prior[m]) / (n + weight): long contexts are trusted at once, short ones when counts agree.
struct SuffixScoring {
  float weight = 1.0f;
  std::vector<float> prior;   // by length of the context, [0] unused; the last stands for all longer ones
  float spec_factor = 1.0f;   // a match of m tokens gives at most spec_factor * m draft tokens
  float min_survival = 0.1f;  // and none that is less likely than this to be reached and accepted

  float chance(int32_t count, int32_t total, int context) const;
};

// Parents come before children; chances[i] is that of token i once its parent is accepted.
struct SuffixDraft {
  std::vector<int32_t> token_ids, parents;
  std::vector<float> chances;
  int match_length = 0;
  double score = 0.0;  // expected accepted tokens

  size_t size() const { return token_ids.size(); }
};

class SuffixTree {
 public:
  // A place in the tree: `depth` tokens down the path that ends with `node`.
  struct Locus {
    int32_t node = 0;
    int32_t depth = 0;
  };

  // Occurrences of these tokens that the tree counts; 0 where it does not know them.
  int64_t count(const int32_t* token_ids, size_t size) const;

  // The draft with the best score for a text that ends with tail[0 .. size), of at most `limit` tokens, over
  // several lengths of match from `longest` down. With `branches` it is a tree of the likeliest nodes. The last
  // `num_after` tokens of the tail are not in the tree's text yet.
  SuffixDraft propose(const int32_t* tail, size_t size, size_t num_after, int longest, int limit, bool branches,
                      const SuffixScoring& scoring) const;
  // The length of the longest suffix of tail[0 .. size) in the tree, looked for from `hint` tokens.
  int longest_match(const int32_t* tail, size_t size, int hint) const;

  int max_depth() const { return max_depth_; }
  // The longest match that leaves room for a draft of `limit` tokens where no path is deeper than max_depth.
  int longest_useful(int limit) const { return std::max(max_depth_ / 2, max_depth_ - limit); }
  size_t num_nodes() const { return nodes_.size() - free_.size() - 1; }  // without the root
  size_t memory_bytes() const;
  // What its nodes and texts need, without room to grow: falls when something is removed.
  size_t live_bytes() const { return num_nodes() * (sizeof(Node) + 2 * sizeof(int32_t)) + num_text_tokens_ * sizeof(int32_t); }
  // What is broken in the tree, or nothing.
  std::string broken() const;

 protected:
  struct Node {
    int32_t parent = -1;
    int32_t text = 0;
    int32_t start = 0;
    int32_t depth = 0;  // kOpen: to the end of the text, however far it grows
    int32_t count = 0;
    int32_t first_child = -1, next = -1, prev = -1;
  };
  static constexpr int32_t kOpen = INT32_MAX;

  explicit SuffixTree(int max_depth);

  const std::vector<int32_t>& text(const Node& node) const { return texts_[static_cast<size_t>(node.text - first_text_)]; }
  int32_t end_depth(const Node& node) const;  // of its edge, as of now
  int32_t token(const Node& node, int32_t depth) const { return text(node)[static_cast<size_t>(node.start + depth)]; }
  int32_t first_token(int32_t node) const { return token(nodes_[node], nodes_[nodes_[node].parent].depth); }
  int32_t find_child(int32_t parent, int32_t token) const;
  int32_t add_child(int32_t parent, int32_t text, int32_t start, int32_t depth, int32_t count);
  // A new node `depth` tokens down, above `child`, with the same count.
  int32_t split(int32_t child, int32_t depth);
  void remove_leaf(int32_t node);
  void merge_into_only_child(int32_t node);
  void promote(int32_t node);  // its count has grown
  void demote(int32_t node);   // its count has shrunk
  bool locate(const int32_t* token_ids, size_t size, Locus& locus) const;

  std::vector<Node> nodes_;  // [0] is the root
  std::deque<std::vector<int32_t>> texts_;
  int32_t first_text_ = 0;  // id of texts_[0]
  size_t num_text_tokens_ = 0;
  const int max_depth_;

 private:
  struct Step {
    int32_t token;
    float chance;
    Locus to;
  };
  struct Open;
  struct Task;

  size_t slot_of(int32_t parent, int32_t token) const;
  void insert_slot(int32_t node);
  void erase_slot(size_t slot);
  void unlink(int32_t node);
  void link_first(int32_t node);
  int32_t new_node(const Node& node);
  int more_frequent(const int32_t* end, int match, int64_t count) const;
  bool next_step(Locus at, int32_t last, int context, const Task& task, Step& step) const;
  bool beyond_end(Locus at, int32_t last, const Task& task, int32_t& token) const;
  void draw_chain(Locus at, Task& task) const;
  void draw_tree(Locus at, Task& task) const;

  std::vector<int32_t> slots_;  // open addressing; -1 where empty
  size_t num_slots_used_ = 0;
  std::vector<int32_t> free_;
};

// One growing text: a suffix tree built from left to right in amortised constant time a token.
//
// Counted are the occurrences that already have a distinguishing continuation (those whose suffix has a leaf).
// A repetition longer than max_depth is followed, not recorded again, which bounds the depth of inner nodes.
class RequestTree : public SuffixTree {
 public:
  explicit RequestTree(int max_depth);
  void append(const int32_t* token_ids, size_t count);
  const std::vector<int32_t>& tokens() const { return texts_.front(); }
  size_t size() const { return tokens().size(); }
  int match_length() const { return remaining_; }  // of the longest suffix that occurred before

 private:
  void extend(int32_t token);
  void follow_link();
  void add_leaf(int32_t parent);

  std::vector<int32_t> links_;  // suffix link of each node
  int32_t active_node_ = 0, active_edge_ = 0, active_length_ = 0, remaining_ = 0;
};

// Whole texts, forgotten in the order in which they came. Each contributes all its pieces of up to max_depth tokens.
class MemoryTree : public SuffixTree {
 public:
  explicit MemoryTree(int max_depth);
  void insert(const int32_t* token_ids, size_t count);
  void evict();  // the oldest text; there must be one
  size_t num_texts() const { return texts_.size(); }
  size_t num_tokens() const { return num_text_tokens_; }
  const std::vector<int32_t>& nth_text(size_t i) const { return texts_[i]; }

 private:
  void insert_suffix(int32_t start, int32_t end);
  void remove_suffix(int32_t start, int32_t end);
};

}  // namespace outrider
