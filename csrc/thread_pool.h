// The threads that run a step, kept hot from op to op.
//
// A step enters the pool once (`run`); inside it every op is called by every thread of the
// team with the same arguments, and divides its own work with `for_each`. Which thread
// computes an item never changes the item's value.
//
// Nobody waits for a thread that has no work in hand: a phase (one for_each) is over when its
// items are done, and a thread that the machine kept from running skips what the others did
// without it. So between phases a thread may run behind the others, and there, outside of the
// functions given to for_each, it may read only what no phase of the run changes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

namespace outrider {

class Team;

class ThreadPool {
 public:
  static ThreadPool& global();
  int size() const;           // threads that take part, the caller included
  void resize(int threads);   // not during run

  // Calls fn(ctx, team) on the calling thread and on every other that comes in time, and returns when all
  // that came have returned.
  using Fn = void (*)(void* ctx, Team& team);
  void run(Fn fn, void* ctx);

 private:
  ThreadPool();
  ~ThreadPool();
  struct Impl;
  Impl* impl_;
};

class Team {
 public:
  int rank() const { return rank_; }
  int size() const { return size_; }

  // All threads wait here for each other. Spins for a bounded time, then yields, then sleeps.
  void barrier();

  // Collective. Items [0, num_items) are handed out in runs of `grain`, first come first
  // served, as fn(begin, end); returns when all are done. A single-thread team runs in place.
  template <class F>
  void for_each(int64_t num_items, int64_t grain, F&& fn);

  // The same, but each thread first takes its own of `size()` equal shares, in order, and then helps the
  // others with theirs: fn(begin, end, limit), where the thread will probably go on as far as `limit`.
  template <class F>
  void for_each_share(int64_t num_items, int64_t grain, F&& fn);
  // Where the share of this thread begins.
  int64_t share_begin(int64_t num_items) const { return num_items * rank_ / size_; }

  struct Shared;  // counters and barrier state, one per pool
  Team(Shared* shared, int rank, int size) : shared_(shared), rank_(rank), size_(size) {}

 private:
  int64_t take(int share, int64_t count, int64_t grain);  // the next run of a share of this phase; -1: none left
  void finish(int64_t num_items, int64_t done);           // waits for the phase; `done` by this thread
  Shared* shared_;
  int rank_, size_;
};

template <class F>
void Team::for_each(int64_t num_items, int64_t grain, F&& fn) {
  if (num_items <= 0) return;
  if (size_ == 1) return fn(int64_t{0}, num_items);
  int64_t done = 0;
  for (int64_t begin; (begin = take(0, num_items, grain)) >= 0;) {
    const int64_t end = std::min(begin + grain, num_items);
    fn(begin, end);
    done += end - begin;
  }
  finish(num_items, done);
}

template <class F>
void Team::for_each_share(int64_t num_items, int64_t grain, F&& fn) {
  if (num_items <= 0) return;
  if (size_ == 1) {
    for (int64_t begin = 0; begin < num_items; begin += grain)
      fn(begin, std::min(begin + grain, num_items), num_items);
    return;
  }
  int64_t done = 0;
  for (int i = 0; i < size_; ++i) {
    const int share = (rank_ + i) % size_;
    const int64_t first = num_items * share / size_, count = num_items * (share + 1) / size_ - first;
    for (int64_t begin; (begin = take(share, count, grain)) >= 0;) {
      const int64_t end = std::min(begin + grain, count);
      fn(first + begin, first + end, first + (i == 0 ? count : end));
      done += end - begin;
    }
  }
  finish(num_items, done);
}

// Runs a callable on all threads.
template <class F>
void run_team(F&& fn) {
  using Callable = std::remove_reference_t<F>;
  ThreadPool::global().run([](void* ctx, Team& team) { (*static_cast<Callable*>(ctx))(team); }, &fn);
}

}  // namespace outrider
