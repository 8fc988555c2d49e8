// Threads that wait for each other in nanoseconds while a step runs, and cost nothing while none does.
#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

namespace outrider {
namespace {

constexpr int kMaxRounds = 8;  // barrier rounds: up to 2^8 threads
constexpr int kMaxThreads = 1 << kMaxRounds;
// How long a waiting thread keeps its core: first with `pause` only, then giving way to whoever wants
// to run, then it sleeps. The second bridges the time between two steps of a busy engine.
constexpr auto kSpin = std::chrono::microseconds(20);
constexpr auto kYield = std::chrono::microseconds(1000);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
#ifdef __linux__
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof(mask), &mask) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &mask)) cpus.push_back(cpu);
#endif
  if (cpus.empty())
    for (unsigned cpu = 0; cpu < std::max(1u, std::thread::hardware_concurrency()); ++cpu) cpus.push_back(int(cpu));
  return cpus;
}

// CPUs that this process may use: its affinity mask, and its container's quota.
int default_threads() {
  int threads = int(allowed_cpus().size());
  if (FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    long long quota = 0, period = 0;
    if (std::fscanf(file, "%lld %lld", &quota, &period) == 2 && quota > 0 && period > 0)
      threads = std::min<long long>(threads, (quota + period - 1) / period);
    std::fclose(file);
  }
  return std::min(std::max(threads, 1), kMaxThreads);
}

thread_local bool inside_run = false;

}  // namespace

// What one thread waits on. Others write `arrived`, so each has its own cache lines.
struct alignas(128) Slot {
  std::atomic<uint32_t> arrived[kMaxRounds] = {};  // the last barrier whose round k was signalled to us
  std::atomic<bool> sleeping{false};
  uint32_t barriers = 0;  // owner only: barriers passed
  uint32_t phases = 0;    // owner only: for_each phases passed
  std::mutex mutex;
  std::condition_variable wake;
};

struct alignas(128) Counter {
  std::atomic<int64_t> next{0};
};

// A dissemination barrier: in round k a thread signals the one 2^k further on and waits for the one
// 2^k before it. No counter that all threads fight for; with two threads, one store and one load each.
struct Team::Shared {
  Shared(int threads, int cpus)
      : slots(new Slot[size_t(threads)]), size(threads), spin(threads > cpus ? std::chrono::microseconds(0) : kSpin) {}
  std::unique_ptr<Slot[]> slots;
  Counter counters[2];  // for_each phase p takes from counters[p % 2]
  const int size;
  const std::chrono::microseconds spin;  // none where the awaited thread may need this very core

  void signal(Slot& slot, int round, uint32_t number) {
    // Sequentially consistent, as are the two accesses in `sleep`: either we see that the other
    // sleeps, or it sees our signal before it does.
    slot.arrived[round].store(number, std::memory_order_seq_cst);
    if (slot.sleeping.load(std::memory_order_seq_cst)) {
      std::lock_guard<std::mutex> lock(slot.mutex);
      slot.wake.notify_one();
    }
  }

  static bool has_arrived(const Slot& slot, int round, uint32_t number, std::memory_order order) {
    return int32_t(slot.arrived[round].load(order) - number) >= 0;  // the other may be one barrier ahead
  }

  void wait(Slot& slot, int round, uint32_t number) {
    for (int i = 0; i < 64; ++i) {
      if (has_arrived(slot, round, number, std::memory_order_acquire)) return;
      pause();
    }
    const auto start = std::chrono::steady_clock::now();
    for (;;) {
      const auto waited = std::chrono::steady_clock::now() - start;
      for (int i = 0; i < 16; ++i) {
        if (has_arrived(slot, round, number, std::memory_order_acquire)) return;
        pause();
      }
      if (waited > kYield) return sleep(slot, round, number);
      if (waited > spin) std::this_thread::yield();
    }
  }

  void sleep(Slot& slot, int round, uint32_t number) {
    std::unique_lock<std::mutex> lock(slot.mutex);
    slot.sleeping.store(true, std::memory_order_seq_cst);
    while (!has_arrived(slot, round, number, std::memory_order_seq_cst)) slot.wake.wait(lock);
    slot.sleeping.store(false, std::memory_order_relaxed);
  }

