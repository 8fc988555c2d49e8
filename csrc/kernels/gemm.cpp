// The linear op's kernels: the order in which tiles, blocks and quads are gone through. Block kernels come from
// gemm_generic.h or the header of the instruction set.
#include "../gemm_impl.h"

#include <cstring>

#include "gemm_finish.h"
#include "gemm_prologue.h"

#if defined(__AVX2__)
#include "gemm_avx2.h"
#else
#include "gemm_generic.h"
#endif

namespace outrider {
namespace OUTRIDER_ISA {
namespace gemm {
namespace {

// Blocks of a tile that are gone through at a time when there is more than one quad: as many as fit L1 unpacked,
// in runs of about equal length.
int64_t chunk_blocks(int64_t blocks, int64_t unpacked_bytes) {
  const int64_t most = unpacked_bytes ? kUnpackBytes / unpacked_bytes : blocks;
  const int64_t chunks = (blocks + most - 1) / most;
  return (blocks + chunks - 1) / chunks;
}

// Adds blocks [begin, end) of a tile times one quad of T rows to acc.
template <class K, int T, Use use>
inline void run_blocks(const PackedWeight::Impl& weight, const uint8_t* w, uint8_t* unpacked,
                       const typename K::Block* x, int64_t count, float* acc) {
  for (int64_t b = 0; b < count; ++b, w += weight.block_bytes, unpacked += K::unpacked_bytes)
    K::template block<T, use>(w, unpacked, x[b], acc);
}

template <class K, Use use>
void run_quad(const PackedWeight::Impl& weight, const uint8_t* w, uint8_t* unpacked, const typename K::Block* x,
              int64_t count, int64_t rows, float* acc) {
  switch (rows) {
    case 1: return run_blocks<K, 1, use>(weight, w, unpacked, x, count, acc);
    case 2: return run_blocks<K, 2, use>(weight, w, unpacked, x, count, acc);
    case 3: return run_blocks<K, 3, use>(weight, w, unpacked, x, count, acc);
    default: return run_blocks<K, 4, use>(weight, w, unpacked, x, count, acc);
  }
}

template <class K>
void tiles_of(const TileRange& range) {
  const PackedWeight::Impl& weight = *range.weight;
  float* acc = reinterpret_cast<float*>(range.scratch);
  uint8_t* unpacked = range.scratch + kRowBlockMax * kTileRows * sizeof(float);
  const auto* quads = static_cast<const typename K::Block*>(range.quads);
  const int64_t chunk = range.rows <= kQuad ? weight.blocks : chunk_blocks(weight.blocks, K::unpacked_bytes);
  const uint8_t* w = weight.data.get() + range.tile_begin * weight.tile_bytes();
  for (int64_t tile = range.tile_begin; tile < range.tile_end; ++tile) {
    std::memset(acc, 0, size_t(range.rows * kTileRows) * sizeof(float));
    for (int64_t begin = 0; begin < weight.blocks; begin += chunk) {
      const int64_t count = weight.blocks - begin < chunk ? weight.blocks - begin : chunk;
      for (int64_t row = 0; row < range.rows; row += kQuad) {
        const int64_t rows = range.rows - row < kQuad ? range.rows - row : kQuad;
        const auto* x = quads + row / kQuad * weight.blocks + begin;
        if (range.rows <= kQuad)
          run_quad<K, Use::packed>(weight, w, unpacked, x, count, rows, acc);
        else if (row == 0)
          run_quad<K, Use::unpacking>(weight, w, unpacked, x, count, kQuad, acc);
        else
          run_quad<K, Use::unpacked>(weight, w, unpacked, x, count, rows, acc + row * kTileRows);
      }
      w += count * weight.block_bytes;
    }
    finish(range, tile, 0, range.rows, acc);
  }
}

void tiles(const TileRange& range) {
  const bool has_min = range.weight->has_min;
  switch (range.weight->kind) {
    case WeightKind::int4: return has_min ? tiles_of<Int4<true>>(range) : tiles_of<Int4<false>>(range);
    case WeightKind::int8: return has_min ? tiles_of<Int8<true>>(range) : tiles_of<Int8<false>>(range);
    case WeightKind::f16: return tiles_of<Float<WeightKind::f16>>(range);
    case WeightKind::bf16: return tiles_of<Float<WeightKind::bf16>>(range);
    case WeightKind::f32: return tiles_of<Float<WeightKind::f32>>(range);
  }
}

}  // namespace
}  // namespace gemm

const GemmKernels& gemm_kernels() {
  static const GemmKernels kernels = {gemm::prologue, gemm::tiles};
  return kernels;
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
