// The Python module outrider._native. Each part binds itself in its own bind_*.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.h"

namespace nb = nanobind;
using namespace outrider;

void bind_gemm(nb::module_& m);       // packed weights, linear
void bind_runtime(nb::module_& m);    // thread pool, programs, KV cache
void bind_attention(nb::module_& m);  // attention and element-wise ops as test entry points
void bind_sampling(nb::module_& m);   // the sampler
void bind_drafts(nb::module_& m);     // draft indexes
void bind_draft_head(nb::module_& m); // drafting with a head that reads hidden states
void bind_ceilings(nb::module_& m);   // what the machine can do at best

NB_MODULE(_native, m) {
  m.doc() = "Outrider's native kernels.";
  m.def("isa", [] { return std::string(isa_name(current_isa())); }, "The instruction set in use.");
  m.def("supported_isas", [] {
    std::vector<std::string> names;
    for (Isa isa : {Isa::generic, Isa::avx2, Isa::avxvnni, Isa::avx512, Isa::avx512vnni, Isa::neon})
      if (isa_supported(isa)) names.emplace_back(isa_name(isa));
    return names;
  }, "Instruction sets that this build holds and this machine supports.");
  bind_gemm(m);
  bind_runtime(m);
  bind_attention(m);
  bind_sampling(m);
  bind_drafts(m);
  bind_draft_head(m);
  bind_ceilings(m);
}
