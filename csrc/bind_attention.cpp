// The paged cache, and attention as a test entry point.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "attention.h"
#include "without_gil.h"

namespace nb = nanobind;
using namespace outrider;

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;  // each row contiguous
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntMatrix = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

CacheType cache_type(const std::string& name) {
  if (name == "f16") return CacheType::f16;
  if (name == "bf16") return CacheType::bf16;
  if (name == "f32") return CacheType::f32;
  throw std::invalid_argument("kv_cache_dtype must be f16, bf16 or f32, got '" + name + "'");
}

// A writable numpy view of one layer's keys or values: float32, or the 16-bit patterns as uint16.
nb::ndarray<nb::numpy> layer_view(nb::handle self, uint8_t* data, std::initializer_list<size_t> shape) {
  const bool wide = nb::cast<KVCache&>(self).type == CacheType::f32;
  return nb::ndarray<nb::numpy>(data, shape, self, {}, wide ? nb::dtype<float>() : nb::dtype<uint16_t>());
}

void require(bool ok, const char* message) {
  if (!ok) throw std::invalid_argument(message);
}

// Everything the kernels would otherwise read or write out of bounds.
void check_step(const AttentionBatch& batch, const KVCache& cache, int64_t max_position) {
  const int32_t* start = batch.query_start_loc;
  require(start[0] == 0 && start[batch.num_requests] == batch.num_rows, "query_start_loc must end at the rows");
  for (int64_t request = 0; request < batch.num_requests; ++request) {
    require(start[request] <= start[request + 1], "query_start_loc must ascend");
    for (int64_t row = start[request]; row < start[request + 1]; ++row) {
      const int64_t position = batch.positions[row], slot = batch.slot_mapping[row];
      require(position >= 0 && position < batch.seq_lens[request], "position out of range");
      require(position < max_position, "position past the end of the RoPE table");
      require(slot >= 0 && slot < cache.num_blocks * cache.block_size, "slot out of range");
      require(position / cache.block_size < batch.max_blocks, "the block table is too short");
      const int32_t* table = batch.block_tables + request * batch.max_blocks;
      for (int64_t i = 0; i <= position / cache.block_size; ++i)
        require(table[i] < cache.num_blocks, "block out of range");  // negative: a block that a window left behind
    }
  }
  if (batch.parents) check_parents(batch);
}

struct Rope {
  std::optional<Matrix> cos, sin;
  std::string layout;

  bool fill(RopeTable& table) const {
    if (!cos) return false;
    require(sin && cos->shape(0) == sin->shape(0) && cos->shape(1) == sin->shape(1), "cos and sin differ in shape");
    table.max_position = int64_t(cos->shape(0));
    table.rotary_dim = 2 * int(cos->shape(1));
    table.layout = layout == "interleaved" ? RopeLayout::interleaved : RopeLayout::half;
    table.cos.assign(cos->data(), cos->data() + cos->size());
    table.sin.assign(sin->data(), sin->data() + sin->size());
    return true;
  }
};

