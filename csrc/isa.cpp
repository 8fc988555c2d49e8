#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace outrider {

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::generic: return "generic";
    case Isa::avx2: return "avx2";
    case Isa::avxvnni: return "avxvnni";
    case Isa::avx512: return "avx512";
    case Isa::avx512vnni: return "avx512vnni";
    case Isa::neon: return "neon";
  }
  return "?";
}

bool isa_supported(Isa isa) {
  switch (isa) {
    case Isa::generic: return true;
#ifdef OUTRIDER_HAVE_avx2
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Isa::avxvnni: {
      // CPUID.(EAX=7,ECX=1):EAX[4]; older compilers do not know the name "avxvnni".
      unsigned a = 7, b = 0, c = 1, d = 0;
      __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
      return isa_supported(Isa::avx2) && ((a >> 4) & 1);
    }
    case Isa::avx512:
      return isa_supported(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::avx512vnni: return isa_supported(Isa::avx512) && __builtin_cpu_supports("avx512vnni");
#endif
#ifdef OUTRIDER_HAVE_neon
    case Isa::neon: return true;
#endif
    default: return false;
  }
}

static Isa choose() {
  const Isa all[] = {Isa::generic, Isa::avx2, Isa::avxvnni, Isa::avx512, Isa::avx512vnni, Isa::neon};
  if (const char* want = std::getenv("OUTRIDER_ISA"); want && *want) {
    for (Isa isa : all)
      if (!std::strcmp(want, isa_name(isa))) {
        if (isa_supported(isa)) return isa;
        throw std::invalid_argument(std::string("OUTRIDER_ISA=") + want + ": this machine or build does not support it");
      }
    throw std::invalid_argument(std::string("OUTRIDER_ISA=") + want +
                             " is unknown; use generic, avx2, avxvnni, avx512, avx512vnni or neon");
  }
  Isa best = Isa::generic;
  for (Isa isa : all)
    if (isa_supported(isa)) best = isa;
  return best;
}

Isa current_isa() {
  static const Isa isa = choose();
  return isa;
}

}  // namespace outrider
