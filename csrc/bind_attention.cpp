#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_attention(nb::module_&) {}
