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

// Where threads wait: a while awake, then asleep.
class Waiting {
 public:
  explicit Waiting(std::chrono::microseconds spin) : spin_(spin) {}

  // Returns when ready(order) holds, a predicate over atomics that it reads in the given memory order.
  template <class Ready>
  void until(Ready&& ready) {
    for (int i = 0; i < 64; ++i) {
      if (ready(std::memory_order_acquire)) return;
      pause();
    }
    const auto start = std::chrono::steady_clock::now();
    for (;;) {
      const auto waited = std::chrono::steady_clock::now() - start;
      for (int i = 0; i < 16; ++i) {
        if (ready(std::memory_order_acquire)) return;
        pause();
      }
      if (waited > kYield) return sleep(ready);
      if (waited > spin_) std::this_thread::yield();
    }
  }

  // To be called after a sequentially consistent store that makes someone ready: then either we see here
  // that it sleeps, or it saw the store before it did.
  void wake() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }

 private:
  template <class Ready>
  void sleep(Ready& ready) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (!ready(std::memory_order_seq_cst)) wake_.wait(lock);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

  const std::chrono::microseconds spin_;
  alignas(128) std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// What belongs to one thread.
struct alignas(128) Slot {
  std::atomic<uint32_t> arrived[kMaxRounds] = {};  // the last barrier whose round k was signalled to it
  uint32_t barriers = 0;                           // owner only: barriers passed
  uint32_t phase = 0;                              // owner only: the phase it is in
};

// How much of a thread's share is taken: the phase in the upper half, items in the lower.
struct alignas(128) Share {
  std::atomic<uint64_t> taken{0};
};

struct Team::Shared {
  Shared(int threads, int cpus)
      : slots(new Slot[size_t(threads)]), shares(new Share[size_t(threads)]), size(threads),
        // No spinning where the awaited thread may need this very core.
        waiting(threads > cpus ? std::chrono::microseconds(0) : kSpin) {}

  std::unique_ptr<Slot[]> slots;
  std::unique_ptr<Share[]> shares;
  const int size;
  Waiting waiting;
  alignas(128) std::atomic<int64_t> done{0};    // items of the current phase
  alignas(128) std::atomic<uint32_t> phase{0};  // the current one: all before are over

  static bool reached(const std::atomic<uint32_t>& counter, uint32_t number, std::memory_order order) {
    return int32_t(counter.load(order) - number) >= 0;
  }

  // A dissemination barrier: in round k a thread signals the one 2^k further on and waits for the one
  // 2^k before it. No counter that all threads fight for; with two threads, one store and one load each.
  void barrier(int rank) {
    Slot& own = slots[size_t(rank)];
    const uint32_t number = ++own.barriers;
    for (int round = 0, step = 1; step < size; ++round, step *= 2) {
      slots[size_t((rank + step) % size)].arrived[round].store(number, std::memory_order_seq_cst);
      waiting.wake();
      // The other may be one barrier ahead.
      waiting.until([&](std::memory_order order) { return reached(own.arrived[round], number, order); });
    }
  }

  void open_next_phase(uint32_t next) {
    done.store(0, std::memory_order_relaxed);
    for (int i = 0; i < size; ++i) shares[size_t(i)].taken.store(uint64_t(next) << 32, std::memory_order_relaxed);
    phase.store(next, std::memory_order_seq_cst);
    waiting.wake();
  }
};

void Team::barrier() {
  if (size_ > 1) shared_->barrier(rank_);
}

int64_t Team::take(int share, int64_t count, int64_t grain) {
  std::atomic<uint64_t>& taken = shared_->shares[size_t(share)].taken;
  const uint32_t phase = shared_->slots[size_t(rank_)].phase;
  uint64_t seen = taken.load(std::memory_order_relaxed);
  do {
    // Another phase: this one was finished without us.
    if (uint32_t(seen >> 32) != phase || int64_t(uint32_t(seen)) >= count) return -1;
  } while (!taken.compare_exchange_weak(seen, seen + uint64_t(grain), std::memory_order_relaxed));
  return int64_t(uint32_t(seen));
}

void Team::finish(int64_t num_items, int64_t done) {
  const uint32_t next = ++shared_->slots[size_t(rank_)].phase;
  if (done > 0 && shared_->done.fetch_add(done, std::memory_order_acq_rel) + done == num_items)
    return shared_->open_next_phase(next);
  shared_->waiting.until([&](std::memory_order order) { return Shared::reached(shared_->phase, next, order); });
}

// A run is open from the moment the caller starts it until it has come to its end itself. Workers that come
// while it is open take part; the caller waits for those.
struct ThreadPool::Impl {
  explicit Impl(int threads) : size(threads) {}

  static constexpr uint64_t kOpen = uint64_t(1) << 31, kInside = kOpen - 1;  // below: the number of workers inside

  int size;
  std::mutex run_mutex;  // one run at a time
  std::unique_ptr<Team::Shared> shared;
  std::vector<std::thread> workers;
  alignas(128) std::atomic<uint64_t> state{0};  // number of the run in the upper half, kOpen, workers inside
  Fn fn = nullptr;  // of the open run, as are the following
  void* ctx = nullptr;
  uint32_t first_phase = 0;
  bool stopping = false;

  void open() {
    first_phase = shared->phase.load(std::memory_order_relaxed);
    const uint64_t number = (state.load(std::memory_order_relaxed) >> 32) + 1;
    state.store(number << 32 | kOpen, std::memory_order_seq_cst);
    shared->waiting.wake();
  }

  void close() {
    state.fetch_and(~kOpen, std::memory_order_acq_rel);
    shared->waiting.until([&](std::memory_order order) { return (state.load(order) & kInside) == 0; });
  }

  // Waits for a run later than `last` and goes in; its number.
  uint64_t enter(uint64_t last) {
    uint64_t seen = 0;
    for (;;) {
      shared->waiting.until([&](std::memory_order order) {
        seen = state.load(order);
        return (seen & kOpen) && seen >> 32 != last;
      });
      if (state.compare_exchange_strong(seen, seen + 1, std::memory_order_acq_rel)) return seen >> 32;
    }
  }

  void leave() {
    state.fetch_sub(1, std::memory_order_seq_cst);
    shared->waiting.wake();
  }

  void work(int rank) {
    inside_run = true;
    Team team(shared.get(), rank, size);
    for (uint64_t number = 0;;) {
      number = enter(number);
      if (stopping) return;
      shared->slots[size_t(rank)].phase = first_phase;
      fn(ctx, team);
      leave();
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
    open();  // and never closed: every worker comes
    for (std::thread& worker : workers) worker.join();
    workers.clear();
    stopping = false;
    state = 0;
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
  Team team(impl.shared.get(), 0, impl.size);
  inside_run = true;
  if (impl.size == 1) {
    fn(ctx, team);
  } else {
    impl.fn = fn;
    impl.ctx = ctx;
    impl.open();
    impl.shared->slots[0].phase = impl.first_phase;
    fn(ctx, team);
    impl.close();
  }
  inside_run = false;
}

}  // namespace outrider
