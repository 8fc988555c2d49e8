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

// Blocks of a tile that are gone through at a time when there is more than one quad: as many as fit L1 (unpacked),
// in runs of about equal length.
int64_t chunk_blocks(int64_t blocks, int64_t bytes) {
  const int64_t most = kUnpackBytes / bytes;
  const int64_t chunks = (blocks + most - 1) / most;
  return (blocks + chunks - 1) / chunks;
}

// Adds `count` blocks of a tile times one quad of T rows to acc. The weights of `ahead` blocks further on, in this
// tile and then in the memory at `next`, are fetched meanwhile. Not inlined, so that the registers are its own; and
// the compiler must not keep sums in a stack slot beside acc.
template <class K, int T, Use use>
__attribute__((noinline)) void run_blocks(int64_t block_bytes, const uint8_t* w, const uint8_t* next, uint8_t* unpacked,
                                          const typename K::Block* x, int64_t count, float* acc) {
  const int64_t ahead = count * block_bytes < kAhead ? count : kAhead / block_bytes;
  const typename K::Block* const turn = x + (count - ahead);
  const typename K::Block* const end = x + count;
  const uint8_t* fetch = w + ahead * block_bytes;
  for (; x != end; ++x, w += block_bytes, fetch += block_bytes, unpacked += K::unpacked_bytes) {
    if (use != Use::unpacked && x == turn) fetch = next;
    K::template block<T, use>(w, fetch, unpacked, *x, acc);
    asm volatile("" ::: "memory");
  }
}

// All rows are in one quad.
template <class K, int T>
void few_rows(const TileRange& range) {
  const PackedWeight::Impl& weight = *range.weight;
  const auto* x = static_cast<const typename K::Block*>(range.quads);
  const uint8_t* w = weight.data.get() + range.tile_begin * weight.tile_bytes();
  for (int64_t tile = range.tile_begin; tile < range.tile_end; ++tile, w += weight.tile_bytes()) {
    alignas(64) float acc[T * kTileRows] = {};
    const uint8_t* next = tile + 1 == range.tile_end ? range.next : w + weight.tile_bytes();
    run_blocks<K, T, Use::packed>(weight.block_bytes, w, next, nullptr, x, weight.blocks, acc);
    finish(range, tile, 0, T, acc);
  }
}

// The first quad unpacks a tile, chunk by chunk, the others reuse that.
template <class K>
void many_rows(const TileRange& range) {
  const PackedWeight::Impl& weight = *range.weight;
  float* acc = reinterpret_cast<float*>(range.scratch);
  uint8_t* unpacked = range.scratch + kRowBlockMax * kTileRows * sizeof(float);
  const auto* quads = static_cast<const typename K::Block*>(range.quads);
  const int64_t chunk = chunk_blocks(weight.blocks, K::unpacked_bytes ? K::unpacked_bytes : weight.block_bytes);
  const uint8_t* w = weight.data.get() + range.tile_begin * weight.tile_bytes();
  for (int64_t tile = range.tile_begin; tile < range.tile_end; ++tile) {
    std::memset(acc, 0, size_t(range.rows * kTileRows) * sizeof(float));
    for (int64_t begin = 0; begin < weight.blocks; begin += chunk) {
      const int64_t count = weight.blocks - begin < chunk ? weight.blocks - begin : chunk;
      const uint8_t* end = w + count * weight.block_bytes;
      const uint8_t* next = begin + count == weight.blocks && tile + 1 == range.tile_end ? range.next : end;
      const auto* x = quads + begin;
      run_blocks<K, kQuad, Use::unpacking>(weight.block_bytes, w, next, unpacked, x, count, acc);
      for (int64_t row = kQuad; row < range.rows; row += kQuad) {
        x += weight.blocks;
        float* sums = acc + row * kTileRows;
        switch (range.rows - row) {
          case 1: run_blocks<K, 1, Use::unpacked>(weight.block_bytes, w, next, unpacked, x, count, sums); break;
          case 2: run_blocks<K, 2, Use::unpacked>(weight.block_bytes, w, next, unpacked, x, count, sums); break;
          case 3: run_blocks<K, 3, Use::unpacked>(weight.block_bytes, w, next, unpacked, x, count, sums); break;
          default: run_blocks<K, 4, Use::unpacked>(weight.block_bytes, w, next, unpacked, x, count, sums); break;
        }
      }
      w = end;
    }
    finish(range, tile, 0, range.rows, acc);
  }
}

template <class K>
void tiles_of(const TileRange& range) {
  switch (range.rows) {
    case 1: return few_rows<K, 1>(range);
    case 2: return few_rows<K, 2>(range);
    case 3: return few_rows<K, 3>(range);
    case 4: return few_rows<K, 4>(range);
    default: return many_rows<K>(range);
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
