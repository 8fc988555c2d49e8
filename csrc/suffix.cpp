#include "suffix.h"

#include <algorithm>
#include <queue>
#include <stdexcept>

namespace outrider {

namespace {

size_t mix(int32_t parent, int32_t token) {
  uint64_t key = (static_cast<uint64_t>(static_cast<uint32_t>(parent)) << 32) | static_cast<uint32_t>(token);
  key *= 0x9E3779B97F4A7C15ull;
  return static_cast<size_t>(key ^ (key >> 29));
}

constexpr int kMostBranches = 4;   // children of a node that are looked at when a draft may branch
constexpr int kMostMatches = 6;    // lengths of match that are tried, longest first

}  // namespace

float SuffixScoring::chance(int32_t count, int32_t total, int context) const {
  const size_t i = std::min(static_cast<size_t>(std::max(context, 0)), prior.size() - 1);
  return (static_cast<float>(count) + weight * prior[i]) / (static_cast<float>(total) + weight);
}

SuffixTree::SuffixTree(int max_depth) : nodes_(1), max_depth_(max_depth), slots_(64, -1) {
  if (max_depth < 2 || max_depth > 4096) throw std::invalid_argument("max_depth must be between 2 and 4096");
}

int32_t SuffixTree::end_depth(const Node& node) const {
  return std::min(node.depth, static_cast<int32_t>(text(node).size()) - node.start);
}

// --- children ---

size_t SuffixTree::slot_of(int32_t parent, int32_t token) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = mix(parent, token) & mask;
  while (slots_[slot] >= 0 && !(nodes_[slots_[slot]].parent == parent && first_token(slots_[slot]) == token))
    slot = (slot + 1) & mask;
  return slot;
}

int32_t SuffixTree::find_child(int32_t parent, int32_t token) const { return slots_[slot_of(parent, token)]; }

void SuffixTree::insert_slot(int32_t node) {
  if (2 * (num_slots_used_ + 1) > slots_.size()) {
    std::vector<int32_t> old(slots_.size() * 2, -1);
    old.swap(slots_);
    for (int32_t other : old)
      if (other >= 0) slots_[slot_of(nodes_[other].parent, first_token(other))] = other;
  }
  slots_[slot_of(nodes_[node].parent, first_token(node))] = node;
  ++num_slots_used_;
}

void SuffixTree::erase_slot(size_t slot) {
  const size_t mask = slots_.size() - 1;
  // Whoever was pushed past this slot moves back, so that no search ends early.
  for (size_t next = (slot + 1) & mask; slots_[next] >= 0; next = (next + 1) & mask) {
    const size_t home = mix(nodes_[slots_[next]].parent, first_token(slots_[next])) & mask;
    if (((next - home) & mask) >= ((next - slot) & mask)) {
      slots_[slot] = slots_[next];
      slot = next;
    }
  }
  slots_[slot] = -1;
  --num_slots_used_;
}

void SuffixTree::link_first(int32_t node) {
  Node& n = nodes_[node];
  Node& parent = nodes_[n.parent];
  n.prev = -1;
  n.next = parent.first_child;
  if (n.next >= 0) nodes_[n.next].prev = node;
  parent.first_child = node;
}

void SuffixTree::unlink(int32_t node) {
  const Node& n = nodes_[node];
  if (n.prev >= 0) nodes_[n.prev].next = n.next;
  else nodes_[n.parent].first_child = n.next;
  if (n.next >= 0) nodes_[n.next].prev = n.prev;
}

void SuffixTree::promote(int32_t node) {
  const Node& n = nodes_[node];
  if (n.prev < 0 || n.parent == 0) return;  // nobody asks for the root's best child
  if (n.count >= nodes_[nodes_[n.parent].first_child].count) {
    unlink(node);
    link_first(node);
  } else if (n.count > nodes_[n.prev].count) {
    // One place forward: the next best children gather near the front.
    const int32_t before = n.prev;
    unlink(before);
    Node &b = nodes_[before], &me = nodes_[node];
    b.prev = node;
    b.next = me.next;
    if (b.next >= 0) nodes_[b.next].prev = before;
    me.next = before;
  }
}

