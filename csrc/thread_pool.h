// The threads that run a step, kept hot from op to op.
//
// A step enters the pool once (`run`); inside it every op is called by every thread of the
// team with the same arguments, and divides its own work with `for_each`. Which thread
// computes an item never changes the item's value.
#pragma once

#include <atomic>
#include <cstdint>

namespace outrider {

class Team;

class ThreadPool {
 public:
  static ThreadPool& global();
  int size() const;           // threads that take part, the caller included
  void resize(int threads);   // not during run

  // Calls fn(ctx, team) on every thread and returns when all have returned.
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
  // served, as fn(begin, end); ends with a barrier. A single-thread team runs in place.
  template <class F>
  void for_each(int64_t num_items, int64_t grain, F&& fn);

  struct Shared;  // counters and barrier state, one per pool
  Team(Shared* shared, int rank, int size) : shared_(shared), rank_(rank), size_(size) {}

 private:
  int64_t take(int64_t grain);  // next run of the current for_each
  void next_phase();            // called by all, before the barrier that ends a for_each
  Shared* shared_;
  int rank_, size_;
};

template <class F>
void Team::for_each(int64_t num_items, int64_t grain, F&& fn) {
  if (size_ == 1) {
    if (num_items > 0) fn(int64_t{0}, num_items);
    return;
  }
  for (;;) {
    const int64_t begin = take(grain);
    if (begin >= num_items) break;
    fn(begin, begin + grain < num_items ? begin + grain : num_items);
  }
  next_phase();
  barrier();
}

// Runs a callable on all threads.
template <class F>
void run_team(F&& fn) {
  ThreadPool::global().run([](void* ctx, Team& team) { (*static_cast<F*>(ctx))(team); }, &fn);
}

}  // namespace outrider
