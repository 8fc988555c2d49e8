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
constexpr int64_t kOwnRows = 8;
// With few rows a run is up to so many tiles, microseconds of reading; with more, one tile is enough work.
constexpr int64_t kFewRows = 4, kFewRowsRun = 4;
// Prepared rows that stay in a core's L2 while tiles pass by.
constexpr int64_t kRowBlockBytes = 256 * 1024;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t to) { return ceil_div(a, to) * to; }

int64_t quad_block_bytes(WeightKind kind) {
  if (kind == WeightKind::int4) return sizeof(Q8Block);
  return kind == WeightKind::int8 ? sizeof(PairBlock) : sizeof(FloatBlock);
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
int64_t staging_bytes(int64_t blocks) { return round_up(staging_floats(blocks) * 4, 64); }

// Where this thread's share of a weight begins.
const uint8_t* first_tile(const PackedWeight::Impl& weight, const Team& team) {
  return weight.data.get() + team.share_begin(weight.tiles) * weight.tile_bytes();
}

struct Linear {
  const LinearArgs& args;
  const PackedWeight::Impl& weight;
  const GemmKernels& kernels;
  const int64_t quad_bytes;  // of one quad of prepared rows
  const uint8_t* next;       // where this thread will begin in the next op's weight

  Linear(const LinearArgs& args, const Team& team)
      : args(args), weight(args.weight->impl()), kernels(OUTRIDER_SELECT_KERNELS(gemm_kernels)),
        quad_bytes(weight.blocks * quad_block_bytes(weight.kind)),
        next(args.next ? first_tile(args.next->impl(), team) : nullptr) {}

  void prepare(int64_t begin, int64_t end, const Prepared& to, float* staging) const {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t source = args.row_index ? args.row_index[r] : r;
      kernels.prologue(weight.kind,
                       {args.x + source * args.x_stride, args.norm_weight, args.norm_eps, weight.k, staging,
                        to.quads + r / kQuad * quad_bytes, int(r % kQuad), to.units + r});
    }
  }

  void compute(int64_t tile_begin, int64_t tile_end, int64_t row_begin, int64_t row_end, const Prepared& from,
               const uint8_t* limit, uint8_t* scratch) const {
    kernels.tiles({&weight, tile_begin, tile_end, from.quads + row_begin / kQuad * quad_bytes, from.units + row_begin,
                   row_end - row_begin, args.bias, args.epilogue, args.out + row_begin * args.out_stride,
                   args.out_stride, limit, next, scratch});
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
  const Linear op(args, team);
  uint8_t* own = aligned(scratch.per_thread[size_t(team.rank())]);
  float* staging = reinterpret_cast<float*>(own + kTileScratch);
  const bool few = args.rows <= kOwnRows;
  const Prepared prepared = few ? prepared_at(own + kTileScratch + staging_bytes(op.weight.blocks), args.rows)
                                : prepared_at(aligned(scratch.shared), args.rows);
  if (!few)
    team.for_each(ceil_div(args.rows, kQuad), 1, [&](int64_t begin, int64_t end) {
      op.prepare(begin * kQuad, std::min(end * kQuad, args.rows), prepared, staging);
    });
  bool is_prepared = !few;
  const int64_t row_block = std::min(kRowBlockMax, std::max(kQuad, kRowBlockBytes / op.quad_bytes * kQuad));
  const int64_t tiles = op.weight.tiles, items = ceil_div(args.rows, row_block) * tiles;
  const int64_t eighth = items / team.size() / 8;  // of a share
  const int64_t run = args.rows <= kFewRows ? std::max<int64_t>(1, std::min(kFewRowsRun, eighth)) : 1;
  team.for_each_share(items, run, [&](int64_t begin, int64_t end, int64_t limit) {
    // Here and not before: a thread that comes when the others are done with this op must not read x any more.
    if (!is_prepared) op.prepare(0, args.rows, prepared, staging);
    is_prepared = true;
    while (begin < end) {  // a run may cross from one block of rows to the next
      const int64_t tile = begin % tiles, row = begin / tiles * row_block;
      const int64_t count = std::min(end - begin, tiles - tile), last = std::min(tile + limit - begin, tiles);
      op.compute(tile, tile + count, row, std::min(row + row_block, args.rows), prepared,
                 op.weight.data.get() + last * op.weight.tile_bytes(), own);
      begin += count;
    }
  });
}

}  // namespace outrider
