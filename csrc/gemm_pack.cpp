// Packing: from checkpoint formats to tiles, from tiles to tiles, and back to fp32.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "gemm_impl.h"

namespace outrider {

using Impl = PackedWeight::Impl;

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t element_bytes(WeightKind kind) { return kind == WeightKind::f32 ? 4 : 2; }

int64_t block_bytes_of(WeightKind kind, bool has_min) {
  const int64_t scales = (has_min ? 2 : 1) * kTileRows * 2;
  if (kind == WeightKind::int4) return kTileRows * kBlock / 2 + scales;
  if (kind == WeightKind::int8) return kTileRows * kBlock + scales;
  return kTileRows * kBlock * element_bytes(kind);
}

uint16_t read16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

// One GGUF block of 32 weights to a block of a packed row.
void put_q4(const PackedRow& row, const uint8_t* nibbles) {
  for (int j = 0; j < 4; ++j) std::memcpy(row.dword(j), nibbles + 4 * j, 4);  // GGUF's order is ours
}

void put_q5(const PackedRow& row, const uint8_t* high_bits, const uint8_t* nibbles, int offset) {
  uint32_t high;
  std::memcpy(&high, high_bits, 4);
  int8_t q[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    const int low = i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4;
    q[i] = int8_t((low | int((high >> i) & 1) << 4) - offset);
  }
  row.put_int8(q);
}

enum class Blocks { q4_0, q4_1, q5_0, q5_1, q8_0, none };

struct Format {
  const char* name;
  WeightKind kind;
  bool has_min;
  Blocks blocks;
  int block_bytes;  // of 32 weights in the checkpoint
};

constexpr Format kFormats[] = {
    {"q4_0", WeightKind::int4, false, Blocks::q4_0, 18}, {"q4_1", WeightKind::int4, true, Blocks::q4_1, 20},
    {"q5_0", WeightKind::int8, false, Blocks::q5_0, 22}, {"q5_1", WeightKind::int8, true, Blocks::q5_1, 24},
    {"q8_0", WeightKind::int8, false, Blocks::q8_0, 34}, {"f16", WeightKind::f16, false, Blocks::none, 64},
    {"bf16", WeightKind::bf16, false, Blocks::none, 64}, {"f32", WeightKind::f32, false, Blocks::none, 128},
};

const Format& find_format(const std::string& name) {
  for (const Format& format : kFormats)
    if (name == format.name) return format;
  throw std::invalid_argument("cannot pack format '" + name + "'; use q4_0, q4_1, q5_0, q5_1, q8_0, f16, bf16 or f32");
}

void pack_block(Blocks blocks, const PackedRow& row, const uint8_t* src) {
  std::memcpy(row.scale(), src, 2);
  switch (blocks) {
    case Blocks::q4_0: return put_q4(row, src + 2);
    case Blocks::q4_1: std::memcpy(row.minimum(), src + 2, 2); return put_q4(row, src + 4);
    case Blocks::q5_0: return put_q5(row, src + 2, src + 6, 16);
    case Blocks::q5_1: std::memcpy(row.minimum(), src + 2, 2); return put_q5(row, src + 4, src + 8, 0);
    case Blocks::q8_0: return row.put_int8(reinterpret_cast<const int8_t*>(src + 2));
    case Blocks::none: return;
  }
}

void put_float_row(const Impl& weight, int64_t row, const void* src, int64_t src_step) {
  const int64_t size = element_bytes(weight.kind), step = kTileRows * size;
  uint8_t* dst = weight.tile_of(row) + weight.lane_of(row) * size;
  for (int64_t i = 0; i < weight.k; ++i)
    std::memcpy(dst + i * step, static_cast<const uint8_t*>(src) + i * src_step, size_t(size));
}

void copy_float_row(const Impl& from, int64_t from_row, const Impl& to, int64_t to_row) {
  const int64_t size = element_bytes(to.kind);
  if (from.kind == to.kind) {
    const uint8_t* src = from.tile_of(from_row) + from.lane_of(from_row) * size;
    return put_float_row(to, to_row, src, kTileRows * size);
  }
  std::vector<float> row(static_cast<size_t>(to.k));
  dequantize_row(from, from_row, row.data());
  put_float_row(to, to_row, row.data(), size);
}

void copy_block(const Impl& from, const PackedRow& src, const Impl& to, const PackedRow& dst) {
  std::memcpy(dst.scale(), src.scale(), 2);
  if (to.has_min) {
    uint16_t minimum = 0;
    if (from.has_min)
      minimum = read16(src.minimum());
    else if (from.kind == WeightKind::int4)
      minimum = float_to_half(-8.0f * half_to_float(read16(src.scale())));  // exact: a power of two
    std::memcpy(dst.minimum(), &minimum, 2);
  }
  if (from.kind == to.kind) {
    for (int j = 0; j < (to.kind == WeightKind::int4 ? 4 : 8); ++j) std::memcpy(dst.dword(j), src.dword(j), 4);
    return;
  }
  int8_t q[kBlock];  // int4 to int8
  for (int i = 0; i < 16; ++i) {
    const uint8_t byte = src.dword(i / 4)[i % 4];
    q[i] = int8_t((byte & 15) - (to.has_min ? 0 : 8));
    q[i + 16] = int8_t((byte >> 4) - (to.has_min ? 0 : 8));
  }
  dst.put_int8(q);
}

// A row of one weight to a row of another with the same k, whose kind holds it exactly.
void copy_row(const Impl& from, int64_t from_row, const Impl& to, int64_t to_row) {
  if (!to.quantised()) return copy_float_row(from, from_row, to, to_row);
  PackedRow src(from, from_row), dst(to, to_row);
  for (int64_t b = 0; b < to.blocks; ++b, src.next(), dst.next()) copy_block(from, src, to, dst);
}

// An empty weight of the narrowest kind that holds all parts exactly.
std::shared_ptr<Impl> common_weight(const std::vector<PackedWeight>& parts, bool paired) {
  int64_t n = 0;
  WeightKind kind = parts[0].kind();
  bool has_min = false;
  for (const PackedWeight& part : parts) {
    if (part.k() != parts[0].k())
      throw std::invalid_argument("weights that are joined need the same number of inputs, got " +
                                  std::to_string(parts[0].k()) + " and " + std::to_string(part.k()));
    n += part.n();
    has_min = has_min || part.impl().has_min;
    if (part.kind() != kind) {
      const bool integers = part.impl().quantised() && (kind == WeightKind::int4 || kind == WeightKind::int8);
      kind = integers ? WeightKind::int8 : WeightKind::f32;
    }
  }
  if (kind != WeightKind::int4 && kind != WeightKind::int8) has_min = false;
  return std::make_shared<Impl>(kind, n, parts[0].k(), has_min, paired);
}

}  // namespace

