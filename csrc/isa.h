// Which instruction set the kernels use, decided once at run time.
//
// Files in csrc/kernels/ are compiled once per instruction set, each inside
// `namespace outrider::OUTRIDER_ISA`. A family of kernels is a struct of function pointers
// (for example GemmKernels) and a function of the same name in every namespace:
//
//   namespace outrider { namespace OUTRIDER_ISA { const GemmKernels& gemm_kernels() { ... } } }
//
// The baseline side declares them with OUTRIDER_DECLARE_KERNELS(GemmKernels, gemm_kernels) and
// picks with OUTRIDER_SELECT_KERNELS(gemm_kernels).
#pragma once

namespace outrider {

enum class Isa { generic, avx2, avxvnni, avx512, avx512vnni, neon };

// Best of what the machine supports and the build holds; environment OUTRIDER_ISA forces one
// (std::runtime_error when it is unknown or the machine lacks it).
Isa current_isa();
const char* isa_name(Isa isa);
bool isa_supported(Isa isa);

#ifdef OUTRIDER_HAVE_avx2
#define OUTRIDER_IF_x86(x) x
#else
#define OUTRIDER_IF_x86(x)
#endif
#ifdef OUTRIDER_HAVE_neon
#define OUTRIDER_IF_neon(x) x
#else
#define OUTRIDER_IF_neon(x)
#endif

#define OUTRIDER_DECLARE_KERNELS(Type, fn)                     \
  namespace generic { const Type& fn(); }                      \
  OUTRIDER_IF_x86(namespace avx2 { const Type& fn(); }         \
                  namespace avxvnni { const Type& fn(); }      \
                  namespace avx512 { const Type& fn(); }       \
                  namespace avx512vnni { const Type& fn(); })  \
  OUTRIDER_IF_neon(namespace neon { const Type& fn(); })

#define OUTRIDER_SELECT_KERNELS(fn)                                          \
  ([]() -> decltype(generic::fn()) {                                         \
    switch (current_isa()) {                                                 \
      OUTRIDER_IF_x86(case Isa::avx2: return avx2::fn();                     \
                      case Isa::avxvnni: return avxvnni::fn();               \
                      case Isa::avx512: return avx512::fn();                 \
                      case Isa::avx512vnni: return avx512vnni::fn();)        \
      OUTRIDER_IF_neon(case Isa::neon: return neon::fn();)                   \
      default: return generic::fn();                                         \
    }                                                                        \
  }())

}  // namespace outrider
