#!/bin/sh
# Says in one sentence what a machine lacks before anything is installed.
python=${1:-python3}
if ! command -v "$python" >/dev/null 2>&1; then
  echo "Outrider needs Python 3.10 or newer; '$python' was not found. Install it (Debian: apt-get install python3 python3-venv) or run make with PYTHON=/path/to/python3." >&2
  exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "Outrider needs Python 3.10 or newer; '$python' is $("$python" -V 2>&1). Run make with PYTHON=/path/to/a/newer/python3." >&2
  exit 1
fi
if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
  echo "Python's venv module is missing; install it (Debian: apt-get install python3-venv)." >&2
  exit 1
fi
cxx=${CXX:-c++}
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
printf '#include <optional>\nint main() { std::optional<int> x = 0; return *x; }\n' > "$dir/probe.cpp"
if ! command -v "$cxx" >/dev/null 2>&1 || ! "$cxx" -std=c++17 -o "$dir/probe" "$dir/probe.cpp" >/dev/null 2>&1; then
  echo "Outrider builds its kernels with a C++17 compiler, and '$cxx' is missing or cannot compile C++17. Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install) or set CXX." >&2
  exit 1
fi