Impl::Impl(WeightKind kind, int64_t n, int64_t k, bool has_min, bool paired)
    : kind(kind), n(n), k(k), has_min(has_min), paired(paired),
      tiles(paired ? ceil_div(n / 2, kTileRows / 2) : ceil_div(n, kTileRows)), blocks(ceil_div(k, kBlock)),
      block_bytes(block_bytes_of(kind, has_min)) {
  if (n <= 0 || k <= 0)
    throw std::invalid_argument("a weight needs n > 0 and k > 0, got n=" + std::to_string(n) +
                                " k=" + std::to_string(k));
  data.reset(static_cast<uint8_t*>(std::aligned_alloc(64, size_t(ceil_div(nbytes(), 64) * 64))), std::free);
  if (!data) throw std::bad_alloc();
  std::memset(data.get(), 0, size_t(nbytes()));
}

int64_t PackedWeight::n() const { return impl_->n; }
int64_t PackedWeight::k() const { return impl_->k; }
WeightKind PackedWeight::kind() const { return impl_->kind; }
int64_t PackedWeight::nbytes() const { return impl_->nbytes(); }
void PackedWeight::dequantize_row(int64_t row, float* out) const { outrider::dequantize_row(*impl_, row, out); }

PackedWeight pack(const std::string& name, const uint8_t* data, int64_t n, int64_t k) {
  const Format& format = find_format(name);
  if (format.blocks != Blocks::none && k % kBlock)
    throw std::invalid_argument("format " + name + " has blocks of 32 weights, but k=" + std::to_string(k));
  auto impl = std::make_shared<Impl>(format.kind, n, k, format.has_min, false);
  const int64_t row_bytes = k * format.block_bytes / kBlock;
  for (int64_t r = 0; r < n; ++r) {
    const uint8_t* src = data + r * row_bytes;
    if (format.blocks == Blocks::none) {
      put_float_row(*impl, r, src, element_bytes(format.kind));
      continue;
    }
    PackedRow row(*impl, r);
    for (int64_t b = 0; b < impl->blocks; ++b, row.next()) pack_block(format.blocks, row, src + b * format.block_bytes);
  }
  return PackedWeight(std::move(impl));
}