void SuffixTree::demote(int32_t node) {
  const Node& n = nodes_[node];
  if (n.prev >= 0 || n.parent == 0) return;
  int32_t best = node;
  for (int32_t other = n.next; other >= 0; other = nodes_[other].next)
    if (nodes_[other].count > nodes_[best].count) best = other;
  if (best == node) return;
  unlink(best);
  link_first(best);
}

int32_t SuffixTree::new_node(const Node& node) {
  if (free_.empty()) {
    if (nodes_.size() >= static_cast<size_t>(INT32_MAX)) throw std::length_error("the suffix tree is full");
    nodes_.push_back(node);
    return static_cast<int32_t>(nodes_.size()) - 1;
  }
  const int32_t index = free_.back();
  free_.pop_back();
  nodes_[index] = node;
  return index;
}

int32_t SuffixTree::add_child(int32_t parent, int32_t text, int32_t start, int32_t depth, int32_t count) {
  const int32_t node = new_node({parent, text, start, depth, count, -1, -1, -1});
  const int32_t best = nodes_[parent].first_child;
  if (best < 0 || parent == 0 || count >= nodes_[best].count) {
    link_first(node);
  } else {  // second
    nodes_[node].prev = best;
    nodes_[node].next = nodes_[best].next;
    if (nodes_[best].next >= 0) nodes_[nodes_[best].next].prev = node;
    nodes_[best].next = node;
  }
  insert_slot(node);
  return node;
}

int32_t SuffixTree::split(int32_t child, int32_t depth) {
  const Node below = nodes_[child];
  const size_t slot = slot_of(below.parent, first_token(child));
  // It takes the child's place under the parent, and the child comes under it.
  const int32_t node =
      new_node({below.parent, below.text, below.start, depth, below.count, child, below.next, below.prev});
  if (below.prev >= 0) nodes_[below.prev].next = node;
  else nodes_[below.parent].first_child = node;
  if (below.next >= 0) nodes_[below.next].prev = node;
  slots_[slot] = node;
  nodes_[child].parent = node;
  nodes_[child].next = nodes_[child].prev = -1;
  insert_slot(child);
  return node;
}

void SuffixTree::remove_leaf(int32_t node) {
  erase_slot(slot_of(nodes_[node].parent, first_token(node)));
  unlink(node);
  nodes_[node] = Node{};
  free_.push_back(node);
}

void SuffixTree::merge_into_only_child(int32_t node) {
  const int32_t child = nodes_[node].first_child;
  erase_slot(slot_of(node, first_token(child)));
  const size_t slot = slot_of(nodes_[node].parent, first_token(node));
  const Node above = nodes_[node];
  Node& below = nodes_[child];
  below.parent = above.parent;
  below.next = above.next;
  below.prev = above.prev;
  if (above.prev >= 0) nodes_[above.prev].next = child;
  else nodes_[above.parent].first_child = child;
  if (above.next >= 0) nodes_[above.next].prev = child;
  slots_[slot] = child;
  nodes_[node] = Node{};
  free_.push_back(node);
}

// --- looking up ---

bool SuffixTree::locate(const int32_t* token_ids, size_t size, Locus& locus) const {
  int32_t node = 0, depth = 0;
  const int32_t want = static_cast<int32_t>(size);
  while (depth < want) {
    const int32_t child = find_child(node, token_ids[depth]);
    if (child < 0) return false;
    const Node& c = nodes_[child];
    const int32_t end = std::min(end_depth(c), want);
    const int32_t* label = text(c).data() + c.start;
    if (!std::equal(label + depth + 1, label + end, token_ids + depth + 1)) return false;
    node = child;
    depth = end;
  }
  locus = {node, depth};
  return true;
}

int64_t SuffixTree::count(const int32_t* token_ids, size_t size) const {
  Locus at;
  return size > 0 && locate(token_ids, size, at) ? nodes_[at.node].count : 0;
}

