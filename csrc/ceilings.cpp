#include "ceilings.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "isa.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace outrider {

OUTRIDER_DECLARE_KERNELS(CeilingKernels, ceiling_kernels)

namespace {

double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// GB/s of each repeat: all threads read their own slice of one buffer.
std::vector<double> read_bandwidth(size_t bytes, int repeats) {
  const CeilingKernels& kernels = OUTRIDER_SELECT_KERNELS(ceiling_kernels);
  const size_t threads = static_cast<size_t>(ThreadPool::global().size());
  const size_t slice = std::max<size_t>(bytes / threads / 4096, 1) * 4096;
  std::unique_ptr<char, Free> buffer(static_cast<char*>(std::aligned_alloc(4096, slice * threads)));
  if (!buffer) throw std::bad_alloc();
  std::vector<double> rates(static_cast<size_t>(repeats));
  std::vector<uint64_t> sums(threads * 8);  // a cache line each
  run_team([&](Team& team) {
    char* mine = buffer.get() + slice * static_cast<size_t>(team.rank());
    std::memset(mine, 1, slice);  // touched first by the thread that reads it
    for (double& rate : rates) {
      team.barrier();
      const double begin = now();
      sums[static_cast<size_t>(team.rank()) * 8] += kernels.read(mine, slice);
      team.barrier();
      if (team.rank() == 0) rate = static_cast<double>(slice * threads) / (now() - begin) / 1e9;
    }
  });
  return rates;
}

// GMAC/s of each thread, all working at once for about `seconds`.
std::vector<double> multiply_rate(double seconds) {
  const CeilingKernels& kernels = OUTRIDER_SELECT_KERNELS(ceiling_kernels);
  std::vector<double> rates(static_cast<size_t>(ThreadPool::global().size()));
  run_team([&](Team& team) {
    int32_t sink = 0;
    team.barrier();
    const double begin = now();
    double spent = 0;
    int64_t macs = 0;
    while (spent < seconds) {
      macs += kernels.multiply(200000, &sink);
      spent = now() - begin;
    }
    rates[static_cast<size_t>(team.rank())] = static_cast<double>(macs) / spent / 1e9;
  });
  return rates;
}

}  // namespace
}  // namespace outrider

void bind_ceilings(nb::module_& m) {
  using namespace outrider;
  m.def("measure_read_bandwidth", &read_bandwidth, nb::arg("bytes"), nb::arg("repeats"),
        nb::call_guard<nb::gil_scoped_release>(),
        "GB/s of each of `repeats` reads of a buffer of about `bytes`, by all threads of the pool.");
  m.def("measure_multiply_rate", &multiply_rate, nb::arg("seconds"),
        nb::call_guard<nb::gil_scoped_release>(),
        "int8 GMAC/s of each thread of the pool with all operands in registers.");
}
