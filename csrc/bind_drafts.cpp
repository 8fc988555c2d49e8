// Draft indexes in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "ngram.h"

namespace nb = nanobind;
using namespace outrider;

void bind_suffix(nb::module_& m);  // suffix trees

void bind_drafts(nb::module_& m) {
  bind_suffix(m);
  nb::class_<NgramIndex>(m, "NgramIndex", "Where the last n tokens of a growing text occurred before.")
      .def(nb::init<int, int>(), nb::arg("min_n"), nb::arg("max_n"))
      .def("append", [](NgramIndex& self, const std::vector<int32_t>& token_ids) {
        self.append(token_ids.data(), token_ids.size());
      }, nb::arg("token_ids"), "Final tokens, in order; amortised constant time a token.")
      .def("propose", [](const NgramIndex& self, int limit) {
        std::vector<int32_t> draft;
        const int length = self.propose(limit, draft);
        return std::make_pair(std::move(draft), length);
      }, nb::arg("limit"),
           "(draft, match length): what followed the newest earlier occurrence of the longest n-gram that ends the "
           "text, at most `limit` tokens; ([], 0) if there is none.")
      .def("__len__", &NgramIndex::size)
      .def_prop_ro("memory_bytes", &NgramIndex::memory_bytes);
}