int SuffixTree::longest_match(const int32_t* tail, size_t size, int hint) const {
  Locus at;
  const int most = static_cast<int>(std::min(size, static_cast<size_t>(max_depth_ - 1)));
  int length = std::min(std::max(hint, 1), most);
  if (length > 0 && locate(tail + size - length, static_cast<size_t>(length), at)) {
    while (length < most && locate(tail + size - length - 1, static_cast<size_t>(length + 1), at)) ++length;
    return length;
  }
  for (--length; length > 0; --length)
    if (locate(tail + size - length, static_cast<size_t>(length), at)) return length;
  return 0;
}

// --- drafting ---

// A draft in the making.
struct SuffixTree::Task {
  const int32_t* after;  // tokens behind the tree's text, before the draft
  size_t num_after;
  int match, limit;
  const SuffixScoring& scoring;
  SuffixDraft draft;
};

// What stands behind the text's own end: the tokens after it, then the draft itself. So "abab" goes on for ever.
bool SuffixTree::beyond_end(Locus at, int32_t last, const Task& task, int32_t& token) const {
  const Node& node = nodes_[at.node];
  size_t place = static_cast<size_t>(node.start + at.depth) - text(node).size();
  if (place < task.num_after) {
    token = task.after[place];
    return true;
  }
  place -= task.num_after;
  size_t length = 0;
  for (int32_t i = last; i >= 0; i = task.draft.parents[static_cast<size_t>(i)]) ++length;
  if (place >= length) return false;
  for (; length > place + 1; --length) last = task.draft.parents[static_cast<size_t>(last)];
  token = task.draft.token_ids[static_cast<size_t>(last)];
  return true;
}

bool SuffixTree::next_step(Locus at, int32_t last, int context, const Task& task, Step& step) const {
  const Node& node = nodes_[at.node];
  if (at.depth < end_depth(node)) {
    step = {token(node, at.depth), task.scoring.chance(node.count, node.count, context), {at.node, at.depth + 1}};
    return true;
  }
  if (node.depth == kOpen) {
    step = {0, task.scoring.chance(1, 1, context), {at.node, at.depth + 1}};
    return beyond_end(at, last, task, step.token);
  }
  if (node.first_child < 0) return false;
  const Node& child = nodes_[node.first_child];
  step = {token(child, at.depth), task.scoring.chance(child.count, node.count, context),
          {node.first_child, at.depth + 1}};
  return true;
}

void SuffixTree::draw_chain(Locus at, Task& task) const {
  float alive = 1.0f;
  Step step;
  for (int i = 0; i < task.limit && next_step(at, i - 1, task.match + i, task, step); ++i) {
    alive *= step.chance;
    if (alive < task.scoring.min_survival) break;
    task.draft.token_ids.push_back(step.token);
    task.draft.parents.push_back(i - 1);
    task.draft.chances.push_back(step.chance);
    task.draft.score += alive;
    at = step.to;
  }
}

struct SuffixTree::Open {
  float alive;
  int32_t parent;
  int context;
  Step step;
  bool operator<(const Open& other) const { return alive < other.alive; }
};

void SuffixTree::draw_tree(Locus at, Task& task) const {
  std::priority_queue<Open> open;
  auto expand = [&](Locus from, int32_t parent, float alive, int context) {
    const Node& node = nodes_[from.node];
    Step step;
    if (from.depth < end_depth(node) || node.depth == kOpen) {
      if (next_step(from, parent, context, task, step)) open.push({alive * step.chance, parent, context + 1, step});
      return;
    }
    int left = kMostBranches;
    float rest = 1.0f;  // what the children before leave
    for (int32_t child = node.first_child; child >= 0 && left > 0; child = nodes_[child].next, --left) {
      const Node& c = nodes_[child];
      const float share = static_cast<float>(c.count) / static_cast<float>(node.count);
      const float chance =
          child == node.first_child ? task.scoring.chance(c.count, node.count, context) : share * rest;
      if (child == node.first_child) rest = (1.0f - chance) / std::max(1.0f - share, 1e-6f);
      open.push({alive * chance, parent, context + 1, {token(c, from.depth), chance, {child, from.depth + 1}}});
    }
  };
  expand(at, -1, 1.0f, task.match);
  SuffixDraft& draft = task.draft;
  while (!open.empty() && static_cast<int>(draft.size()) < task.limit) {
    const Open best = open.top();
    open.pop();
    if (best.alive < task.scoring.min_survival) return;
    draft.token_ids.push_back(best.step.token);
    draft.parents.push_back(best.parent);
    draft.chances.push_back(best.step.chance);
    draft.score += best.alive;
    expand(best.step.to, static_cast<int32_t>(draft.size()) - 1, best.alive, best.context);
  }
}

