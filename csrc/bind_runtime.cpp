// Thread pool, RoPE tables and programs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "program.h"
#include "thread_pool.h"
#include "without_gil.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace outrider;

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatTable = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using PyView = std::tuple<int, int64_t, int64_t>;  // buffer, first column, width

View view(const PyView& v) { return {std::get<0>(v), std::get<1>(v), std::get<2>(v)}; }

std::vector<float> floats(const std::optional<Floats>& array) {
  return array ? std::vector<float>(array->data(), array->data() + array->size()) : std::vector<float>();
}

template <class T>
T choose(const char* what, const std::string& name, std::initializer_list<std::pair<const char*, T>> choices) {
  std::string known;
  for (const auto& [label, value] : choices) {
    if (name == label) return value;
    known += std::string(known.empty() ? "" : ", ") + label;
  }
  throw std::invalid_argument(std::string(what) + " must be one of " + known + ", got " + name);
}

Epilogue epilogue(const std::string& name) {
  return choose<Epilogue>("epilogue", name,
                          {{"store", Epilogue::store},
                           {"add", Epilogue::add},
                           {"silu_mul", Epilogue::silu_mul},
                           {"gelu_mul", Epilogue::gelu_mul}});
}

std::shared_ptr<RopeTable> make_rope_table(FloatTable cos, FloatTable sin, const std::string& layout) {
  if (cos.shape(0) != sin.shape(0) || cos.shape(1) != sin.shape(1))
    throw std::invalid_argument("cos and sin must have one shape");
  auto table = std::make_shared<RopeTable>();
  table->max_position = int64_t(cos.shape(0));
  table->rotary_dim = int(cos.shape(1)) * 2;
  table->layout = choose<RopeLayout>("rope layout", layout,
                                     {{"half", RopeLayout::half}, {"interleaved", RopeLayout::interleaved}});
  table->cos.assign(cos.data(), cos.data() + cos.size());
  table->sin.assign(sin.data(), sin.data() + sin.size());
  return table;
}

