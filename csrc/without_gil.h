// A call that takes long lets other Python threads run, and is safe when the process ends meanwhile.
#pragma once

#include <Python.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace outrider {

// Python ends a thread that asks for the GIL during shutdown by unwinding it, which C++ answers with an
// abort. So the end of the process waits until no thread is about to ask, and those that come later stay.
inline std::atomic<bool> process_ends{false};
inline std::atomic<int> threads_without_gil{0};

class WithoutGil {
 public:
  WithoutGil() {
    ++threads_without_gil;
    state_ = PyEval_SaveThread();
    stay_if_process_ends();
  }
  ~WithoutGil() {
    stay_if_process_ends();
    PyEval_RestoreThread(state_);
    --threads_without_gil;
  }
  WithoutGil(const WithoutGil&) = delete;

 private:
  static void stay_if_process_ends() {
    if (!process_ends) return;
    --threads_without_gil;
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  PyThreadState* state_;
};

}  // namespace outrider
