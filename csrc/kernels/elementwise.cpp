// One row of each op between the matrix products; csrc/elementwise.h says what they mean.
#include "../elementwise.h"

#include "simd_norm.h"
#include "simd_rope.h"

namespace outrider {
namespace OUTRIDER_ISA {

const ElementwiseKernels& elementwise_kernels();

namespace {

// The widest vector that this file is compiled for.
#if defined(__AVX512F__)
using Vector = __m512;
constexpr int kLanes = 16;
inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
#elif defined(__AVX2__) && defined(__FMA__)
using Vector = __m256;
constexpr int kLanes = 8;
inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
#elif defined(__ARM_NEON)
using Vector = float32x4_t;
constexpr int kLanes = 4;
inline Vector load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Vector v) { vst1q_f32(p, v); }
#else
using Vector = float;
constexpr int kLanes = 1;
inline Vector load(const float* p) { return *p; }
inline void store(float* p, Vector v) { *p = v; }
#endif

struct SiluMul {
  template <class V> V operator()(V gate, V up) const { return math::mul(math::silu(gate), up); }
};
struct GeluMul {
  template <class V> V operator()(V gate, V up) const { return math::mul(math::gelu(gate), up); }
};
struct Add {
  template <class V> V operator()(V a, V b) const { return math::add(a, b); }
};

template <class Op>
void binary(float* out, const float* a, const float* b, int64_t n) {
  const Op op;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, op(load(a + i), load(b + i)));
  for (; i < n; ++i) out[i] = op(a[i], b[i]);
}

void layer_norm(float* out, const float* x, const float* weight, const float* bias, float eps, int64_t n) {
  const float mean = sum(x, n) / float(n);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] - mean;
  const float scale = rms_scale(out, n, eps);
  scale_by_weight(out, out, weight, scale, n);
  if (bias) binary<Add>(out, out, bias, n);
}

}  // namespace

const ElementwiseKernels& elementwise_kernels() {
  static const ElementwiseKernels kernels = {rms_norm,        layer_norm,      rope_head,
                                             binary<SiluMul>, binary<GeluMul>, binary<Add>};
  return kernels;
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