  void barrier(int rank) {
    Slot& own = slots[size_t(rank)];
    const uint32_t number = ++own.barriers;
    for (int round = 0, step = 1; step < size; ++round, step *= 2) {
      signal(slots[size_t((rank + step) % size)], round, number);
      wait(own, round, number);
    }
  }
};

void Team::barrier() {
  if (size_ > 1) shared_->barrier(rank_);
}

int64_t Team::take(int64_t grain) {
  Counter& counter = shared_->counters[shared_->slots[size_t(rank_)].phases % 2];
  return counter.next.fetch_add(grain, std::memory_order_relaxed);
}

void Team::next_phase() {
  // The other counter was last used before the previous barrier and is next used after the coming one.
  const uint32_t phase = ++shared_->slots[size_t(rank_)].phases;
  if (rank_ == 0) shared_->counters[phase % 2].next.store(0, std::memory_order_relaxed);
}

struct ThreadPool::Impl {
  explicit Impl(int threads) : size(threads) {}

  int size;
  std::mutex run_mutex;  // one run at a time
  std::unique_ptr<Team::Shared> shared;
  std::vector<std::thread> workers;
  Fn fn = nullptr;
  void* ctx = nullptr;
  bool stopping = false;

  void work(int rank) {
    inside_run = true;
    Team team(shared.get(), rank, size);
    for (;;) {
      team.barrier();
      if (stopping) return;
      fn(ctx, team);
      team.barrier();
    }
  }

  // Threads exist from the first run on: a process that forks or only packs weights has none.
  void start() {
    const std::vector<int> cpus = allowed_cpus();
    shared = std::make_unique<Team::Shared>(size, int(cpus.size()));
    sigset_t all, before;  // signals are for the caller's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int rank = 1; rank < size; ++rank) {
      workers.emplace_back([this, rank] { work(rank); });
      if (int(cpus.size()) == size) pin(workers.back(), cpus[size_t(rank)]);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // Only when the pool has every CPU to itself: two pools that share a machine must not meet on the
  // same ones. The calling thread is never pinned: its children would inherit that.
  static void pin(std::thread& thread, int cpu) {
#ifdef __linux__
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CPU_SET(cpu, &mask);
    pthread_setaffinity_np(thread.native_handle(), sizeof(mask), &mask);
#else
    (void)thread, (void)cpu;
#endif
  }

  void stop() {
    if (workers.empty()) return;
    stopping = true;
    shared->barrier(0);
    for (std::thread& worker : workers) worker.join();
    workers.clear();
    stopping = false;
  }
};

// Never destroyed: at exit the workers may still sleep in it.
ThreadPool& ThreadPool::global() {
  static ThreadPool* pool = new ThreadPool;
  return *pool;
}

ThreadPool::ThreadPool() : impl_(new Impl(default_threads())) {
  // A forked child has none of the threads and perhaps a locked mutex: it starts afresh. The parent's
  // part is left as it is, its threads' stacks refer to it.
  pthread_atfork(nullptr, nullptr, [] {
    ThreadPool& pool = global();
    pool.impl_ = new Impl(pool.impl_->size);
    inside_run = false;
  });
}

ThreadPool::~ThreadPool() {
  impl_->stop();
  delete impl_;
}

int ThreadPool::size() const { return impl_->size; }

void ThreadPool::resize(int threads) {
  if (threads < 1 || threads > kMaxThreads)
    throw std::invalid_argument("num_threads must be between 1 and " + std::to_string(kMaxThreads) + ", got " +
                                std::to_string(threads));
  std::lock_guard<std::mutex> lock(impl_->run_mutex);
  if (threads == impl_->size) return;
  impl_->stop();
  impl_->shared.reset();
  impl_->size = threads;
}

void ThreadPool::run(Fn fn, void* ctx) {
  Impl& impl = *impl_;
  if (inside_run) {  // from within a team: this thread alone
    Team alone(nullptr, 0, 1);
    return fn(ctx, alone);
  }
  std::lock_guard<std::mutex> lock(impl.run_mutex);
  if (impl.size > 1 && impl.workers.empty()) impl.start();
  impl.fn = fn;
  impl.ctx = ctx;
  Team team(impl.shared.get(), 0, impl.size);
  inside_run = true;
  team.barrier();
  fn(ctx, team);
  team.barrier();
  inside_run = false;
}

}  // namespace outrider
