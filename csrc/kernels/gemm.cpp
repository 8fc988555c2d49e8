// The linear op's kernels: the order in which tiles, blocks and quads are gone through. Block kernels come from
// gemm_generic.h or the header of the instruction set.
#include "../gemm_impl.h"

#include <cstring>

#include "gemm_finish.h"
#include "gemm_prologue.h"

#if defined(OUTRIDER_ISA_avx512) || defined(OUTRIDER_ISA_avx512vnni)
#include "gemm_avx512.h"
#elif defined(__AVX2__)
#include "gemm_avx2.h"
#elif defined(OUTRIDER_ISA_neon)
#include "gemm_neon.h"
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

// The weights that a thread will need while it works on others.
struct Fetch {
  const uint8_t *limit, *next;
  int64_t ahead;

  Fetch(const TileRange& range)
      : limit(range.limit), next(range.next ? range.next : range.limit - range.weight->tile_bytes()),
        ahead(kAhead / range.weight->block_bytes * range.weight->block_bytes) {}
  const uint8_t* from(const uint8_t* w) const { return w + ahead < limit ? w + ahead : next + (w + ahead - limit); }
};

// Adds `count` blocks of a tile times T rows, those of one quad or of two in succession, to acc. Not inlined, so that
// the registers are its own; and the compiler must not keep sums in a stack slot beside acc.
template <class K, int T, Pass pass>
__attribute__((noinline)) void run_blocks(const PackedWeight::Impl& weight, const uint8_t* w, const Fetch& memory,
                                          uint8_t* unpacked, const typename K::Block* x, int64_t count, float* acc) {
  const int64_t block_bytes = weight.block_bytes, second = weight.blocks;
  const uint8_t* fetch = memory.from(w);
  for (const auto* const end = x + count; x != end; ++x, w += block_bytes, unpacked += K::unpacked_bytes) {
    if constexpr (kWide > kQuad)
      K::template block<T, pass>(w, fetch, unpacked, *x, x[T > kQuad ? second : 0], acc);
    else
      K::template block<T, pass>(w, fetch, unpacked, *x, acc);
    fetch += block_bytes;
    if (pass != Pass::later && fetch == memory.limit) fetch = memory.next;
    asm volatile("" ::: "memory");
  }
}

// The same for 1..kWide rows.
template <class K, Pass pass, int T = kWide>
void run_rows(const PackedWeight::Impl& weight, const uint8_t* w, const Fetch& memory, uint8_t* unpacked,
              const typename K::Block* x, int64_t count, int64_t rows, float* acc) {
  if constexpr (T > 1) {
    if (rows < T) return run_rows<K, pass, T - 1>(weight, w, memory, unpacked, x, count, rows, acc);
  }
  run_blocks<K, T, pass>(weight, w, memory, unpacked, x, count, acc);
}

// Asks for the memory that a quad's results of a tile go to. Stores that miss hold up those that follow, and the
// block kernels store all the time.
constexpr int64_t kExpectedRows = 32;  // a small part of L1
inline void expect_results(const TileRange& range, int64_t tile, int64_t row, int64_t rows) {
  const int64_t width = range.weight->paired ? kTileRows / 2 : kTileRows;
  const float* out = range.out + row * range.out_stride + tile * width;
  for (int64_t r = 0; r < rows; ++r, out += range.out_stride) __builtin_prefetch(out, 1);
}

// All rows are in one pass.
template <class K>
void few_rows(const TileRange& range) {
  const PackedWeight::Impl& weight = *range.weight;
  const auto* x = static_cast<const typename K::Block*>(range.quads);
  const Fetch memory(range);
  const uint8_t* w = weight.data.get() + range.tile_begin * weight.tile_bytes();
  for (int64_t tile = range.tile_begin; tile < range.tile_end; ++tile, w += weight.tile_bytes()) {
    alignas(64) float acc[kWide * kTileRows];
    std::memset(acc, 0, size_t(range.rows * kTileRows) * sizeof(float));
    expect_results(range, tile, 0, range.rows);
    run_rows<K, Pass::only>(weight, w, memory, nullptr, x, weight.blocks, range.rows, acc);
    finish(range, tile, 0, range.rows, acc);
  }
}

// The first pass unpacks a tile, chunk by chunk, the others reuse that.
template <class K>
void many_rows(const TileRange& range) {
  const PackedWeight::Impl& weight = *range.weight;
  float* acc = reinterpret_cast<float*>(range.scratch);
  uint8_t* unpacked = range.scratch + kRowBlockMax * kTileRows * sizeof(float);
  const auto* quads = static_cast<const typename K::Block*>(range.quads);
  const int64_t chunk = chunk_blocks(weight.blocks, K::unpacked_bytes ? K::unpacked_bytes : weight.block_bytes);
  const Fetch memory(range);
  const uint8_t* w = weight.data.get() + range.tile_begin * weight.tile_bytes();
  for (int64_t tile = range.tile_begin; tile < range.tile_end; ++tile) {
    std::memset(acc, 0, size_t(range.rows * kTileRows) * sizeof(float));
    if (range.rows <= kExpectedRows) expect_results(range, tile, 0, range.rows);
    for (int64_t begin = 0; begin < weight.blocks; begin += chunk) {
      const int64_t count = weight.blocks - begin < chunk ? weight.blocks - begin : chunk;
      const auto* x = quads + begin;
      run_blocks<K, kWide, Pass::first>(weight, w, memory, unpacked, x, count, acc);
      for (int64_t row = kWide; row < range.rows; row += kWide) {
        x += kWide / kQuad * weight.blocks;
        float* sums = acc + row * kTileRows;
        if (row == kWide)
          run_rows<K, Pass::second>(weight, w, memory, unpacked, x, count, range.rows - row, sums);
        else
          run_rows<K, Pass::later>(weight, w, memory, unpacked, x, count, range.rows - row, sums);
      }
      w += count * weight.block_bytes;
    }
    finish(range, tile, 0, range.rows, acc);
  }
}

template <class K>
void tiles_of(const TileRange& range) {
  return range.rows <= kWide ? few_rows<K>(range) : many_rows<K>(range);
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
