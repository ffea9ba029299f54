// Hidden attention at the shape of mamba-130m, beside the GEMM rate of the same run
// (performance.md, P4 and P5). Arguments: tokens, threads.
#include <cstdint>
#include <vector>

#include "benchmark/benchmark.h"
#include "server/kernels/gemm.h"
#include "server/kernels/hidden_attention.h"
#include "server/kernels/row_block.h"
#include "tests/support/reference_attention.h"

namespace mambascope::kernels {
namespace {

constexpr int64_t kChannels = 1536, kStates = 16;

void SetGflops(benchmark::State& state, double multiply_adds) {
  state.counters["GFLOP/s"] =
      benchmark::Counter(2e-9 * multiply_adds * state.iterations(), benchmark::Counter::kIsRate);
}

// What the maps are measured against: in_proj of the same model and length.
void Gemm(benchmark::State& state) {
  const int64_t tokens = state.range(0), rows = 2 * kChannels, depth = kChannels / 2;
  ThreadPool pool(state.range(1));
  const std::vector<float> x(tokens * depth, 0.5f), w(rows * depth, 0.25f);
  std::vector<float> y(tokens * rows);
  for (auto _ : state) {
    Linear(pool, {x.data(), tokens, depth, depth}, {w.data(), rows, depth, depth}, nullptr,
           {y.data(), tokens, rows, rows});
  }
  SetGflops(state, double(tokens) * rows * depth);
}

// `call(pool, scan, out)`; work in multiply-adds for each channel and state.
template <class Call>
void Measure(benchmark::State& state, double work, int64_t out_size, const Call& call) {
  ThreadPool pool(state.range(1));
  const reference::RandomScan random(state.range(0), kChannels, kStates, 1, 1e-3f, 1e-1f);
  std::vector<float> out(out_size);
  for (auto _ : state) call(pool, random.parameters, out.data());
  SetGflops(state, work * kChannels * kStates);
}

void MeanMapBench(benchmark::State& state) {
  const int64_t L = state.range(0);
  Measure(state, L * L / 2, L * L,
          [](auto& pool, auto& scan, float* out) { MeanMap(pool, scan, out); });
}
void AbsMeanMapBench(benchmark::State& state) {
  const int64_t L = state.range(0);
  Measure(state, L * L / 2, L * L,
          [](auto& pool, auto& scan, float* out) { AbsMeanMap(pool, scan, out); });
}
void ChannelMassBench(benchmark::State& state) {
  const int64_t L = state.range(0);
  Measure(state, L * L / 2, kChannels,
          [](auto& pool, auto& scan, float* out) { ChannelMass(pool, scan, out); });
}
void TargetRowsBench(benchmark::State& state) {
  const int64_t L = state.range(0);
  Measure(state, L, L * kChannels,
          [L](auto& pool, auto& scan, float* out) { TargetRows(pool, scan, L - 1, false, out); });
}
// The last rows of the map: work of one row each, to hold against TargetRows.
void TargetRowBlockBench(benchmark::State& state) {
  const int64_t L = state.range(0), rows = kMostRowsInBlock;
  Measure(state, L * rows, rows * L * kChannels, [&](auto& pool, auto& scan, float* out) {
    TargetRowBlock(pool, scan, L - rows, rows, out);
  });
}
void MeanAdjointBench(benchmark::State& state) {
  const int64_t L = state.range(0);
  const std::vector<float> v(L, 1.0f);
  Measure(state, L, L,
          [&](auto& pool, auto& scan, float* out) { MeanAdjoint(pool, scan, {}, v.data(), out); });
}
void MeanForwardBench(benchmark::State& state) {
  const int64_t L = state.range(0);
  const std::vector<float> v(L, 1.0f);
  Measure(state, L, L,
          [&](auto& pool, auto& scan, float* out) { MeanForward(pool, scan, {}, v.data(), out); });
}

void Maps(benchmark::internal::Benchmark* b) {
  b->ArgsProduct({{512, 1024}, {1, 2}})->Unit(benchmark::kMillisecond)->UseRealTime();
}
void Scans(benchmark::internal::Benchmark* b) {
  b->ArgsProduct({{1024, 4096, 16384}, {1, 2}})->Unit(benchmark::kMillisecond)->UseRealTime();
}

BENCHMARK(Gemm)->Apply(Maps);
BENCHMARK(MeanMapBench)->Name("MeanMap")->Apply(Maps);
BENCHMARK(AbsMeanMapBench)->Name("AbsMeanMap")->Apply(Maps);
BENCHMARK(ChannelMassBench)->Name("ChannelMass")->Apply(Maps);
BENCHMARK(TargetRowsBench)->Name("TargetRows")->Apply(Scans);
BENCHMARK(TargetRowBlockBench)
    ->Name("TargetRowBlock")
    ->ArgsProduct({{512, 1024}, {1, 2}})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK(MeanAdjointBench)->Name("MeanAdjoint")->Apply(Scans);
BENCHMARK(MeanForwardBench)->Name("MeanForward")->Apply(Scans);

}  // namespace
}  // namespace mambascope::kernels

BENCHMARK_MAIN();
