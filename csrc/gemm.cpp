// The linear op: who computes which tiles, from which copy of the prepared rows.
#include "gemm.h"

#include <algorithm>
#include <stdexcept>

#include "gemm_impl.h"
#include "isa.h"

namespace outrider {

OUTRIDER_DECLARE_KERNELS(GemmKernels, gemm_kernels)

namespace {

// Up to this many rows every thread prepares all rows for itself, which costs less than a barrier.
constexpr int64_t kOwnRows = 2;
// Prepared rows that stay in a core's L2 while tiles pass by.
constexpr int64_t kRowBlockBytes = 256 * 1024;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t to) { return ceil_div(a, to) * to; }

int64_t quad_block_bytes(WeightKind kind) {
  if (kind == WeightKind::int4) return sizeof(Q8Block);
  return kind == WeightKind::int8 ? sizeof(Q16Block) : sizeof(FloatBlock);
}

// Where the prepared rows of one op lie in scratch: units of all rows, then the quads.
struct Prepared {
  float* units;
  uint8_t* quads;
};

int64_t prepared_bytes(int64_t rows, int64_t blocks, int64_t block_bytes) {
  return round_up(round_up(rows, kQuad) * 4, 64) + ceil_div(rows, kQuad) * blocks * block_bytes;
}

Prepared prepared_at(uint8_t* base, int64_t rows) {
  return {reinterpret_cast<float*>(base), base + round_up(round_up(rows, kQuad) * 4, 64)};
}

uint8_t* aligned(std::vector<uint8_t>& bytes) {
  return reinterpret_cast<uint8_t*>(round_up(int64_t(reinterpret_cast<uintptr_t>(bytes.data())), 64));
}

// A thread's scratch: for the tile kernels, a row in fp32, then its own prepared rows.
int64_t staging_bytes(int64_t blocks) { return round_up(blocks * kStagingPerBlock * 4, 64); }

struct Linear {
  const LinearArgs& args;
  const PackedWeight::Impl& weight;
  const GemmKernels& kernels;
  const int64_t quad_bytes;  // of one quad of prepared rows

  Linear(const LinearArgs& args)
      : args(args), weight(args.weight->impl()), kernels(OUTRIDER_SELECT_KERNELS(gemm_kernels)),
        quad_bytes(weight.blocks * quad_block_bytes(weight.kind)) {}

  void prepare(int64_t begin, int64_t end, const Prepared& to, float* staging) const {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t source = args.row_index ? args.row_index[r] : r;
      kernels.prologue(weight.kind, {args.x + source * args.x_stride, args.norm_weight, args.norm_eps, weight.k, staging,
                                     to.quads + r / kQuad * quad_bytes, int(r % kQuad), to.units + r});
    }
  }

  void compute(int64_t tile_begin, int64_t tile_end, int64_t row_begin, int64_t row_end, const Prepared& from,
               uint8_t* scratch) const {
    kernels.tiles({&weight, tile_begin, tile_end, from.quads + row_begin / kQuad * quad_bytes, from.units + row_begin,
                   row_end - row_begin, args.bias, args.epilogue, args.out + row_begin * args.out_stride,
                   args.out_stride, scratch});
  }
};

// Tiles in runs for a team: first one long run a thread, a fixed part of an even share, then short ones for whoever
// is free, so that few runs are taken and all threads end together.
struct Runs {
  int64_t tiles, threads, large, small;
  Runs(int64_t tiles, int64_t threads)
      : tiles(tiles), threads(threads), large(tiles * 3 / 4 / threads),
        small(std::max<int64_t>(1, (tiles - large * threads) / (threads * 4))) {}
  int64_t count() const { return threads + ceil_div(tiles - large * threads, small); }
  int64_t begin(int64_t run) const {
    return run <= threads ? run * large : std::min(tiles, large * threads + (run - threads) * small);
  }
};

}  // namespace

void check_linear(const LinearArgs& args) {
  const bool product = args.epilogue == Epilogue::silu_mul || args.epilogue == Epilogue::gelu_mul;
  if (product && !args.weight->impl().paired)
    throw std::invalid_argument("linear: the epilogues silu_mul and gelu_mul need an interleaved weight");
}

void LinearScratch::reserve(int64_t max_rows, int64_t max_k, int threads) {
  const int64_t blocks = ceil_div(max_k, kBlock), widest = sizeof(FloatBlock);
  shared.resize(size_t(std::max<int64_t>(shared.size(), 64 + prepared_bytes(max_rows, blocks, widest))));
  per_thread.resize(size_t(std::max<int64_t>(per_thread.size(), threads)));
  const int64_t own = 64 + kTileScratch + staging_bytes(blocks) + prepared_bytes(kOwnRows, blocks, widest);
  for (auto& bytes : per_thread) bytes.resize(size_t(std::max<int64_t>(bytes.size(), own)));
}

void linear(Team& team, const LinearArgs& args, LinearScratch& scratch) {
  const Linear op(args);
  uint8_t* own = aligned(scratch.per_thread[size_t(team.rank())]);
  float* staging = reinterpret_cast<float*>(own + kTileScratch);
  Prepared prepared;
  if (args.rows <= kOwnRows) {
    prepared = prepared_at(own + kTileScratch + staging_bytes(op.weight.blocks), args.rows);
    op.prepare(0, args.rows, prepared, staging);
  } else {
    prepared = prepared_at(aligned(scratch.shared), args.rows);
    team.for_each(ceil_div(args.rows, kQuad), 1, [&](int64_t begin, int64_t end) {
      op.prepare(begin * kQuad, std::min(end * kQuad, args.rows), prepared, staging);
    });
  }
  const int64_t row_block = std::min(kRowBlockMax, std::max(kQuad, kRowBlockBytes / op.quad_bytes * kQuad));
  const Runs runs(op.weight.tiles, team.size());
  team.for_each(ceil_div(args.rows, row_block) * runs.count(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t run = item % runs.count(), row = item / runs.count() * row_block;
      op.compute(runs.begin(run), runs.begin(run + 1), row, std::min(row + row_block, args.rows), prepared, own);
    }
  });
}

}  // namespace outrider
