// The kernels at the sizes of mamba-130m (d_model 768, d_inner 1536, d_state 16, dt_rank 48).
//   build/bin/kernels_bench [--benchmark_filter=Scan] [--benchmark_repetitions=5]
// Counters: FLOP/s counts a multiply-add as two; B/s counts each weight once; exp_ns is the time
// one exponential takes on all threads together. Argument `threads` is the pool's size.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "server/base/thread_pool.h"
#include "server/kernels/causal_conv1d.h"
#include "server/kernels/gemm.h"
#include "server/kernels/gemm_parts.h"
#include "server/kernels/linear_backward.h"
#include "server/kernels/rms_norm.h"
#include "server/kernels/selective_scan.h"
#include "server/kernels/ssd_map.h"
#include "server/kernels/ssd_scan.h"

namespace mambascope::kernels {
namespace {

using benchmark::Counter;
using benchmark::State;

std::vector<float> Random(int64_t count, float low = -1, float high = 1) {
  std::minstd_rand bits(1);
  std::uniform_real_distribution<float> value(low, high);
  std::vector<float> numbers(count);
  for (float& number : numbers) number = value(bits);
  return numbers;
}

constexpr int64_t kDModel = 768, kDInner = 1536, kDState = 16, kDtRank = 48;

// x w^T for M tokens, or the gradient of x. Weights of several layers, 200 MB, are used in turn, as
// in a decode: none is in a cache when its turn comes.
enum class Weights { kWarm, kCold };
enum class Way { kLinear, kTransposed, kPacked, kBlis };
template <typename T>
void Gemm(State& state, Weights place, Way way) {
  const int64_t M = state.range(0), N = state.range(1), K = state.range(2);
  ThreadPool pool(static_cast<int>(state.range(3)));
  const int64_t bytes = N * K * sizeof(T);
  const int64_t layers =
      place == Weights::kCold ? std::max<int64_t>(1, 200'000'000 / bytes) : int64_t{1};
  const std::vector<float> x = Random(M * K), numbers = Random(layers * bytes / sizeof(float));
  const ElementType type = sizeof(T) == 2 ? ElementType::kBF16 : ElementType::kF32;
  const T* w = reinterpret_cast<const T*>(numbers.data());
  std::vector<float> y(M * N), dx(M * K);
  int64_t layer = 0;
  for (auto _ : state) {
    const WeightMatrix weights{w + layer++ % layers * N * K, type, N, K, K};
    const ConstMatrix rows{x.data(), M, K, K};
    const Matrix out{y.data(), M, N, N};
    if (way == Way::kLinear) {
      Linear(pool, rows, weights, nullptr, out);
    } else if (way == Way::kTransposed) {
      LinearTransposed(pool, {y.data(), M, N, N}, weights, /*accumulate=*/false,
                       {dx.data(), M, K, K});
    } else if (way == Way::kPacked) {
      PackedGemm(rows, weights, /*accumulate=*/false, out);
    } else {
      BlisLinear(rows, weights, out);
    }
    benchmark::ClobberMemory();
  }
  const auto rate = Counter::kIsIterationInvariantRate;
  state.counters["FLOP/s"] = Counter(2.0 * M * N * K, rate);
  state.counters["B/s"] = Counter(static_cast<double>(bytes), rate, Counter::kIs1024);
}
void Linear(State& state) { Gemm<float>(state, Weights::kWarm, Way::kLinear); }
void LinearBf16(State& state) { Gemm<uint16_t>(state, Weights::kWarm, Way::kLinear); }
void LinearColdWeights(State& state) { Gemm<float>(state, Weights::kCold, Way::kLinear); }
void LinearColdBf16(State& state) { Gemm<uint16_t>(state, Weights::kCold, Way::kLinear); }
void TransposedColdWeights(State& state) { Gemm<float>(state, Weights::kCold, Way::kTransposed); }
void TransposedColdBf16(State& state) { Gemm<uint16_t>(state, Weights::kCold, Way::kTransposed); }
void BlisColdWeights(State& state) { Gemm<float>(state, Weights::kCold, Way::kBlis); }
void BlisColdBf16(State& state) { Gemm<uint16_t>(state, Weights::kCold, Way::kBlis); }
void PackedColdWeights(State& state) { Gemm<float>(state, Weights::kCold, Way::kPacked); }
void PackedColdBf16(State& state) { Gemm<uint16_t>(state, Weights::kCold, Way::kPacked); }

// How fast this machine reads memory at all: the limit of a decode.
void ReadMemory(State& state) {
  ThreadPool pool(static_cast<int>(state.range(0)));
  const std::vector<float> numbers = Random(50'000'000);
  std::vector<float> sums(64 * 16);
  for (auto _ : state) {
    pool.Split(static_cast<int64_t>(numbers.size()), 4096, [&](int64_t begin, int64_t end) {
      float sum[64] = {};
      for (int64_t i = begin; i + 64 <= end; i += 64) {
        for (int64_t lane = 0; lane < 64; ++lane) sum[lane] += numbers[i + lane];
      }
      for (float s : sum) sums[begin % 64] += s;
    });
    benchmark::ClobberMemory();
  }
  state.counters["B/s"] =
      Counter(4.0 * numbers.size(), Counter::kIsIterationInvariantRate, Counter::kIs1024);
}

void Scan(State& state) {
  const int64_t tokens = state.range(0), sequences = state.range(1), d_state = state.range(2);
  ThreadPool pool(static_cast<int>(state.range(3)));
  const int64_t all = tokens * sequences, bc_stride = kDtRank + 2 * d_state;
  const std::vector<float> x = Random(all * kDInner), dt = Random(all * kDInner, -6, 1);
  const std::vector<float> z = Random(all * 2 * kDInner), A = Random(d_state * kDInner, -16, -1);
  const std::vector<float> bc = Random(all * bc_stride), D = Random(kDInner);
  std::vector<float> gated(all * kDInner), ssm_state(sequences * d_state * kDInner);
  std::vector<int32_t> seq_start;
  std::vector<float*> states;
  for (int64_t s = 0; s <= sequences; ++s) seq_start.push_back(static_cast<int32_t>(s * tokens));
  for (int64_t s = 0; s < sequences; ++s) {
    states.push_back(ssm_state.data() + s * d_state * kDInner);
  }
  const ScanInputs in{.d_inner = kDInner,
                      .d_state = d_state,
                      .x = x.data(),
                      .dt = dt.data(),
                      .z = z.data() + kDInner,
                      .z_stride = 2 * kDInner,
                      .A = A.data(),
                      .B = bc.data() + kDtRank,
                      .C = bc.data() + kDtRank + d_state,
                      .bc_stride = bc_stride,
                      .D = D.data(),
                      .seq_start = seq_start};
  for (auto _ : state) {
    SelectiveScan(pool, in, {.gated = gated.data(), .y = nullptr, .ssm_state = states});
    benchmark::ClobberMemory();
  }
  state.counters["exp_ns"] = Counter(1e-9 * all * kDInner * d_state,
                                     Counter::kIsIterationInvariantRate | Counter::kInvert);
}

// mamba2-130m: 24 heads of 64 channels, one group, 128 states; d_inner is the same.
void SsdScan(State& state) {
  constexpr int64_t kHeads = 24, kHeadDim = 64, kStates = 128;
  constexpr int64_t kXbc = kDInner + 2 * kStates, kProjected = kDInner + kXbc + kHeads;
  const int64_t tokens = state.range(0), sequences = state.range(1), all = tokens * sequences;
  ThreadPool pool(static_cast<int>(state.range(2)));
  const std::vector<float> xbc = Random(all * kXbc), projected = Random(all * kProjected);
  const std::vector<float> dt_bias = Random(kHeads, -6, 1), A = Random(kHeads, -16, -1);
  const std::vector<float> D = Random(kHeads);
  const int64_t state_size = kStates * kDInner;
  std::vector<float> gated(all * kDInner), ssm_state(sequences * state_size);
  std::vector<int32_t> seq_start;
  std::vector<float*> states;
  for (int64_t s = 0; s <= sequences; ++s) seq_start.push_back(static_cast<int32_t>(s * tokens));
  for (int64_t s = 0; s < sequences; ++s) states.push_back(ssm_state.data() + s * state_size);
  SsdInputs in;
  in.heads = kHeads;
  in.head_dim = kHeadDim;
  in.d_state = kStates;
  in.x = xbc.data();
  in.B = xbc.data() + kDInner;
  in.C = xbc.data() + kDInner + kStates;
  in.xbc_stride = kXbc;
  in.z = projected.data();
  in.z_stride = kProjected;
  in.dt = projected.data() + kDInner + kXbc;
  in.dt_stride = kProjected;
  in.dt_bias = dt_bias.data();
  in.A = A.data();
  in.D = D.data();
  in.seq_start = seq_start;
  for (auto _ : state) {
    kernels::SsdScan(pool, in, {.gated = gated.data(), .y = nullptr, .ssm_state = states});
    benchmark::ClobberMemory();
  }
  // Three operations for each state and channel: decay and drive, their sum, and y.
  state.counters["updates/s"] =
      Counter(1.0 * all * kDInner * kStates, Counter::kIsIterationInvariantRate);
}

// The mean map of one layer of the same model.
void SsdMap(State& state) {
  constexpr int64_t kHeads = 24, kStates = 128;
  const int64_t tokens = state.range(0);
  ThreadPool pool(static_cast<int>(state.range(1)));
  const std::vector<float> delta = Random(tokens * kHeads, 1e-3f, 0.1f);
  const std::vector<float> A = Random(kHeads, -16, -1), bc = Random(tokens * 2 * kStates);
  std::vector<float> map(tokens * tokens);
  for (auto _ : state) {
    SsdMeanMap(pool,
               {.tokens = tokens,
                .heads = kHeads,
                .groups = 1,
                .d_state = kStates,
                .delta = delta.data(),
                .A = A.data(),
                .B = bc.data(),
                .C = bc.data() + kStates,
                .bc_stride = 2 * kStates},
               map.data());
    benchmark::ClobberMemory();
  }
  state.counters["FLOP/s"] =
      Counter(1.0 * tokens * tokens * (kStates + kHeads), Counter::kIsIterationInvariantRate);
}

void Conv(State& state) {
  const int64_t tokens = state.range(0);
  ThreadPool pool(static_cast<int>(state.range(1)));
  const std::vector<float> xz = Random(tokens * 2 * kDInner), weight = Random(4 * kDInner);
  const std::vector<float> bias = Random(kDInner);
  std::vector<float> x(tokens * kDInner), conv_state(3 * kDInner);
  const std::vector<int32_t> seq_start = {0, static_cast<int32_t>(tokens)};
  float* const states[] = {conv_state.data()};
  for (auto _ : state) {
    CausalConv1d(pool,
                 {.x_in = xz.data(),
                  .x_stride = 2 * kDInner,
                  .channels = kDInner,
                  .taps = 4,
                  .weight = weight.data(),
                  .bias = bias.data(),
                  .seq_start = seq_start},
                 {.x = x.data(), .conv_state = states});
    benchmark::ClobberMemory();
  }
  const auto rate = Counter::kIsIterationInvariantRate;
  state.counters["FLOP/s"] = Counter(8.0 * tokens * kDInner, rate);
  state.counters["B/s"] = Counter(8.0 * tokens * kDInner, rate, Counter::kIs1024);
}

void Norm(State& state) {
  const int64_t rows = state.range(0);
  ThreadPool pool(static_cast<int>(state.range(1)));
  const std::vector<float> h = Random(rows * kDModel), weight = Random(kDModel);
  std::vector<float> u(rows * kDModel);
  for (auto _ : state) {
    RmsNorm(pool, h.data(), weight.data(), 1e-5f, rows, kDModel, u.data());
    benchmark::ClobberMemory();
  }
  state.counters["B/s"] =
      Counter(8.0 * rows * kDModel, Counter::kIsIterationInvariantRate, Counter::kIs1024);
}

// A Run that computes nothing: what each kernel of a decoding step pays for its threads.
void EmptyRun(State& state) {
  ThreadPool pool(static_cast<int>(state.range(0)));
  for (auto _ : state) pool.Run(state.range(0), [](int64_t) {});
}

template <int64_t kThreads>
void PrefillSizes(benchmark::internal::Benchmark* bench) {
  for (const int64_t rows : {16, 24, 32, 48, 64, 128, 512, 1024}) {
    bench->Args({rows, 2 * kDInner, kDModel, kThreads});  // in_proj
  }
  bench->Args({1024, kDModel, kDInner, kThreads});                // out_proj
  bench->Args({1024, kDtRank + 2 * kDState, kDInner, kThreads});  // x_proj
  bench->Args({1024, kDInner, kDtRank, kThreads});                // dt_proj
}
template <int64_t kThreads>
void DecodeSizes(benchmark::internal::Benchmark* bench) {
  for (const int64_t rows : {1, 2, 4, 8, 16}) {
    bench->Args({rows, 2 * kDInner, kDModel, kThreads});
  }
  for (const int64_t rows : {1, 8}) {
    bench->Args({rows, kDModel, kDInner, kThreads});
    bench->Args({rows, kDtRank + 2 * kDState, kDInner, kThreads});
    bench->Args({rows, kDInner, kDtRank, kThreads});
    bench->Args({rows, 50280, kDModel, kThreads});  // the vocabulary head
  }
}
// Of one thread: where packing the weights for BLIS pays.
void ColdPrefillSizes(benchmark::internal::Benchmark* bench) {
  for (const int64_t rows : {16, 64, 96, 128, 256, 512, 1024}) {
    bench->Args({rows, 2 * kDInner, kDModel, 1});
  }
  bench->Args({512, kDModel, kDInner, 1});
}
template <int64_t kThreads>
void ScanSizes(benchmark::internal::Benchmark* bench) {
  for (const int64_t d_state : {8, 16, 64}) bench->Args({1024, 1, d_state, kThreads});
  bench->Args({64, 1, 16, kThreads});
  bench->Args({1, 1, 16, kThreads});
  bench->Args({1, 8, 16, kThreads});
}
template <int64_t kThreads>
void SsdSizes(benchmark::internal::Benchmark* bench) {
  bench->Args({512, 1, kThreads})->Args({1, 1, kThreads})->Args({1, 8, kThreads});
}
template <int64_t kThreads>
void TokenCounts(benchmark::internal::Benchmark* bench) {
  bench->Args({1, kThreads})->Args({1024, kThreads});
}

// Rates of one thread are of its CPU time, so that a busy machine disturbs them less. Those of two
// are of the wall clock: the caller's CPU time would leave out its waiting for the other thread, so
// on a busy machine they say little.
BENCHMARK(Linear)->Apply(PrefillSizes<1>)->ArgNames({"M", "N", "K", "threads"});
BENCHMARK(Linear)->Apply(PrefillSizes<2>)->ArgNames({"M", "N", "K", "threads"})->UseRealTime();
BENCHMARK(LinearColdWeights)->Apply(DecodeSizes<1>)->ArgNames({"M", "N", "K", "threads"});
BENCHMARK(LinearColdWeights)
    ->Apply(DecodeSizes<2>)
    ->ArgNames({"M", "N", "K", "threads"})
    ->UseRealTime();
BENCHMARK(LinearBf16)->Apply(PrefillSizes<1>)->ArgNames({"M", "N", "K", "threads"});
BENCHMARK(LinearColdBf16)->Apply(DecodeSizes<1>)->ArgNames({"M", "N", "K", "threads"});
BENCHMARK(LinearColdBf16)
    ->Apply(DecodeSizes<2>)
    ->ArgNames({"M", "N", "K", "threads"})
    ->UseRealTime();
BENCHMARK(BlisColdWeights)->Apply(ColdPrefillSizes)->ArgNames({"M", "N", "K", "threads"});
BENCHMARK(PackedColdWeights)->Apply(ColdPrefillSizes)->ArgNames({"M", "N", "K", "threads"});
BENCHMARK(TransposedColdWeights)->Apply(ColdPrefillSizes)->ArgNames({"M", "N", "K", "threads"});
BENCHMARK(TransposedColdBf16)->Apply(ColdPrefillSizes)->ArgNames({"M", "N", "K", "threads"});
BENCHMARK(BlisColdBf16)->Apply(ColdPrefillSizes)->ArgNames({"M", "N", "K", "threads"});
BENCHMARK(PackedColdBf16)->Apply(ColdPrefillSizes)->ArgNames({"M", "N", "K", "threads"});
BENCHMARK(ReadMemory)->Arg(1)->ArgName("threads");
BENCHMARK(ReadMemory)->Arg(2)->ArgName("threads")->UseRealTime();
BENCHMARK(Scan)->Apply(ScanSizes<1>)->ArgNames({"tokens", "sequences", "d_state", "threads"});
BENCHMARK(Scan)
    ->Apply(ScanSizes<2>)
    ->ArgNames({"tokens", "sequences", "d_state", "threads"})
    ->UseRealTime();
BENCHMARK(SsdScan)->Apply(SsdSizes<1>)->ArgNames({"tokens", "sequences", "threads"});
BENCHMARK(SsdScan)->Apply(SsdSizes<2>)->ArgNames({"tokens", "sequences", "threads"})->UseRealTime();
BENCHMARK(SsdMap)->Args({512, 1})->Args({1024, 1})->ArgNames({"tokens", "threads"});
BENCHMARK(Conv)->Apply(TokenCounts<1>)->ArgNames({"tokens", "threads"});
BENCHMARK(Conv)->Apply(TokenCounts<2>)->ArgNames({"tokens", "threads"})->UseRealTime();
BENCHMARK(Norm)->Apply(TokenCounts<1>)->ArgNames({"rows", "threads"});
BENCHMARK(Norm)->Apply(TokenCounts<2>)->ArgNames({"rows", "threads"})->UseRealTime();
BENCHMARK(EmptyRun)->Arg(1)->Arg(2)->ArgName("threads")->UseRealTime();

}  // namespace
}  // namespace mambascope::kernels

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  mambascope::ThreadPool pool(2);
  const auto report = mambascope::kernels::CheckGemm(pool);
  std::printf("%s, row-invariant: %s\n", report.implementation.c_str(),
              report.row_invariant ? "yes" : "NO");
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
