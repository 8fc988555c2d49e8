// How packed weights and activations lie in memory, and what a set of kernels offers. Shared by
// gemm*.cpp and csrc/kernels/gemm*.
//
// Weights: tiles of 16 output rows, tile after tile; in a tile, blocks of 32 inputs in ascending order,
// so that a product reads one sequential stream. A block is
//   int4   256 bytes: for j in 0..3, for each row, the 4 bytes of inputs 4j..4j+3 in the low nibbles and
//          16+4j..16+4j+3 in the high nibbles, each nibble q in 0..15
//   int8   512 bytes: for j in 0..7, for each row, the 4 bytes q + 128 of inputs 4j..4j+3
//   then   16 fp16 scales, and 16 fp16 minimums if the weight has them: w = scale * q + minimum
//          (int4 without minimums: minimum = -8 * scale)
//   f16, bf16, f32   for each input, 16 values (a block is 32 inputs here, too)
// Rows past n and inputs past k are zero. In a paired weight (interleave) the first 8 rows of a tile are
// gate's and the last 8 up's.
//
// Activations: quads of 4 rows; the missing rows of the last quad are undefined. A quad's blocks are Q8Block for
// int4 weights, PairBlock for int8, FloatBlock else. A quantised row is unit * integers, unit = row_unit[row].
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gemm.h"

namespace outrider {

constexpr int64_t kTileRows = 16;
constexpr int64_t kBlock = 32;
constexpr int64_t kQuad = 4;

// x = unit * multiplier * q. The multiplier of a group of 32 has 15 bits, so that the integer product with 16-bit
// sums of 4-bit weights fits 32 bits: scaling costs no instruction beyond the widening one.
struct Q8Block {
  int8_t q[kQuad][kBlock];        // -127..127
  int16_t multiplier[kQuad][2];   // 1..32767, twice
  float factor[kQuad];            // the multiplier as a float
  float sum[kQuad];               // multiplier * sum of q
};

// x = unit * multiplier * q, a multiplier for each two inputs. q is small enough that the sum of two products with an
// 8-bit weight fits 16 bits; multiplier * q is small enough to be 256 * h + l with h and l of 8 bits (NEON takes it so:
// h in place of q, l in place of the multipliers).
struct PairBlock {
  int8_t q[kQuad][kBlock];                 // -64..64
  int16_t multiplier[kQuad][kBlock / 2];   // 1..509
  int32_t offset[kQuad];                   // -128 * sum of multiplier * q: takes back the 128 that is added to weights
  float sum[kQuad];                        // sum of multiplier * q
};

struct FloatBlock {
  float x[kBlock][kQuad];
};

constexpr float kQ8Levels = 127.0f, kMultiplierMax = 32767.0f;
constexpr float kPairLevels = 64.0f, kPairMultiplierMax = 509.0f;
// Rows with no value above this are taken as zero, so that reciprocals stay finite.
constexpr float kTinyRow = 1e-30f;

struct PackedWeight::Impl {
  Impl(WeightKind kind, int64_t n, int64_t k, bool has_min, bool paired);

  WeightKind kind;
  int64_t n, k;
  bool has_min, paired;
  int64_t tiles, blocks;  // of 16 rows; of 32 inputs, a tile
  int64_t block_bytes;
  std::shared_ptr<uint8_t> data;  // nbytes(), aligned to 64

  int64_t tile_bytes() const { return blocks * block_bytes; }
  int64_t nbytes() const { return tiles * tile_bytes(); }
  bool quantised() const { return kind == WeightKind::int4 || kind == WeightKind::int8; }
  // First byte of the row's tile, and the row's place in it.
  uint8_t* tile_of(int64_t row) const {
    const int64_t tile = paired ? row % (n / 2) / (kTileRows / 2) : row / kTileRows;
    return data.get() + tile * tile_bytes();
  }
  int64_t lane_of(int64_t row) const {
    if (!paired) return row % kTileRows;
    return row % (n / 2) % (kTileRows / 2) + (row < n / 2 ? 0 : kTileRows / 2);
  }
};

// A row of a quantised weight, block by block.
class PackedRow {
 public:
  PackedRow(const PackedWeight::Impl& weight, int64_t row)
      : block_(weight.tile_of(row)), lane_(weight.lane_of(row)), stride_(weight.block_bytes),
        value_bytes_(kTileRows * kBlock / (weight.kind == WeightKind::int4 ? 2 : 1)) {}
  uint8_t* dword(int64_t j) const { return block_ + (j * kTileRows + lane_) * 4; }
  uint8_t* scale() const { return block_ + value_bytes_ + lane_ * 2; }
  uint8_t* minimum() const { return scale() + kTileRows * 2; }
  void next() { block_ += stride_; }

  void put_int8(const int8_t* q) const {
    for (int i = 0; i < kBlock; ++i) dword(i / 4)[i % 4] = uint8_t(q[i] + 128);
  }
  void put_int4(const int8_t* q) const {  // 0..15
    for (int i = 0; i < 16; ++i) dword(i / 4)[i % 4] = uint8_t(q[i] | q[i + 16] << 4);
  }

 private:
  uint8_t* block_;
  int64_t lane_, stride_, value_bytes_;
};

// The row, and the largest value of each group, of eight groups at a time.
constexpr int64_t staging_floats(int64_t blocks) { return blocks * kBlock + (blocks + 7) / 8 * 8; }

// One activation row in, its lane of a quad out.
struct PrologueRow {
  const float* x;
  const float* norm_weight;  // or null
  float norm_eps;
  int64_t k;
  float* staging;  // staging_floats(blocks)
  void* quad;      // Q8Block, PairBlock or FloatBlock [blocks]
  int lane;
  float* unit;     // of this row
};

// Tiles [tile_begin, tile_end) times rows [0, rows), from the quads on.
struct TileRange {
  const PackedWeight::Impl* weight;
  int64_t tile_begin, tile_end;
  const void* quads;
  const float* units;
  int64_t rows;
  const float* bias;
  Epilogue epilogue;
  float* out;
  int64_t out_stride;
  // The thread will probably read on up to `limit`, and then from `next` (or null: then it is not known).
  const uint8_t *limit, *next;
  uint8_t* scratch;     // kTileScratch bytes, aligned to 64, of this thread
};

constexpr int64_t kRowBlockMax = 512;     // rows of a TileRange at most
constexpr int64_t kUnpackBytes = 20480;  // of a tile's blocks, unpacked for reuse by many rows: part of L1
constexpr int64_t kTileScratch = kRowBlockMax * kTileRows * int64_t(sizeof(float)) + kUnpackBytes;

// A tile is gone through once for each quad of rows, or for two quads at once. The first pass of several leaves the weights unpacked in scratch
// for the others; fetching the weights that come next is divided between the first two.
enum class Pass { only, first, second, later };

struct GemmKernels {
  void (*prologue)(WeightKind kind, const PrologueRow& row);
  void (*tiles)(const TileRange& range);
};

void dequantize_row(const PackedWeight::Impl& weight, int64_t row, float* out);

// IEEE half and bfloat16 in software, for packing.
float half_to_float(uint16_t half);
uint16_t float_to_half(float value);  // to nearest even
inline float bfloat_to_float(uint16_t value) {
  const uint32_t bits = uint32_t(value) << 16;
  float out;
  __builtin_memcpy(&out, &bits, 4);
  return out;
}

}  // namespace outrider