PackedWeight concat(const std::vector<PackedWeight>& parts) {
  if (parts.empty()) throw std::invalid_argument("concat needs at least one weight");
  auto impl = common_weight(parts, false);
  int64_t to = 0;
  for (const PackedWeight& part : parts)
    for (int64_t r = 0; r < part.n(); ++r) copy_row(part.impl(), r, *impl, to++);
  return PackedWeight(std::move(impl));
}

PackedWeight interleave(const PackedWeight& gate, const PackedWeight& up) {
  if (gate.n() != up.n())
    throw std::invalid_argument("interleave needs as many gate rows as up rows, got " + std::to_string(gate.n()) +
                                " and " + std::to_string(up.n()));
  auto impl = common_weight({gate, up}, true);
  for (int64_t r = 0; r < gate.n(); ++r) {
    copy_row(gate.impl(), r, *impl, r);
    copy_row(up.impl(), r, *impl, gate.n() + r);
  }
  return PackedWeight(std::move(impl));
}

void settle(const std::vector<PackedWeight>& weights) {
  constexpr int64_t kPage = 2 << 20;
  int64_t total = 0;
  for (const PackedWeight& weight : weights) total += ceil_div(weight.nbytes(), 64) * 64;
  if (total == 0) return;
  total = ceil_div(total, kPage) * kPage;
  std::shared_ptr<uint8_t> region(static_cast<uint8_t*>(std::aligned_alloc(kPage, size_t(total))), std::free);
  if (!region) throw std::bad_alloc();
#ifdef __linux__
  madvise(region.get(), size_t(total), MADV_HUGEPAGE);
#endif
  int64_t offset = 0;
  for (const PackedWeight& weight : weights) {
    std::memcpy(region.get() + offset, weight.impl_->data.get(), size_t(weight.nbytes()));
    weight.impl_->data = std::shared_ptr<uint8_t>(region, region.get() + offset);
    offset += ceil_div(weight.nbytes(), 64) * 64;
  }
}

void dequantize_row(const Impl& weight, int64_t row, float* out) {
  if (!weight.quantised()) {
    const int64_t size = element_bytes(weight.kind);
    const uint8_t* src = weight.tile_of(row) + weight.lane_of(row) * size;
    for (int64_t i = 0; i < weight.k; ++i, src += kTileRows * size) {
      if (weight.kind == WeightKind::f32)
        std::memcpy(out + i, src, 4);
      else
        out[i] = weight.kind == WeightKind::f16 ? half_to_float(read16(src)) : bfloat_to_float(read16(src));
    }
    return;
  }
  PackedRow src(weight, row);
  for (int64_t b = 0; b < weight.blocks; ++b, src.next()) {
    const float scale = half_to_float(read16(src.scale()));
    const bool int4 = weight.kind == WeightKind::int4;
    const float minimum = weight.has_min ? half_to_float(read16(src.minimum())) : int4 ? -8.0f * scale : 0.0f;
    for (int64_t i = 0; i < std::min(kBlock, weight.k - b * kBlock); ++i) {
      const int q = int4 ? (src.dword(i % 16 / 4)[i % 4] >> (i < 16 ? 0 : 4)) & 15 : src.dword(i / 4)[i % 4] - 128;
      out[b * kBlock + i] = scale * float(q) + minimum;
    }
  }
}

float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
  uint32_t bits;
  if (magnitude >= 0x7c00) {
    bits = 0x7f800000u | (magnitude & 0x3ff) << 13;
  } else if (magnitude >= 0x400) {
    bits = (magnitude << 13) + 0x38000000u;
  } else {  // subnormal: an integer times 2^-24
    const float value = float(magnitude) * 0x1p-24f;
    std::memcpy(&bits, &value, 4);
  }
  bits |= sign;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;  // 65520 and more
  if (bits < 0x38800000) {                       // subnormal: adding 0.5 rounds at 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return uint16_t(sign | (bits - 0x3f000000u));
  }
  bits += 0xfff + ((bits >> 13) & 1);
  return uint16_t(sign | (bits - 0x38000000u) >> 13);
}

}  // namespace outrider
