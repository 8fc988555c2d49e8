// Draft indexes in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "ngram.h"
#include "prediction.h"

namespace nb = nanobind;
using namespace outrider;

void bind_suffix(nb::module_& m);   // suffix trees
void bind_phrases(nb::module_& m);  // the table of frequent phrases

void bind_drafts(nb::module_& m) {
  bind_suffix(m);
  bind_phrases(m);
  nb::class_<NgramIndex>(m, "NgramIndex", "Where the last n tokens of a growing text occurred before.")
      .def(nb::init<int, int>(), nb::arg("min_n"), nb::arg("max_n"))
      .def("append", [](NgramIndex& self, const std::vector<int32_t>& token_ids) {
        self.append(token_ids.data(), token_ids.size());
      }, nb::arg("token_ids"), "Final tokens, in order; amortised constant time a token.")
      .def("propose", [](const NgramIndex& self, int limit, const std::vector<int32_t>& after) {
        std::vector<int32_t> draft;
        const int length = self.propose(after, limit, draft);
        return std::make_pair(std::move(draft), length);
      }, nb::arg("limit"), nb::arg("after") = std::vector<int32_t>(),
           "(draft, match length): what followed the newest earlier occurrence of the longest n-gram that ends the "
           "text followed by `after`, at most `limit` tokens; ([], 0) if there is none.")
      .def("__len__", &NgramIndex::size)
      .def_prop_ro("memory_bytes", &NgramIndex::memory_bytes);
  nb::class_<Prediction>(m, "Prediction", "Follows an output along a prediction of it.")
      .def(nb::init<std::vector<int32_t>>(), nb::arg("token_ids"))
      .def("append", [](Prediction& self, const std::vector<int32_t>& token_ids) {
        self.append(token_ids.data(), token_ids.size());
      }, nb::arg("token_ids"), "Final tokens of the output, in order.")
      .def("propose", [](const Prediction& self, int limit, const std::vector<int32_t>& after) {
        std::vector<int32_t> draft;
        int agreed = 0;
        self.propose(after, limit, draft, agreed);
        return std::make_pair(std::move(draft), agreed);
      }, nb::arg("limit"), nb::arg("after") = std::vector<int32_t>(),
           "(draft, agreed): the predicted tokens from here on, and how many before them agree with the output; 64 "
           "at the very start, 0 right after a difference.")
      .def("__len__", &Prediction::output_size)
      .def_prop_ro("memory_bytes", &Prediction::memory_bytes);
}
