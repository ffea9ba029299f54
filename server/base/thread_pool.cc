#include "server/base/thread_pool.h"

#include <algorithm>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace mambascope {
namespace {

// Between the kernels of one forward pass a worker waits microseconds; waking it through the
// kernel costs tens. It therefore looks this often before it sleeps (about 30 us).
constexpr int kSpins = 1000;

void Pause() {
#if defined(__SSE2__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

class ScopedFlushSubnormals {
 public:
#if defined(__SSE2__)
  ScopedFlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }  // FTZ, DAZ
  ~ScopedFlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

}  // namespace

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < std::clamp(threads, 1, 1024); ++i) workers_.emplace_back([this] { Work(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mu_);
    closing_ = true;
    round_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(int64_t tasks, absl::FunctionRef<void(int64_t)> run) {
  if (tasks <= 0) return;
  std::lock_guard one_at_a_time(callers_);
  const ScopedFlushSubnormals flush;
  if (workers_.empty() || tasks == 1) {
    for (int64_t task = 0; task < tasks; ++task) run(task);
    return;
  }
  run_ = &run;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  {
    std::lock_guard lock(mu_);
    round_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks;) run(task);
  for (int spins = 0; busy_.load(std::memory_order_acquire) > 0; ++spins) {
    spins < kSpins ? Pause() : std::this_thread::yield();
  }
}

void ThreadPool::Work() {
  const ScopedFlushSubnormals flush;
  for (uint64_t seen = 0;;) {
    for (int i = 0; i < kSpins && round_.load(std::memory_order_acquire) == seen; ++i) Pause();
    if (round_.load(std::memory_order_acquire) == seen) {
      std::unique_lock lock(mu_);
      wake_.wait(lock, [&] { return round_.load(std::memory_order_relaxed) != seen; });
    }
    {
      std::lock_guard lock(mu_);
      if (closing_) return;
    }
    ++seen;
    for (int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) {
      (*run_)(task);
    }
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

void ThreadPool::Split(int64_t count, int64_t multiple,
                       absl::FunctionRef<void(int64_t, int64_t)> run) {
  const int64_t units = (count + multiple - 1) / multiple;
  const int64_t parts = std::min<int64_t>(units, threads());
  if (parts <= 0) return;
  Run(parts, [&](int64_t part) {
    run(units * part / parts * multiple, std::min(units * (part + 1) / parts * multiple, count));
  });
}

}  // namespace mambascope
