// Draft heads in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "draft_head.h"
#include "without_gil.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace outrider;

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatTable = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

std::vector<DraftRequest> requests_of(Ints token_ids, Ints query_start_loc, Ints starts, IntTable block_tables,
                                      Ints steps, const nb::list& states) {
  const size_t num = starts.size();
  require(query_start_loc.size() == num + 1 && block_tables.shape(0) == num && steps.size() == num &&
              nb::len(states) == num,
          "a draft needs one start, number of steps, state and block table for each request");
  std::vector<DraftRequest> requests(num);
  for (size_t i = 0; i < num; ++i) {
    const int32_t begin = query_start_loc(i), end = query_start_loc(i + 1);
    require(0 <= begin && begin <= end && size_t(end) <= token_ids.size(), "query_start_loc must rise within token_ids");
    const SamplerState* state = states[i].is_none() ? nullptr : nb::cast<const SamplerState*>(states[i]);
    requests[i] = {token_ids.data() + begin, end - begin, starts(i), block_tables.data() + i * block_tables.shape(1),
                   steps(i),                 state};
  }
  return requests;
}

nb::tuple draft(DraftHead& self, Ints token_ids, Ints query_start_loc, Ints starts, IntTable block_tables, Ints steps,
                const nb::list& states) {
  const auto requests = requests_of(token_ids, query_start_loc, starts, block_tables, steps, states);
  int max_steps = 1;
  for (const DraftRequest& request : requests) max_steps = std::max(max_steps, request.steps);
  require(max_steps <= 1024, "too many steps");
  const size_t shape[3] = {2, requests.size(), size_t(max_steps)}, size = requests.size() * size_t(max_steps);
  auto* drafted = new std::vector<int32_t>(2 * size);
  nb::capsule owner_of_ids(drafted, [](void* p) noexcept { delete static_cast<std::vector<int32_t>*>(p); });
  auto* probabilities = new std::vector<float>(2 * size);
  nb::capsule owner(probabilities, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  {
    WithoutGil without;
    self.draft(requests, int64_t(block_tables.shape(1)), max_steps,
               {drafted->data(), probabilities->data(), drafted->data() + size, probabilities->data() + size});
  }
  return nb::make_tuple(nb::ndarray<nb::numpy, int32_t>(drafted->data(), 3, shape, owner_of_ids),
                        nb::ndarray<nb::numpy, float>(probabilities->data(), 3, shape, owner));
}

}  // namespace

void bind_draft_head(nb::module_& m) {
  nb::class_<DraftHead>(m, "DraftHead", "A program that drafts from hidden states; csrc/draft_head.h.")
      .def(nb::init<std::shared_ptr<Program>, int, int, int64_t, int, std::vector<int32_t>, int64_t,
                    std::shared_ptr<Program>>(),
           "program"_a, "logits"_a, "hidden"_a, "num_blocks"_a, "block_size"_a, "token_ids"_a, "vocab_size"_a,
           "feeder"_a.none() = nb::none())
      .def("keep",
           [](DraftHead& self, FloatTable hidden, Ints slots) {
             require(hidden.shape(0) == slots.size() && int64_t(hidden.shape(1)) == self.width(),
                     "hidden must have a row of the head's width for each slot");
             self.keep(hidden.data(), int64_t(slots.size()), slots.data());
           },
           "hidden"_a.noconvert(), "slots"_a.noconvert(), "Remember hidden states that the target computed, by slot.")
      .def("move_slots",
           [](DraftHead& self, Ints from_slots, Ints to_slots) {
             require(from_slots.size() == to_slots.size(), "from_slots and to_slots must have one length");
             self.move(from_slots.data(), to_slots.data(), int64_t(from_slots.size()));
           },
           "from_slots"_a.noconvert(), "to_slots"_a.noconvert(), "As the target's cache was moved, in this order.")
      .def("draft", &draft, "token_ids"_a.noconvert(), "query_start_loc"_a.noconvert(), "starts"_a.noconvert(),
           "block_tables"_a.noconvert(), "steps"_a.noconvert(), "states"_a,
           "Feed the requests and draft: (token ids, probabilities), [2, requests, most steps], -1 after the end. [0] is "
           "drafted, [1] the second choice at each place.")
      .def("count_fed",
           [](const DraftHead& self, Ints block_table, int64_t num_blocks) {
             return self.count_fed(block_table.data(), std::min(num_blocks, int64_t(block_table.size())));
           },
           "block_table"_a, "num_blocks"_a, "How many blocks at the beginning of a table the head has been fed.")
      .def_prop_ro("max_rows", &DraftHead::max_rows)
      .def_prop_ro("nbytes", &DraftHead::nbytes);
  nb::class_<DraftVocabulary>(m, "DraftVocabulary", "The ascending token ids that a drafter knows.")
      .def(nb::init<std::vector<int32_t>, int64_t>(), "ids"_a, "vocab_size"_a);
  m.def("draft_row",
        [](Floats logits, const DraftVocabulary& vocabulary, const SamplerState& state,
           const std::vector<int32_t>& prefix, int64_t position) {
          require(int64_t(logits.size()) == vocabulary.size(), "logits must be those of the vocabulary");
          require(state.largest_id() < vocabulary.vocab_size(), "token ids must be below the vocabulary size");
          for (int32_t id : prefix) require(id >= 0 && id < vocabulary.vocab_size(), "prefix must hold token ids");
          const Draft draft =
              draft_row(logits.data(), vocabulary, state, {prefix.data(), int64_t(prefix.size())}, position);
          return nb::make_tuple(draft.first.id, draft.first.probability, draft.second.id, draft.second.probability);
        },
        "logits"_a.noconvert(), "vocabulary"_a, "state"_a, "prefix"_a, "position"_a,
        "(token id, probability) that a drafter draws from logits of its vocabulary with the sampler's noise, and the "
        "same of its second choice.");
}
