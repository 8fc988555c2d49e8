// From the sums of a tile to the results: unit, bias, epilogue.
#pragma once

#include "../gemm_impl.h"
#include "simd_math.h"

namespace outrider {
namespace OUTRIDER_ISA {
namespace gemm {

inline bool is_product(Epilogue epilogue) { return epilogue == Epilogue::silu_mul || epilogue == Epilogue::gelu_mul; }

// One row of one tile, any shape.
inline void finish_row(const TileRange& range, int64_t tile, int64_t row, const float* acc) {
  const PackedWeight::Impl& weight = *range.weight;
  const int64_t width = weight.paired ? kTileRows / 2 : kTileRows, columns = weight.paired ? weight.n / 2 : weight.n;
  const int64_t first = tile * width, count = columns - first < width ? columns - first : width;
  float y[kTileRows];
  for (int i = 0; i < kTileRows; ++i) y[i] = acc[i] * range.units[row];
  if (range.bias)
    for (int64_t i = 0; i < count; ++i) {
      y[i] = y[i] + range.bias[first + i];
      if (weight.paired) y[width + i] = y[width + i] + range.bias[columns + first + i];
    }
  float* out = range.out + row * range.out_stride + first;
  if (is_product(range.epilogue)) {
    for (int64_t i = 0; i < count; ++i)
      out[i] = (range.epilogue == Epilogue::silu_mul ? math::silu(y[i]) : math::gelu(y[i])) * y[width + i];
    return;
  }
  for (int64_t part = 0; part < (weight.paired ? 2 : 1); ++part)
    for (int64_t i = 0; i < count; ++i) {
      float& o = out[part * columns + i];
      o = range.epilogue == Epilogue::add ? o + y[part * width + i] : y[part * width + i];
    }
}

#if defined(__AVX2__) && defined(__FMA__)

// Rows [row, row + count) of a tile that is not the ragged last one.
template <Epilogue E>
inline void finish_full(const TileRange& range, int64_t tile, int64_t row, int64_t count, const float* acc) {
  const PackedWeight::Impl& weight = *range.weight;
  const int64_t second = weight.paired ? weight.n / 2 : 8;  // from the first 8 results to the last 8
  const int64_t first = tile * (weight.paired ? 8 : 16);
  const float* bias = range.bias ? range.bias + first : nullptr;
  float* out = range.out + row * range.out_stride + first;
  for (int64_t r = 0; r < count; ++r, acc += kTileRows, out += range.out_stride) {
    const __m256 unit = _mm256_broadcast_ss(range.units + row + r);
    __m256 a = _mm256_mul_ps(_mm256_load_ps(acc), unit), b = _mm256_mul_ps(_mm256_load_ps(acc + 8), unit);
    if (bias) {
      a = _mm256_add_ps(a, _mm256_loadu_ps(bias));
      b = _mm256_add_ps(b, _mm256_loadu_ps(bias + second));
    }
    if (E == Epilogue::silu_mul) {
      _mm256_storeu_ps(out, _mm256_mul_ps(math::silu(a), b));
      continue;
    }
    if (E == Epilogue::gelu_mul) {
      _mm256_storeu_ps(out, _mm256_mul_ps(math::gelu(a), b));
      continue;
    }
    if (E == Epilogue::add) {
      a = _mm256_add_ps(_mm256_loadu_ps(out), a);
      b = _mm256_add_ps(_mm256_loadu_ps(out + second), b);
    }
    _mm256_storeu_ps(out, a);
    _mm256_storeu_ps(out + second, b);
  }
}

inline void finish(const TileRange& range, int64_t tile, int64_t row, int64_t count, const float* acc) {
  const PackedWeight::Impl& weight = *range.weight;
  if (weight.paired ? (tile + 1) * 8 <= weight.n / 2 : (tile + 1) * 16 <= weight.n) {
    switch (range.epilogue) {
      case Epilogue::store: return finish_full<Epilogue::store>(range, tile, row, count, acc);
      case Epilogue::add: return finish_full<Epilogue::add>(range, tile, row, count, acc);
      case Epilogue::silu_mul: return finish_full<Epilogue::silu_mul>(range, tile, row, count, acc);
      case Epilogue::gelu_mul: return finish_full<Epilogue::gelu_mul>(range, tile, row, count, acc);
    }
  }
  for (int64_t r = 0; r < count; ++r) finish_row(range, tile, row + r, acc + r * kTileRows);
}

#else

inline void finish(const TileRange& range, int64_t tile, int64_t row, int64_t count, const float* acc) {
  for (int64_t r = 0; r < count; ++r) finish_row(range, tile, row + r, acc + r * kTileRows);
}

#endif

}  // namespace gemm
}  // namespace OUTRIDER_ISA
}  // namespace outrider
