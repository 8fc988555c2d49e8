// Packed weights and the linear op in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <stdexcept>

#include "gemm.h"

namespace nb = nanobind;
using namespace outrider;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::shape<-1, -1>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<const int32_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<float, nb::numpy, nb::shape<-1, -1>, nb::c_contig, nb::device::cpu>;

const char* kind_name(WeightKind kind) {
  static const char* const names[] = {"int4", "int8", "f16", "bf16", "f32"};
  return names[int(kind)];
}

Output new_matrix(int64_t rows, int64_t columns) {
  float* data = new float[size_t(rows * columns)];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return Output(data, {size_t(rows), size_t(columns)}, owner);
}

// Bytes that `format` takes for n rows of k; 0 where pack refuses the format anyway.
int64_t checkpoint_bytes(const std::string& format, int64_t n, int64_t k) {
  static const std::map<std::string, int> per_32 = {{"q4_0", 18}, {"q4_1", 20}, {"q5_0", 22}, {"q5_1", 24},
                                                    {"q8_0", 34}, {"f16", 64},  {"bf16", 64}, {"f32", 128}};
  const auto found = per_32.find(format);
  return found == per_32.end() ? 0 : n * (k * found->second) / 32;
}

PackedWeight pack_array(const std::string& format, Bytes data, int64_t n, int64_t k) {
  const int64_t needed = checkpoint_bytes(format, n, k);
  if (needed && int64_t(data.size()) != needed)
    throw std::invalid_argument("a " + format + " weight of " + std::to_string(n) + " x " + std::to_string(k) +
                                " has " + std::to_string(needed) + " bytes, got " + std::to_string(data.size()));
  nb::gil_scoped_release release;
  return pack(format, data.data(), n, k);
}

Output dequantize(const PackedWeight& weight) {
  Output out = new_matrix(weight.n(), weight.k());
  for (int64_t r = 0; r < weight.n(); ++r) weight.dequantize_row(r, out.data() + r * weight.k());
  return out;
}

Epilogue epilogue_of(const std::string& name) {
  if (name == "store") return Epilogue::store;
  if (name == "add") return Epilogue::add;
  if (name == "silu_mul") return Epilogue::silu_mul;
  if (name == "gelu_mul") return Epilogue::gelu_mul;
  throw std::invalid_argument("epilogue '" + name + "' is unknown; use store, add, silu_mul or gelu_mul");
}

void expect(const char* what, int64_t got, int64_t want) {
  if (got != want)
    throw std::invalid_argument(std::string("linear: ") + what + " must be " + std::to_string(want) + ", got " +
                                std::to_string(got));
}

Output linear_array(Matrix x, const PackedWeight& weight, std::optional<Vector> bias, std::optional<Vector> norm_weight,
                    float eps, const std::string& epilogue, std::optional<Indices> row_index,
                    std::optional<Output> out) {
  LinearArgs args;
  args.weight = &weight;
  args.x = x.data();
  args.x_stride = int64_t(x.shape(1));
  args.rows = int64_t(row_index ? row_index->shape(0) : x.shape(0));
  args.epilogue = epilogue_of(epilogue);
  const bool product = args.epilogue == Epilogue::silu_mul || args.epilogue == Epilogue::gelu_mul;
  const int64_t columns = product ? weight.n() / 2 : weight.n();
  expect("the width of x", int64_t(x.shape(1)), weight.k());
  if (bias) expect("the length of bias", int64_t(bias->shape(0)), weight.n()), args.bias = bias->data();
  if (norm_weight) {
    expect("the length of norm_weight", int64_t(norm_weight->shape(0)), weight.k());
    args.norm_weight = norm_weight->data();
    args.norm_eps = eps;
  }
  if (row_index) {
    args.row_index = row_index->data();
    for (int64_t r = 0; r < args.rows; ++r)
      if (args.row_index[r] < 0 || args.row_index[r] >= int64_t(x.shape(0)))
        throw std::invalid_argument("linear: row_index has " + std::to_string(args.row_index[r]) + ", x has " +
                                    std::to_string(x.shape(0)) + " rows");
  }
  if (args.epilogue == Epilogue::add && !out) throw std::invalid_argument("linear: epilogue 'add' adds to `out`");
  Output result = out ? *out : new_matrix(args.rows, columns);
  expect("the rows of out", int64_t(result.shape(0)), args.rows);
  expect("the width of out", int64_t(result.shape(1)), columns);
  args.out = result.data();
  args.out_stride = columns;
  check_linear(args);
  nb::gil_scoped_release release;
  LinearScratch scratch;
  scratch.reserve(args.rows, weight.k(), ThreadPool::global().size());
  run_team([&](Team& team) { linear(team, args, scratch); });
  return result;
}

}  // namespace

void bind_gemm(nb::module_& m) {
  nb::class_<PackedWeight>(m, "PackedWeight", "A weight [n, k] in the memory order of the kernels.")
      .def_static("pack", &pack_array, nb::arg("format"), nb::arg("data"), nb::arg("n"), nb::arg("k"),
                  "From checkpoint bytes, row-major: q4_0 q4_1 q5_0 q5_1 q8_0 f16 bf16 f32. Exact.")
      .def_static(
          "quantize",
          [](Matrix data, int bits, int group, bool with_min) {
            nb::gil_scoped_release release;
            return quantize(data.data(), int64_t(data.shape(0)), int64_t(data.shape(1)), bits, group, with_min);
          },
          nb::arg("data"), nb::arg("bits"), nb::arg("group") = 32, nb::arg("with_min") = false,
          "From float32 [n, k] to 4 or 8 bits; group 32, 64, 128, or 0 for one scale an output channel.")
      .def_static("concat", &concat, nb::arg("parts"), "Rows of several weights, one after the other.")
      .def_static("interleave", &interleave, nb::arg("gate"), nb::arg("up"),
                  "What the silu_mul and gelu_mul epilogues take; rows count as gate's, then up's.")
      .def("dequantize", &dequantize, "What linear multiplies by, as float32 [n, k].")
      .def_prop_ro("n", &PackedWeight::n)
      .def_prop_ro("k", &PackedWeight::k)
      .def_prop_ro("kind", [](const PackedWeight& weight) { return kind_name(weight.kind()); })
      .def_prop_ro("nbytes", &PackedWeight::nbytes);

  m.def("settle", &settle, nb::arg("weights"), nb::call_guard<nb::gil_scoped_release>(),
        "Move weights next to each other in memory, in their order of use. Call once, when all are made.");
  m.def("linear", &linear_array, nb::arg("x"), nb::arg("weight"), nb::arg("bias") = nb::none(),
        nb::arg("norm_weight") = nb::none(), nb::arg("eps") = 0.0f, nb::arg("epilogue") = "store",
        nb::arg("row_index") = nb::none(), nb::arg("out") = nb::none(),
        "x [rows, k] times weight transposed, on the thread pool; see csrc/gemm.h for the arguments.");
}
