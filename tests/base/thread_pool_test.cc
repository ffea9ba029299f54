#include "server/base/thread_pool.h"

#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace mambascope {
namespace {

TEST(ThreadPool, RunsEveryTaskOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (const int64_t tasks : {0, 1, 2, 3, 7, 1000}) {
      std::vector<std::atomic<int>> runs(tasks);
      pool.Run(tasks, [&](int64_t task) { runs[task].fetch_add(1); });
      for (int64_t task = 0; task < tasks; ++task) {
        ASSERT_EQ(runs[task].load(), 1) << "task " << task << " of " << tasks;
      }
    }
  }
}

TEST(ThreadPool, ShowsTheCallerWhatTheTasksWrote) {
  ThreadPool pool(4);
  std::vector<int> written(64);  // not atomic: Run itself must order the accesses
  for (int round = 1; round <= 2000; ++round) {
    pool.Run(64, [&](int64_t task) { written[task] += 1; });
    for (const int value : written) ASSERT_EQ(value, round);
  }
}

TEST(ThreadPool, ComputesOnTheCallerAloneWhenThereIsOneThreadOrOneTask) {
  const std::thread::id caller = std::this_thread::get_id();
  ThreadPool one(1), four(4);
  one.Run(10, [&](int64_t) { EXPECT_EQ(std::this_thread::get_id(), caller); });
  four.Run(1, [&](int64_t) { EXPECT_EQ(std::this_thread::get_id(), caller); });
}

TEST(ThreadPool, ClampsTheThreadCount) {
  EXPECT_EQ(ThreadPool(0).threads(), 1);
  EXPECT_EQ(ThreadPool(-5).threads(), 1);
  EXPECT_EQ(ThreadPool(3).threads(), 3);
}

TEST(ThreadPool, ServesSeveralCallersOneAfterTheOther) {
  ThreadPool pool(3);
  int64_t all = 0;  // not atomic: only one call's only writer is ever inside
  std::atomic<int> busy{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        pool.Run(5, [&](int64_t task) {
          EXPECT_LE(busy.fetch_add(1) + 1, 3);
          if (task == 2) ++all;
          busy.fetch_sub(1);
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(all, 4 * 200);
}

TEST(ThreadPool, SplitCoversTheRangeOnceWithInnerBordersAtMultiples) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (const int64_t count : {0, 1, 15, 16, 17, 31, 100, 1000}) {
      for (const int64_t multiple : {1, 16, 64}) {
        std::vector<std::atomic<int>> visits(count);
        std::atomic<int> ranges{0};
        pool.Split(count, multiple, [&](int64_t begin, int64_t end) {
          ranges.fetch_add(1);
          EXPECT_LT(begin, end);
          EXPECT_EQ(begin % multiple, 0);
          EXPECT_TRUE(end % multiple == 0 || end == count);
          for (int64_t i = begin; i < end; ++i) visits[i].fetch_add(1);
        });
        EXPECT_LE(ranges.load(), threads);
        for (const std::atomic<int>& visit : visits) ASSERT_EQ(visit.load(), 1);
      }
    }
  }
}

TEST(ThreadPool, ComesAndGoesWithoutEverRunning) {
  for (int i = 0; i < 50; ++i) ThreadPool pool(4);
}

TEST(ThreadPool, WakesThreadsThatWentToSleep) {
  ThreadPool pool(3);
  std::atomic<int> runs{0};
  for (int i = 0; i < 5; ++i) {
    // Far past the workers' spinning on any machine that is not stopped; when it is not, the test
    // still holds.
    for (int j = 0; j < 20000; ++j) std::this_thread::yield();
    pool.Run(9, [&](int64_t) { runs.fetch_add(1); });
  }
  EXPECT_EQ(runs.load(), 45);
}

#if defined(__SSE2__)
TEST(ThreadPool, FlushesSubnormalsToZeroInsideARunAndNowhereElse) {
  volatile float smallest = std::numeric_limits<float>::min();
  const auto half = [&] { return smallest * 0.5f; };
  ASSERT_NE(half(), 0.0f);
  ThreadPool pool(3);
  std::atomic<int> kept{0};
  pool.Run(50, [&](int64_t) { kept.fetch_add(half() != 0.0f); });
  pool.Run(1, [&](int64_t) { kept.fetch_add(half() != 0.0f); });
  EXPECT_EQ(kept.load(), 0);
  EXPECT_NE(half(), 0.0f);
}
#endif

}  // namespace
}  // namespace mambascope
