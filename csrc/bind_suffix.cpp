// Suffix trees in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "suffix.h"

namespace nb = nanobind;
using namespace outrider;

namespace {

using Tokens = std::vector<int32_t>;
using Proposal = std::tuple<Tokens, Tokens, std::vector<float>, int, double>;

// A request's tree, and how far its end matched each memory when last asked.
struct LiveTree : RequestTree {
  using RequestTree::RequestTree;
  struct Hint {
    int length = 1;
    size_t size = 0;
  };
  std::vector<Hint> hints;
};

Proposal as_tuple(SuffixDraft&& draft) {
  return {std::move(draft.token_ids), std::move(draft.parents), std::move(draft.chances), draft.match_length, draft.score};
}

// What both kinds of tree propose for the request's text and `after`: the request's own first.
std::vector<Proposal> propose(LiveTree& self, const std::vector<const MemoryTree*>& memories, const Tokens& after,
                              int limit, bool branches, const SuffixScoring& scoring) {
  if (scoring.prior.empty()) throw std::invalid_argument("the scoring needs priors");
  size_t depth = static_cast<size_t>(self.max_depth());
  for (const MemoryTree* memory : memories) depth = std::max(depth, static_cast<size_t>(memory->max_depth()));
  Tokens joined;
  const Tokens* text = &self.tokens();
  if (!after.empty()) {
    const size_t keep = std::min(depth, text->size());
    joined.assign(text->end() - static_cast<std::ptrdiff_t>(keep), text->end());
    joined.insert(joined.end(), after.begin(), after.end());
    text = &joined;
  }
  const size_t size = std::min(depth, text->size());
  const int32_t* tail = text->data() + text->size() - size;
  std::vector<Proposal> proposals;
  int longest = std::min(self.match_length(), static_cast<int>(size));
  if (!after.empty()) longest = self.longest_match(tail, size, longest + static_cast<int>(after.size()));
  proposals.push_back(as_tuple(self.propose(tail, size, after.size(), longest, limit, branches, scoring)));
  self.hints.resize(std::max(self.hints.size(), memories.size()));
  for (size_t i = 0; i < memories.size(); ++i) {
    LiveTree::Hint& hint = self.hints[i];
    const size_t now = self.size() + after.size();
    const int guess = hint.length + static_cast<int>(now > hint.size ? now - hint.size : 0);
    hint = {memories[i]->longest_match(tail, size, guess), now};
    longest = std::min(hint.length, memories[i]->longest_useful(limit));
    proposals.push_back(as_tuple(memories[i]->propose(tail, size, 0, longest, limit, branches, scoring)));
  }
  return proposals;
}

void check(const SuffixTree& tree) {
  const std::string broken = tree.broken();
  if (!broken.empty()) throw std::runtime_error("the suffix tree is broken: " + broken);
}

}  // namespace

void bind_suffix(nb::module_& m) {
  nb::class_<SuffixScoring>(m, "SuffixScoring", "How counts become chances, and where a draft ends.")
      .def("__init__", [](SuffixScoring* self, float weight, std::vector<float> prior, float spec_factor,
                          float min_survival) {
        if (prior.empty() || !(weight > 0)) throw std::invalid_argument("weight must be above 0, and prior not empty");
        new (self) SuffixScoring{weight, std::move(prior), spec_factor, min_survival};
      }, nb::kw_only(), nb::arg("weight"), nb::arg("prior"), nb::arg("spec_factor"), nb::arg("min_survival"));
  nb::class_<SuffixTree>(m, "SuffixTree", "What followed the last tokens before, and how often.")
      .def("count", [](const SuffixTree& self, const Tokens& ids) { return self.count(ids.data(), ids.size()); },
           nb::arg("token_ids"), "Occurrences that the tree counts.")
      .def("check_integrity", &check, "RuntimeError if an invariant is broken. For tests: it walks the whole tree.")
      .def_prop_ro("num_nodes", &SuffixTree::num_nodes)
      .def_prop_ro("memory_bytes", &SuffixTree::memory_bytes);
  nb::class_<LiveTree, SuffixTree>(m, "RequestTree", "The suffix tree of one growing text.")
      .def(nb::init<int>(), nb::arg("max_depth"))
      .def("append", [](LiveTree& self, const Tokens& ids) { self.append(ids.data(), ids.size()); },
           nb::arg("token_ids"), "Final tokens, in order; amortised constant time a token.")
      .def("propose", &propose, nb::arg("memories"), nb::arg("after"), nb::arg("limit"), nb::arg("branches"),
           nb::arg("scoring"),
           "(token_ids, parents, chances, match length, score) from the request's own text, then from each memory, "
           "for the text followed by `after`.")
      .def("tokens", [](const LiveTree& self, size_t begin) {
        const Tokens& all = self.tokens();
        return Tokens(all.begin() + static_cast<std::ptrdiff_t>(std::min(begin, all.size())), all.end());
      }, nb::arg("begin"), "The text from that token on.")
      .def("__len__", &RequestTree::size)
      .def_prop_ro("match_length", &RequestTree::match_length, "Of the longest end of the text that occurred before.");
  nb::class_<MemoryTree, SuffixTree>(m, "MemoryTree", "The suffix tree of past texts, first in, first out.")
      .def(nb::init<int>(), nb::arg("max_depth"))
      .def("insert", [](MemoryTree& self, const Tokens& ids) { self.insert(ids.data(), ids.size()); },
           nb::arg("token_ids"), "Remember a whole text.")
      .def("evict", &MemoryTree::evict, "Forget the oldest text.")
      .def("texts", [](const MemoryTree& self) {
        std::vector<Tokens> texts;
        for (size_t i = 0; i < self.num_texts(); ++i) texts.push_back(self.nth_text(i));
        return texts;
      }, "All texts, oldest first.")
      .def_prop_ro("live_bytes", &SuffixTree::live_bytes)
      .def_prop_ro("num_texts", &MemoryTree::num_texts)
      .def_prop_ro("num_tokens", &MemoryTree::num_tokens);
}
