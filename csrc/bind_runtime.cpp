#include <nanobind/nanobind.h>

#include "thread_pool.h"

namespace nb = nanobind;
using namespace outrider;

void bind_runtime(nb::module_& m) {
  m.def("set_num_threads", [](int threads) { ThreadPool::global().resize(threads); }, nb::arg("num_threads"),
        nb::call_guard<nb::gil_scoped_release>(), "Threads that run a step, the calling one included. Never changes a result.");
  m.def("num_threads", [] { return ThreadPool::global().size(); },
        "Threads that run a step; at first the CPUs that this process may use.");
}
