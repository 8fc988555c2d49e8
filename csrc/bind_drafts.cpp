#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_drafts(nb::module_&) {}
