// The tree of one growing text (Ukkonen's construction, with counts and a bound on the depth).
#include <algorithm>
#include <stdexcept>

#include "suffix.h"

namespace outrider {

RequestTree::RequestTree(int max_depth) : SuffixTree(max_depth), links_(1, 0) { texts_.emplace_back(); }

void RequestTree::append(const int32_t* token_ids, size_t count) {
  if (size() + count >= static_cast<size_t>(kOpen)) throw std::length_error("too many tokens to index");
  for (size_t i = 0; i < count; ++i) extend(token_ids[i]);
}

// On to the next shorter suffix: from xa to a.
void RequestTree::follow_link() {
  --remaining_;
  if (active_node_ != 0) {
    active_node_ = links_[static_cast<size_t>(active_node_)];
  } else if (active_length_ > 0) {
    --active_length_;
    ++active_edge_;
  }
}

void RequestTree::add_leaf(int32_t parent) {
  const int32_t leaf = add_child(parent, 0, static_cast<int32_t>(size()) - remaining_, kOpen, 1);
  links_.resize(nodes_.size(), 0);
  links_[static_cast<size_t>(leaf)] = 0;
  for (int32_t node = parent; node != 0; node = nodes_[node].parent) {
    ++nodes_[node].count;
    promote(node);
  }
}

void RequestTree::extend(int32_t token) {
  std::vector<int32_t>& tokens = texts_.front();
  tokens.push_back(token);
  const int32_t last = static_cast<int32_t>(tokens.size()) - 1;
  ++remaining_;
  int32_t unlinked = 0;  // an inner node made just now, whose link is the next node we come to
  auto link_to = [&](int32_t node) {
    if (unlinked != 0) links_[static_cast<size_t>(unlinked)] = node;
    unlinked = 0;
  };
  while (remaining_ > 0) {
    if (active_length_ == 0) active_edge_ = last;
    const int32_t child = find_child(active_node_, tokens[static_cast<size_t>(active_edge_)]);
    if (child < 0) {
      add_leaf(active_node_);
      link_to(active_node_);
      follow_link();
      continue;
    }
    const int32_t top = nodes_[active_node_].depth, length = end_depth(nodes_[child]) - top;
    if (active_length_ >= length && nodes_[child].depth != kOpen) {
      active_edge_ += length;
      active_length_ -= length;
      active_node_ = child;
      continue;
    }
    if (this->token(nodes_[child], top + active_length_) == token) {
      ++active_length_;
      link_to(active_node_);
      if (remaining_ >= max_depth_) follow_link();
      break;
    }
    const int32_t inner = split(child, top + active_length_);
    links_.resize(nodes_.size(), 0);
    links_[static_cast<size_t>(inner)] = 0;
    add_leaf(inner);
    link_to(inner);
    unlinked = inner;
    follow_link();
  }
}

}  // namespace outrider