void wait_for_threads_at_exit() {
  process_ends = true;
  nb::gil_scoped_release release;
  while (threads_without_gil > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void require_length(const char* name, size_t got, size_t expected) {
  if (got != expected)
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(got) + " entries, expected " +
                                std::to_string(expected));
}

void run(Program& program, Ints token_ids, Ints positions, Ints slot_mapping, Ints query_start_loc, Ints seq_lens,
         IntTable block_tables, Ints logits_indices, std::optional<Ints> parents, std::optional<FloatTable> hidden) {
  const size_t rows = token_ids.size(), requests = seq_lens.size();
  require_length("positions", positions.size(), rows);
  require_length("slot_mapping", slot_mapping.size(), rows);
  require_length("query_start_loc", query_start_loc.size(), requests + 1);
  require_length("block_tables", block_tables.shape(0), requests);
  if (parents && parents->size() > 0) require_length("parents", parents->size(), rows);
  if (hidden && (hidden->shape(0) != rows || int64_t(hidden->shape(1)) != program.hidden_width()))
    throw std::invalid_argument("hidden must be [" + std::to_string(rows) + ", " +
                                std::to_string(program.hidden_width()) + "]");
  StepInputs in;
  in.hidden = hidden ? hidden->data() : nullptr;
  in.token_ids = token_ids.data();
  in.logits_indices = logits_indices.data();
  in.num_logits = int64_t(logits_indices.size());
  in.attention.num_rows = int64_t(rows);
  in.attention.num_requests = int64_t(requests);
  in.attention.positions = positions.data();
  in.attention.slot_mapping = slot_mapping.data();
  in.attention.query_start_loc = query_start_loc.data();
  in.attention.seq_lens = seq_lens.data();
  in.attention.block_tables = block_tables.data();
  in.attention.max_blocks = int64_t(block_tables.shape(1));
  in.attention.parents = parents && parents->size() > 0 ? parents->data() : nullptr;
  WithoutGil without;
  program.run(in);
}

// A view of all rows that a buffer can hold; the program stays alive with it.
nb::ndarray<nb::numpy, float> buffer_array(nb::object self, int buffer) {
  const Program& program = nb::cast<const Program&>(self);
  const size_t shape[2] = {size_t(program.buffer_rows(buffer)), size_t(program.buffer_width(buffer))};
  return nb::ndarray<nb::numpy, float>(program.buffer_data(buffer), 2, shape, self);
}

Weights share(const PackedWeight& weight) { return std::make_shared<const PackedWeight>(weight); }

void bind_program(nb::module_& m) {
  nb::class_<Program>(m, "Program", "A recorded model; csrc/program.h says what each instruction means.")
      .def(nb::init<int64_t, int64_t, const std::vector<int64_t>&, std::shared_ptr<KVCache>>(), "max_rows"_a,
           "max_logits_rows"_a, "storage_floats"_a, "cache"_a.none())
      .def("add_buffer", &Program::add_buffer, "width"_a, "storage"_a, "gathered"_a)
      .def("array", &buffer_array, "buffer"_a)
      .def("embedding", [](Program& p, PyView out, const PackedWeight& table) { p.embedding(view(out), share(table)); },
           "out"_a, "table"_a)
      .def("linear",
           [](Program& p, PyView out, PyView x, const PackedWeight& weight, std::optional<Floats> bias,
              std::optional<Floats> norm_weight, float norm_eps, const std::string& epilogue_name) {
             p.linear(view(out), view(x), share(weight),
                      {floats(norm_weight), norm_eps, floats(bias), epilogue(epilogue_name)});
           },
           "out"_a, "x"_a, "weight"_a, "bias"_a = nb::none(), "norm_weight"_a = nb::none(), "norm_eps"_a = 0.0f,
           "epilogue"_a = "store")
      .def("rms_norm",
           [](Program& p, PyView out, PyView x, Floats weight, float eps, int heads) {
             p.rms_norm(view(out), view(x), floats(weight), eps, heads);
           },
           "out"_a, "x"_a, "weight"_a, "eps"_a, "heads"_a)
      .def("layer_norm",
           [](Program& p, PyView out, PyView x, Floats weight, std::optional<Floats> bias, float eps) {
             p.layer_norm(view(out), view(x), floats(weight), floats(bias), eps);
           },
           "out"_a, "x"_a, "weight"_a, "bias"_a.none(), "eps"_a)
      .def("rope",
           [](Program& p, PyView out, PyView x, std::shared_ptr<RopeTable> table, int heads) {
             p.rope(view(out), view(x), table, heads);
           },
           "out"_a, "x"_a, "table"_a, "heads"_a)
      .def("append_attention",
           [](Program& p, PyView out, PyView q, PyView k, PyView v, int layer, int heads, float scale, int window,
              std::shared_ptr<RopeTable> rope, std::optional<Floats> q_norm, std::optional<Floats> k_norm,
              float norm_eps) {
             p.append_attention(view(out), view(q), view(k), view(v),
                                {layer, heads, scale, window, rope, floats(q_norm), floats(k_norm), norm_eps});
           },
           "out"_a, "q"_a, "k"_a, "v"_a, "layer"_a, "heads"_a, "scale"_a, "window"_a = 0, "rope"_a = nb::none(),
           "q_norm"_a = nb::none(), "k_norm"_a = nb::none(), "norm_eps"_a = 0.0f)
      .def("append_cache", [](Program& p, PyView, PyView k, PyView v, int layer) { p.append_cache(view(k), view(v), layer); },
           "out"_a, "k"_a, "v"_a, "layer"_a, "`out` is not written: there is nothing to go on with.")
      .def("silu_mul", [](Program& p, PyView out, PyView a, PyView b) { p.silu_mul(view(out), view(a), view(b)); },
           "out"_a, "gate"_a, "up"_a)
      .def("gelu_mul", [](Program& p, PyView out, PyView a, PyView b) { p.gelu_mul(view(out), view(a), view(b)); },
           "out"_a, "gate"_a, "up"_a)
      .def("add", [](Program& p, PyView out, PyView a, PyView b) { p.add(view(out), view(a), view(b)); }, "out"_a,
           "a"_a, "b"_a)
      .def("gather_rows", [](Program& p, PyView out, PyView x) { p.gather_rows(view(out), view(x)); }, "out"_a, "x"_a)
      .def("hidden_rows", [](Program& p, PyView out) { p.hidden_rows(view(out)); }, "out"_a)
      .def("run", &run, "token_ids"_a.noconvert(), "positions"_a.noconvert(), "slot_mapping"_a.noconvert(),
           "query_start_loc"_a.noconvert(), "seq_lens"_a.noconvert(), "block_tables"_a.noconvert(),
           "logits_indices"_a.noconvert(), "parents"_a.noconvert() = nb::none(),
           "hidden"_a.noconvert() = nb::none(), "One step, on all threads, without the GIL; one caller at a time.")
      .def("set_profile", &Program::set_profile, "on"_a)
      .def("profile", &Program::profile, "Name and nanoseconds of each instruction in the last run.")
      .def_prop_ro("nbytes", &Program::nbytes);
}

}  // namespace

void bind_runtime(nb::module_& m) {
  m.def("set_num_threads", [](int threads) { ThreadPool::global().resize(threads); }, "num_threads"_a,
        nb::call_guard<nb::gil_scoped_release>(),
        "Threads that run a step, the calling one included. Never changes a result.");
  m.def("num_threads", [] { return ThreadPool::global().size(); },
        "Threads that run a step; at first the CPUs that this process may use.");
  nb::class_<RopeTable>(m, "RopeTable", "cos and sin [max_position, rotary_dim / 2] of every position.")
      .def(nb::new_(&make_rope_table), "cos"_a, "sin"_a, "layout"_a);
  bind_program(m);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(wait_for_threads_at_exit));
  pthread_atfork(nullptr, nullptr, [] { threads_without_gil = 0; });  // the child has none of them
}
