// What the machine can do at best, measured with the threads that run a step: the two figures
// that every kernel's speed is held against.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outrider {

struct CeilingKernels {
  // Sums `bytes` (a multiple of 512) at `data` (64-byte aligned): one streaming read.
  uint64_t (*read)(const void* data, size_t bytes);
  // int8 multiply-accumulates with all operands in registers, by the instructions the matrix
  // products use. Returns how many were done; `sink` keeps the compiler from dropping them.
  int64_t (*multiply)(int64_t rounds, int32_t* sink);
};

}  // namespace outrider
