// The scans backward at the sizes of mamba-130m and mamba2-130m; kernels_bench has the scans.
//   build/bin/scan_backward_bench [--benchmark_filter=Ssd] [--benchmark_repetitions=5]
#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <vector>

#include "server/base/thread_pool.h"
#include "server/kernels/scan_backward.h"
#include "server/kernels/ssd_backward.h"

namespace mambascope::kernels {
namespace {

using benchmark::State;

std::vector<float> Random(int64_t count, float low = -1, float high = 1) {
  std::minstd_rand bits(1);
  std::uniform_real_distribution<float> value(low, high);
  std::vector<float> numbers(count);
  for (float& number : numbers) number = value(bits);
  return numbers;
}

constexpr int64_t kDInner = 1536;

struct MambaScan {
  static constexpr int64_t kDState = 16, kStride = 48 + 2 * kDState;  // behind dt_rank
  int64_t tokens;
  std::vector<float> x = Random(tokens * kDInner), delta = Random(tokens * kDInner, 1e-3f, 0.1f);
  std::vector<float> A = Random(kDState * kDInner, -16, -1), bc = Random(tokens * kStride);
  std::vector<float> dx = Random(tokens * kDInner), ddelta = dx, dbc = bc;
  ScanParameters Parameters() const {
    return {tokens,   kDInner,        kDState,        delta.data(),
            A.data(), bc.data() + 48, bc.data() + 64, kStride};
  }
};

void ScanAdjoint(State& state) {
  MambaScan scan{state.range(0)};
  ThreadPool pool(static_cast<int>(state.range(1)));
  for (auto _ : state) {
    kernels::ScanAdjoint(pool, scan.Parameters(), scan.x.data(), scan.dx.data(), false);
    benchmark::ClobberMemory();
  }
}

void ScanBackward(State& state) {
  MambaScan scan{state.range(0)};
  ThreadPool pool(static_cast<int>(state.range(1)));
  float *dB = scan.dbc.data() + 48, *dC = dB + MambaScan::kDState;
  for (auto _ : state) {
    kernels::ScanBackward(pool, scan.Parameters(), scan.x.data(), scan.x.data(),
                          {scan.dx.data(), false, scan.ddelta.data(), dB, dC, MambaScan::kStride});
    benchmark::ClobberMemory();
  }
}

struct Mamba2Scan {
  static constexpr int64_t kHeads = 24, kDState = 128, kStride = kDInner + 2 * kDState;
  int64_t tokens;
  std::vector<float> xbc = Random(tokens * kStride), delta = Random(tokens * kHeads, 1e-3f, 0.1f);
  std::vector<float> A = Random(kHeads, -16, -1), dy = Random(tokens * kDInner);
  std::vector<float> dxbc = xbc, ddelta = delta;
  SsdBackwardInputs Inputs() const {
    const float* B = xbc.data() + kDInner;
    return {tokens,      kHeads,  kDInner / kHeads, 1,        kDState,  xbc.data(), B,
            B + kDState, kStride, delta.data(),     A.data(), dy.data()};
  }
};

void SsdAdjoint(State& state) {
  Mamba2Scan scan{state.range(0)};
  ThreadPool pool(static_cast<int>(state.range(1)));
  for (auto _ : state) {
    kernels::SsdAdjoint(pool, scan.Inputs(), scan.dxbc.data(), Mamba2Scan::kStride, false);
    benchmark::ClobberMemory();
  }
}

void SsdBackward(State& state) {
  Mamba2Scan scan{state.range(0)};
  ThreadPool pool(static_cast<int>(state.range(1)));
  float *dB = scan.dxbc.data() + kDInner, *dC = dB + Mamba2Scan::kDState;
  for (auto _ : state) {
    kernels::SsdBackward(
        pool, scan.Inputs(),
        {scan.dxbc.data(), false, dB, dC, Mamba2Scan::kStride, scan.ddelta.data()});
    benchmark::ClobberMemory();
  }
}

void Sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"tokens", "threads"})->Args({512, 1})->Args({1024, 1});
}

BENCHMARK(ScanAdjoint)->Apply(Sizes);
BENCHMARK(ScanBackward)->Apply(Sizes);
BENCHMARK(SsdAdjoint)->Apply(Sizes);
BENCHMARK(SsdBackward)->Apply(Sizes);

}  // namespace
}  // namespace mambascope::kernels

BENCHMARK_MAIN();
