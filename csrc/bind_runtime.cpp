#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_runtime(nb::module_&) {}
