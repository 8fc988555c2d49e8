// The sampler in Python: SamplerState, sample, and the noise for tests and drafters.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>

#include "philox.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace outrider;

namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Masks = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A numpy array that owns `values`.
template <class T>
nb::object as_array(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

void check_ids(const std::vector<int32_t>& ids, const char* name) {
  for (int32_t id : ids)
    if (id < 0) throw std::invalid_argument(std::string(name) + " must not hold negative token ids");
}

void check_params(const SamplerParams& p) {
  require(p.temperature >= 0.0f, "temperature must be at least 0");
  require(p.top_k >= 0, "top_k must be at least 0 (0: off)");
  require(p.top_p >= 0.0 && p.top_p <= 1.0, "top_p must be between 0 and 1");
  require(p.min_p >= 0.0 && p.min_p <= 1.0, "min_p must be between 0 and 1");
  require(p.repetition_penalty > 0.0f, "repetition_penalty must be above 0");
  require(p.logit_bias_ids.size() == p.logit_bias_values.size(), "logit_bias needs one value for each id");
  check_ids(p.logit_bias_ids, "logit_bias");
  check_ids(p.masked_until_min_tokens, "masked_until_min_tokens");
  for (const auto& word : p.bad_words) {
    require(!word.empty(), "bad_words must not hold an empty sequence");
    check_ids(word, "bad_words");
  }
}

void init_state(SamplerState* self, float temperature, int32_t top_k, double top_p, double min_p, float presence_penalty,
                float frequency_penalty, float repetition_penalty, std::vector<int32_t> logit_bias_ids,
                std::vector<float> logit_bias_values, int32_t min_tokens,
                std::vector<int32_t> masked_until_min_tokens, std::vector<std::vector<int32_t>> bad_words,
                uint64_t seed, int32_t num_logprobs, const std::vector<int32_t>& prompt_token_ids) {
  SamplerParams params{temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty,
                       std::move(logit_bias_ids), std::move(logit_bias_values), min_tokens,
                       std::move(masked_until_min_tokens), std::move(bad_words), seed, num_logprobs};
  check_params(params);
  check_ids(prompt_token_ids, "prompt_token_ids");
  new (self) SamplerState(std::move(params),
                          {prompt_token_ids.data(), static_cast<int64_t>(prompt_token_ids.size())});
}

void check_batch(const SampleBatch& batch, const std::vector<const SamplerState*>& states, int64_t num_prefix_ids) {
  for (const SamplerState* state : states)
    require(state->largest_id() < batch.vocab, "a request's token ids must be below the vocabulary size");
  require(batch.prefix_start[0] == 0 && batch.prefix_start[batch.rows] == num_prefix_ids,
          "prefix_start must run from 0 to the number of prefix_ids");
  for (int64_t r = 0; r < batch.rows; ++r) {
    require(batch.row_state[r] >= 0 && static_cast<size_t>(batch.row_state[r]) < states.size(),
            "row_state must index states");
    require(batch.prefix_start[r] <= batch.prefix_start[r + 1], "prefix_start must not decrease");
  }
  for (int64_t i = 0; i < num_prefix_ids; ++i)
    require(batch.prefix_ids[i] >= 0 && batch.prefix_ids[i] < batch.vocab, "prefix_ids must be token ids");
}

// A mask for each row (-1 in `row_mask`: none); empty when there are no masks.
std::vector<TokenMask> row_masks(const std::optional<Masks>& masks, const std::optional<Vector<int32_t>>& row_mask,
                                 size_t rows, int64_t vocab) {
  if (!masks) return {};
  require(row_mask && row_mask->shape(0) == rows, "row_mask needs one entry for each row of logits");
  require(static_cast<int64_t>(masks->shape(1)) * 32 >= vocab, "masks need a bit for each token");
  std::vector<TokenMask> result(rows, nullptr);
  for (size_t r = 0; r < rows; ++r) {
    const int64_t index = (*row_mask)(r);
    require(index < static_cast<int64_t>(masks->shape(0)), "row_mask must index masks");
    if (index >= 0) result[r] = masks->data() + index * static_cast<int64_t>(masks->shape(1));
  }
  return result;
}

nb::object logprob_arrays(const std::vector<RowLogprobs>& rows) {
  std::vector<float> chosen, top_logprobs;
  std::vector<int32_t> ranks, starts{0}, top_ids;
  for (const RowLogprobs& row : rows) {
    chosen.push_back(row.logprob);
    ranks.push_back(row.rank);
    top_ids.insert(top_ids.end(), row.top_ids.begin(), row.top_ids.end());
    top_logprobs.insert(top_logprobs.end(), row.top_logprobs.begin(), row.top_logprobs.end());
    starts.push_back(static_cast<int32_t>(top_ids.size()));
  }
  return nb::make_tuple(as_array(std::move(chosen)), as_array(std::move(ranks)), as_array(std::move(starts)),
                        as_array(std::move(top_ids)), as_array(std::move(top_logprobs)));
}

nb::tuple sample(const Matrix& logits, const nb::list& state_list, const Vector<int32_t>& row_state,
                 const Vector<int64_t>& positions, const Vector<int32_t>& prefix_start,
                 const Vector<int32_t>& prefix_ids, const std::optional<Masks>& masks,
                 const std::optional<Vector<int32_t>>& row_mask) {
  std::vector<const SamplerState*> states;
  bool wants_logprobs = false;
  for (nb::handle item : state_list) {
    states.push_back(nb::cast<const SamplerState*>(item));
    require(states.back() != nullptr, "states must be SamplerStates");
    wants_logprobs |= states.back()->params().num_logprobs >= 0;
  }
  SampleBatch batch{logits.data(),    static_cast<int64_t>(logits.shape(0)), static_cast<int64_t>(logits.shape(1)),
                          states.data(),    row_state.data(),                      positions.data(),
                          prefix_start.data(), prefix_ids.data()};
  const size_t rows = logits.shape(0);
  require(logits.shape(1) > 0, "logits need at least one column");
  require(row_state.shape(0) == rows && positions.shape(0) == rows && prefix_start.shape(0) == rows + 1,
          "row_state and positions need one entry for each row of logits, prefix_start one more");
  check_batch(batch, states, static_cast<int64_t>(prefix_ids.shape(0)));
  const std::vector<TokenMask> mask_of_row = row_masks(masks, row_mask, rows, batch.vocab);
  if (!mask_of_row.empty()) batch.masks = mask_of_row.data();
  std::vector<int32_t> tokens(rows);
  std::vector<RowLogprobs> logprobs(wants_logprobs ? rows : 0);
  {
    nb::gil_scoped_release release;
    sample_batch(batch, tokens.data(), wants_logprobs ? logprobs.data() : nullptr);
  }
  return nb::make_tuple(as_array(std::move(tokens)), wants_logprobs ? logprob_arrays(logprobs) : nb::none());
}

nb::object processed_logits(const Vector<float>& logits, const SamplerState& state, const std::vector<int32_t>& prefix) {
  check_ids(prefix, "prefix");
  int32_t largest = state.largest_id();
  for (int32_t id : prefix) largest = std::max(largest, id);
  require(largest < static_cast<int64_t>(logits.shape(0)), "token ids must be below the vocabulary size");
  std::vector<float> row(logits.shape(0));
  const TokenSpan span{prefix.data(), static_cast<int64_t>(prefix.size())};
  const float* result = state.process(logits.data(), static_cast<int64_t>(row.size()), span, row.data());
  if (result != row.data()) row.assign(result, result + row.size());
  return as_array(std::move(row));
}

nb::object gumbel_noise(uint64_t seed, int64_t position, const Vector<int32_t>& token_ids) {
  const Noise noise(seed, position);
  std::vector<double> values(token_ids.shape(0));
  for (size_t i = 0; i < values.size(); ++i) values[i] = noise.gumbel(static_cast<uint32_t>(token_ids(i)));
  return as_array(std::move(values));
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<SamplerState>(m, "SamplerState", "What sampling remembers of one request.")
      .def("__init__", &init_state, nb::kw_only(), nb::arg("temperature") = 1.0f, nb::arg("top_k") = 0,
           nb::arg("top_p") = 1.0, nb::arg("min_p") = 0.0, nb::arg("presence_penalty") = 0.0f,
           nb::arg("frequency_penalty") = 0.0f, nb::arg("repetition_penalty") = 1.0f,
           nb::arg("logit_bias_ids") = std::vector<int32_t>(), nb::arg("logit_bias_values") = std::vector<float>(),
           nb::arg("min_tokens") = 0, nb::arg("masked_until_min_tokens") = std::vector<int32_t>(),
           nb::arg("bad_words") = std::vector<std::vector<int32_t>>(), nb::arg("seed") = uint64_t{0},
           nb::arg("num_logprobs") = -1, nb::arg("prompt_token_ids") = std::vector<int32_t>())
      .def("append", [](SamplerState& self, const std::vector<int32_t>& token_ids) {
        check_ids(token_ids, "token_ids");
        self.append({token_ids.data(), static_cast<int64_t>(token_ids.size())});
      }, nb::arg("token_ids"), "Tokens that were emitted, in order. Final: they are never taken back.")
      .def_prop_ro("num_output_tokens", &SamplerState::num_output)
      .def_prop_ro("seed", [](const SamplerState& self) { return self.params().seed; })
      .def_prop_ro("num_logprobs", [](const SamplerState& self) { return self.params().num_logprobs; });
  m.def("sample", &sample, nb::arg("logits").noconvert(), nb::arg("states"), nb::arg("row_state"),
        nb::arg("positions"), nb::arg("prefix_start"), nb::arg("prefix_ids"), nb::arg("masks") = nb::none(),
        nb::arg("row_mask") = nb::none(),
        "One token for each row of logits [rows, vocab], and log-probabilities (chosen, rank, start, top ids, "
        "top) when a state asks for them. A row without a distribution (NaN, +inf, all masked) gives -1. "
        "`masks` [any, words] has a bit for each token that may be drawn; row r goes by masks[row_mask[r]], -1: "
        "by none.");
  m.def("processed_logits", &processed_logits, nb::arg("logits"), nb::arg("state"), nb::arg("prefix"),
        "One row after penalties, bias and masks, as if `prefix` had been emitted: what is drawn from.");
  m.def("gumbel_noise", &gumbel_noise, nb::arg("seed"), nb::arg("position"), nb::arg("token_ids"),
        "The noise of tokens at an absolute position: float64, a pure function of its arguments.");
  m.def("philox4x32", [](std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
    const PhiloxBlock block = philox4x32({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
    return std::array<uint32_t, 4>{block.word[0], block.word[1], block.word[2], block.word[3]};
  }, nb::arg("counter"), nb::arg("key"), "Philox 4x32 with 10 rounds.");
}
