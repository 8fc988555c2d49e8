// Which thread does which rows of the ops between the matrix products.
#include "elementwise.h"

#include <algorithm>
#include <cstring>

#include "isa.h"

namespace outrider {

OUTRIDER_DECLARE_KERNELS(ElementwiseKernels, elementwise_kernels)

namespace {

const ElementwiseKernels& kernels() {
  static const ElementwiseKernels& selected = OUTRIDER_SELECT_KERNELS(elementwise_kernels);
  return selected;
}

// Calls fn(row) for every row; threads take runs of rows of about 4,000 floats.
template <class F>
void each_row(Team& team, int64_t rows, int64_t width, F&& fn) {
  const int64_t grain = std::max<int64_t>(1, 4096 / std::max<int64_t>(width, 1));
  team.for_each(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) fn(r);
  });
}

}  // namespace

void embedding(Team& team, const PackedWeight& table, const int32_t* ids, int64_t rows, Rows out) {
  each_row(team, rows, table.k(), [&](int64_t r) { table.dequantize_row(ids[r], out.row(r)); });
}

void gather_rows(Team& team, Rows x, const int32_t* index, int64_t rows, int64_t width, Rows out) {
  each_row(team, rows, width,
           [&](int64_t r) { std::memcpy(out.row(r), x.row(index[r]), size_t(width) * sizeof(float)); });
}

void rms_norm(Team& team, Rows x, const float* weight, float eps, int64_t rows, int heads, int64_t width, Rows out) {
  const auto kernel = kernels().rms_norm;
  each_row(team, rows, heads * width, [&](int64_t r) {
    for (int64_t h = 0; h < heads; ++h) kernel(out.row(r) + h * width, x.row(r) + h * width, weight, eps, width);
  });
}

void layer_norm(Team& team, Rows x, const float* weight, const float* bias, float eps, int64_t rows, int64_t width,
                Rows out) {
  const auto kernel = kernels().layer_norm;
  each_row(team, rows, width, [&](int64_t r) { kernel(out.row(r), x.row(r), weight, bias, eps, width); });
}

void rope(Team& team, Rows x, const RopeTable& table, const int32_t* positions, int64_t rows, int heads,
          int64_t head_dim, Rows out) {
  const auto kernel = kernels().rope_head;
  const int64_t half = table.rotary_dim / 2;
  const bool interleaved = table.layout == RopeLayout::interleaved;
  each_row(team, rows, heads * head_dim, [&](int64_t r) {
    float* row = out.row(r);
    if (row != x.row(r)) std::memcpy(row, x.row(r), size_t(heads * head_dim) * sizeof(float));
    const float* cos = table.cos.data() + positions[r] * half;
    const float* sin = table.sin.data() + positions[r] * half;
    for (int64_t h = 0; h < heads; ++h) kernel(row + h * head_dim, cos, sin, half, interleaved);
  });
}

void silu_mul(Team& team, Rows gate, Rows up, int64_t rows, int64_t width, Rows out) {
  const auto kernel = kernels().silu_mul;
  each_row(team, rows, width, [&](int64_t r) { kernel(out.row(r), gate.row(r), up.row(r), width); });
}

void gelu_mul(Team& team, Rows gate, Rows up, int64_t rows, int64_t width, Rows out) {
  const auto kernel = kernels().gelu_mul;
  each_row(team, rows, width, [&](int64_t r) { kernel(out.row(r), gate.row(r), up.row(r), width); });
}

void add(Team& team, Rows a, Rows b, int64_t rows, int64_t width, Rows out) {
  const auto kernel = kernels().add;
  each_row(team, rows, width, [&](int64_t r) { kernel(out.row(r), a.row(r), b.row(r), width); });
}

}  // namespace outrider
