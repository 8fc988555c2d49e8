// The tree of past texts, first in, first out.
//
// Invariant: a node's label lies in the newest text that passes through it. Texts go in the order in which they
// came, so when a label's text goes, nobody is left to read it.
#include <algorithm>
#include <stdexcept>

#include "suffix.h"

namespace outrider {

MemoryTree::MemoryTree(int max_depth) : SuffixTree(max_depth) {}

void MemoryTree::insert(const int32_t* token_ids, size_t count) {
  if (count == 0) return;
  if (count >= static_cast<size_t>(kOpen) || first_text_ > INT32_MAX - 2 - static_cast<int32_t>(texts_.size()))
    throw std::length_error("too many texts to remember");
  texts_.emplace_back(token_ids, token_ids + count);
  const int32_t size = static_cast<int32_t>(count);
  for (int32_t start = 0; start < size; ++start) insert_suffix(start, std::min(size, start + max_depth_));
  num_text_tokens_ += count;
}

void MemoryTree::insert_suffix(int32_t start, int32_t end) {
  const int32_t id = first_text_ + static_cast<int32_t>(texts_.size()) - 1;
  const int32_t* suffix = texts_.back().data() + start;
  const int32_t size = end - start;
  int32_t node = 0, depth = 0;
  while (depth < size) {
    int32_t child = find_child(node, suffix[depth]);
    if (child < 0) {
      add_child(node, id, start, size, 1);
      return;
    }
    const int32_t most = std::min(nodes_[child].depth, size);
    const int32_t* label = text(nodes_[child]).data() + nodes_[child].start;
    int32_t same = depth + 1;
    while (same < most && label[same] == suffix[same]) ++same;
    if (same < nodes_[child].depth) child = split(child, same);
    Node& passed = nodes_[child];
    ++passed.count;
    passed.text = id;
    passed.start = start;
    promote(child);
    node = child;
    depth = same;
  }
}

void MemoryTree::evict() {
  if (texts_.empty()) throw std::logic_error("there is no text to forget");
  const int32_t size = static_cast<int32_t>(texts_.front().size());
  for (int32_t start = 0; start < size; ++start) remove_suffix(start, std::min(size, start + max_depth_));
  num_text_tokens_ -= texts_.front().size();
  texts_.pop_front();
  ++first_text_;
}

void MemoryTree::remove_suffix(int32_t start, int32_t end) {
  const int32_t* suffix = texts_.front().data() + start;
  const int32_t size = end - start;
  int32_t node = 0, depth = 0;
  while (depth < size) {
    const int32_t child = find_child(node, suffix[depth]);
    depth = nodes_[child].depth;
    if (--nodes_[child].count == 0) {
      // Nobody else came this way, so the rest of the path has one node at a time.
      int32_t leaf = child;
      while (nodes_[leaf].first_child >= 0) leaf = nodes_[leaf].first_child;
      while (leaf != node) {
        const int32_t parent = nodes_[leaf].parent;
        remove_leaf(leaf);
        leaf = parent;
      }
      break;
    }
    demote(child);
    node = child;
  }
  if (node == 0) return;
  const int32_t only = nodes_[node].first_child;
  if (only >= 0 && nodes_[only].next < 0 && nodes_[only].count == nodes_[node].count) merge_into_only_child(node);
}

}  // namespace outrider