SuffixDraft SuffixTree::propose(const int32_t* tail, size_t size, size_t num_after, int longest, int limit,
                                bool branches, const SuffixScoring& scoring) const {
  SuffixDraft best;
  int match = longest;
  for (int tried = 0; match > 0 && tried < kMostMatches; ++tried) {
    Locus at;
    if (!locate(tail + size - match, static_cast<size_t>(match), at)) break;
    const float most = scoring.spec_factor * static_cast<float>(match);
    const int allowed = most < static_cast<float>(limit) ? std::max(1, static_cast<int>(most)) : limit;
    Task task{tail + size - num_after, num_after, match, allowed, scoring, {}};
    task.draft.match_length = match;
    if (branches) draw_tree(at, task);
    else draw_chain(at, task);
    if (task.draft.score > best.score) best = std::move(task.draft);
    match = more_frequent(tail + size, match, nodes_[at.node].count);
  }
  return best;
}

// The longest match below `match` that was seen more often than `count`: one seen no more often is followed by the
// same tokens. Counts grow as matches get shorter, so that its length is found by halving. 0: there is none.
int SuffixTree::more_frequent(const int32_t* end, int match, int64_t count) const {
  int same = match, step = 1;
  while (same > step && this->count(end - (same - step), static_cast<size_t>(same - step)) == count) {
    same -= step;
    step *= 2;
  }
  int more = std::max(same - step, 0);
  while (same - more > 1) {
    const int middle = (same + more) / 2;
    if (this->count(end - middle, static_cast<size_t>(middle)) == count) same = middle;
    else more = middle;
  }
  return more;
}

// --- checks ---

size_t SuffixTree::memory_bytes() const {
  size_t bytes = sizeof *this + nodes_.capacity() * sizeof(Node) + (slots_.capacity() + free_.capacity()) * sizeof(int32_t);
  for (const auto& text : texts_) bytes += sizeof text + text.capacity() * sizeof(int32_t);
  return bytes;
}

std::string SuffixTree::broken() const {
  std::vector<char> is_free(nodes_.size());
  for (int32_t node : free_) is_free[static_cast<size_t>(node)] = 1;
  size_t num_children = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(nodes_.size()); ++i) {
    if (is_free[static_cast<size_t>(i)]) continue;
    const Node& node = nodes_[i];
    const std::string here = "node " + std::to_string(i) + ": ";
    int64_t sum = 0;
    int32_t before = -1;
    for (int32_t child = node.first_child; child >= 0; before = child, child = nodes_[child].next) {
      const Node& c = nodes_[child];
      ++num_children;
      if (is_free[static_cast<size_t>(child)]) return here + "a child was freed";
      if (c.parent != i || c.prev != before) return here + "the list of children is broken";
      if (c.count < 1) return here + "a child without a count";
      if (i != 0 && c.count > nodes_[node.first_child].count) return here + "the first child is not the best";
      if (c.text < first_text_ || c.text >= first_text_ + static_cast<int32_t>(texts_.size()))
        return here + "a child's text is gone";
      if (end_depth(c) <= node.depth) return here + "a child's edge is empty";
      if (find_child(i, first_token(child)) != child) return here + "a child cannot be found";
      if (i != 0 && !std::equal(text(node).data() + node.start, text(node).data() + node.start + node.depth,
                                text(c).data() + c.start))
        return here + "a child's label differs from its parent's";
      sum += c.count;
    }
    if (i == 0) continue;
    if (sum > node.count) return here + "the children count more than it does";
    const bool is_passage = node.first_child >= 0 && nodes_[node.first_child].next < 0 && sum == node.count;
    if (is_passage) return here + "it could be merged with its only child";
  }
  if (num_children != num_nodes() || num_children != num_slots_used_) return "nodes are lost";
  return "";
}

}  // namespace outrider
