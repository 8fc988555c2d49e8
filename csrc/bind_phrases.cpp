// The table of frequent phrases in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "phrases.h"

namespace nb = nanobind;
using namespace outrider;

namespace {

using Ids = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Chances = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Prints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void init_table(PhraseTable* self, const Prints& prints, const Ids& ids, const Chances& chances) {
  const size_t num = prints.shape(0);
  if (ids.shape(0) != num || chances.shape(0) != num || ids.shape(1) != PhraseTable::kWidth ||
      chances.shape(1) != PhraseTable::kWidth)
    throw std::invalid_argument("every fingerprint needs two token ids and two chances");
  std::vector<uint32_t> fingerprints(num);
  std::vector<PhraseTable::Entry> entries(num);
  for (size_t i = 0; i < num; ++i) {
    fingerprints[i] = static_cast<uint32_t>(prints(i));
    for (size_t j = 0; j < PhraseTable::kWidth; ++j) {
      entries[i].token_ids[j] = ids(i, j);
      entries[i].chances[j] = chances(i, j);
    }
  }
  new (self) PhraseTable(std::move(fingerprints), std::move(entries));
}

}  // namespace

void bind_phrases(nb::module_& m) {
  nb::class_<PhraseTable>(m, "PhraseTable", "How the target usually goes on after a few tokens.")
      .def("__init__", &init_table, nb::arg("fingerprints").noconvert(), nb::arg("token_ids").noconvert(),
           nb::arg("chances").noconvert(),
           "Ascending (unsigned) fingerprints of contexts, int32; two next tokens of each, -1 for none, and their "
           "chances of 255.")
      .def_static("fingerprint", [](const std::vector<int32_t>& token_ids) {
        return PhraseTable::fingerprint(token_ids.data(), static_cast<int>(token_ids.size()));
      }, nb::arg("token_ids"), "Of a context.")
      .def("propose", [](const PhraseTable& self, const std::vector<int32_t>& tail, int limit, bool branches, float least) {
        std::tuple<std::vector<int32_t>, std::vector<int32_t>, std::vector<float>> tree;
        self.propose(tail, limit, branches, least, std::get<0>(tree), std::get<1>(tree), std::get<2>(tree));
        return tree;
      }, nb::arg("tail"), nb::arg("limit"), nb::arg("branches"), nb::arg("least"),
           "(token_ids, parents, survival) of the likeliest continuations of a text that ends with `tail`.")
      .def("__len__", &PhraseTable::size)
      .def_prop_ro("memory_bytes", &PhraseTable::memory_bytes);
  m.attr("LONGEST_PHRASE") = PhraseTable::kLongest;
}
