#!/bin/sh
# Builds the native library under sanitizers and works it hard, on the machine's instruction set and on the
# portable one. Stops at the first error. Usage: tests/run_sanitizers.sh [address,undefined | thread]...
set -eu
cd "$(dirname "$0")/.."

[ $# -gt 0 ] || set -- address,undefined thread
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=second_deadlock_stack=1

for sanitizer in "$@"; do
  build="build/sanitize-$(echo "$sanitizer" | tr , -)"
  cmake -S tests/native -B "$build" -DOUTRIDER_SANITIZE="$sanitizer" >/dev/null
  cmake --build "$build" --parallel "${JOBS:-2}" >/dev/null
  for isa in "" generic; do
    echo "$sanitizer: OUTRIDER_ISA=${isa:-best}"
    OUTRIDER_ISA=$isa "$build/stress"
  done
done
