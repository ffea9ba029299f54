#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace mambascope {

// The only threads that compute. Kernels split their work into tasks whose results do not depend
// on which thread runs them or on how many there are, so a thread count never changes a bit.
//
// Subnormal numbers are flushed to zero inside Run, on the caller too: products of many decays
// end there, and each operation on one costs a hundred others.
//
// Threads: Run may be called from several threads; calls are served one after the other, so that
// several callers never have more threads busy than the pool has.
class ThreadPool {
 public:
  // `threads` counts the calling thread: 1 computes on the caller alone. Clamped to [1, 1024].
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls run(task) for every task in [0, tasks) and returns when all are done. Tasks start in
  // order and should be of about equal size, a few for each thread. Must not be called from inside
  // a task.
  void Run(int64_t tasks, absl::FunctionRef<void(int64_t)> run);

  // Splits [0, count) into consecutive ranges whose inner borders are multiples of `multiple`, one
  // for each thread (fewer when there is little), and calls run(begin, end) for each.
  void Split(int64_t count, int64_t multiple, absl::FunctionRef<void(int64_t, int64_t)> run);

 private:
  void Work();

  std::mutex callers_;  // held for a whole Run

  std::mutex mu_;
  std::condition_variable wake_;
  std::atomic<uint64_t> round_{0};  // raised, under mu_, when a Run begins or the pool closes
  bool closing_ = false;            // guarded by mu_

  // Of the current Run: written before round_ is raised, read by workers after they saw it.
  const absl::FunctionRef<void(int64_t)>* run_ = nullptr;
  int64_t tasks_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<int> busy_{0};  // workers that have not finished the current round

  std::vector<std::thread> workers_;
};

}  // namespace mambascope