nb::ndarray<nb::numpy, float, nb::ndim<2>> attention(
    Rows q, Rows k, Rows v, KVCache& cache, int layer, Ints positions, Ints slot_mapping, Ints query_start_loc,
    Ints seq_lens, IntMatrix block_tables, int num_heads, float scale, int window, std::optional<Matrix> rope_cos,
    std::optional<Matrix> rope_sin, const std::string& rope_layout, std::optional<Floats> q_norm,
    std::optional<Floats> k_norm, float norm_eps, std::optional<Ints> parents) {
  const size_t rows = q.shape(0), width = size_t(num_heads) * cache.head_dim;
  const size_t kv_width = size_t(cache.kv_heads) * cache.head_dim;
  require(q.shape(1) == width && k.shape(1) == kv_width && v.shape(1) == kv_width, "q, k or v has a wrong width");
  require(k.shape(0) == rows && v.shape(0) == rows && positions.size() == rows && slot_mapping.size() == rows,
          "q, k, v, positions and slot_mapping need one row a token");
  require(rows == 0 || (q.stride(1) == 1 && k.stride(1) == 1 && v.stride(1) == 1),
          "rows of q, k and v must be contiguous");
  require(seq_lens.size() + 1 == query_start_loc.size() && block_tables.shape(0) == seq_lens.size(),
          "seq_lens, query_start_loc and block_tables need one entry a request");
  require(layer >= 0 && layer < cache.num_layers, "layer out of range");
  RopeTable rope;
  const bool has_rope = Rope{rope_cos, rope_sin, rope_layout}.fill(rope);
  AttentionBatch batch{int64_t(rows), int64_t(seq_lens.size()), positions.data(), slot_mapping.data(),
                       query_start_loc.data(), seq_lens.data(), block_tables.data(), int64_t(block_tables.shape(1))};
  require(!parents || parents->size() == rows, "parents needs one row a token");
  batch.parents = parents ? parents->data() : nullptr;
  check_step(batch, cache, has_rope ? rope.max_position : INT32_MAX);
  DraftTrees trees;
  if (parents && trees.index(batch, cache.block_size)) batch.trees = &trees;
  float* out = new float[rows * width];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  AttentionArgs args{q.data(), k.data(), v.data(), q.stride(0), k.stride(0), v.stride(0), num_heads, &cache, layer,
                     scale, window, has_rope ? &rope : nullptr, q_norm ? q_norm->data() : nullptr,
                     k_norm ? k_norm->data() : nullptr, norm_eps, out, int64_t(width)};
  check_attention(args);
  {
    nb::gil_scoped_release release;
    static AttentionScratch scratch;  // kept, as a program keeps its own; teams run one at a time
    run_team([&](Team& team) { append_attention(team, batch, args, scratch); });
  }
  return nb::ndarray<nb::numpy, float, nb::ndim<2>>(out, {rows, width}, owner);
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<KVCache>(m, "KVCache", "Keys and values of all layers in blocks of slots; untouched blocks cost nothing.")
      .def("__init__",
           [](KVCache* self, int num_layers, int64_t num_blocks, int block_size, int kv_heads, int head_dim,
              const std::string& dtype) {
             new (self) KVCache(num_layers, num_blocks, block_size, kv_heads, head_dim, cache_type(dtype));
           },
           nb::arg("num_layers"), nb::arg("num_blocks"), nb::arg("block_size"), nb::arg("kv_heads"),
           nb::arg("head_dim"), nb::arg("dtype") = "f16")
      .def_ro("num_layers", &KVCache::num_layers)
      .def_ro("num_blocks", &KVCache::num_blocks)
      .def_ro("block_size", &KVCache::block_size)
      .def_ro("kv_heads", &KVCache::kv_heads)
      .def_ro("head_dim", &KVCache::head_dim)
      .def_prop_ro("nbytes", &KVCache::nbytes, "Address space; memory is taken as blocks are touched.")
      .def("keys", [](nb::handle self, int layer) {
             const KVCache& cache = nb::cast<KVCache&>(self);
             return layer_view(self, cache.keys(layer), {size_t(cache.num_blocks), size_t(cache.kv_heads),
                                                         size_t(cache.head_dim), size_t(cache.block_size)});
           }, nb::arg("layer"), "View of a layer's keys [num_blocks, kv_heads, head_dim, block_size].")
      .def("values", [](nb::handle self, int layer) {
             const KVCache& cache = nb::cast<KVCache&>(self);
             return layer_view(self, cache.values(layer), {size_t(cache.num_blocks), size_t(cache.kv_heads),
                                                           size_t(cache.block_size), size_t(cache.head_dim)});
           }, nb::arg("layer"), "View of a layer's values [num_blocks, kv_heads, block_size, head_dim].")
      .def("move_slots", [](KVCache& cache, Ints from, Ints to) {
             require(from.size() == to.size(), "from_slots and to_slots need one entry a move");
             WithoutGil without;
             cache.move_slots(from.data(), to.data(), int64_t(from.size()));
           }, nb::arg("from_slots").noconvert(), nb::arg("to_slots").noconvert(),
           "Copy keys and values of every layer from slot to slot, in the order given, without the GIL.");
  m.def("append_attention", attention, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("cache"), nb::arg("layer"),
        nb::arg("positions"), nb::arg("slot_mapping"), nb::arg("query_start_loc"), nb::arg("seq_lens"),
        nb::arg("block_tables"), nb::kw_only(), nb::arg("num_heads"), nb::arg("scale"), nb::arg("window") = 0,
        nb::arg("rope_cos") = nb::none(), nb::arg("rope_sin") = nb::none(), nb::arg("rope_layout") = "half",
        nb::arg("q_norm") = nb::none(), nb::arg("k_norm") = nb::none(), nb::arg("norm_eps") = 0.0f,
        nb::arg("parents") = nb::none(),
        "One layer's attention of one step; the arguments are those of csrc/attention.h.");
}
