// How fast the device kernels are, each against what the machine can do at most: memory traffic
// against a copy's, arithmetic against the multiprocessors' fp32 rate. Shapes of mamba-130m.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "server/base/check.h"
#include "server/kernels/cuda/causal_conv1d.h"
#include "server/kernels/cuda/device.h"
#include "server/kernels/cuda/gemm.h"
#include "server/kernels/cuda/hidden_attention.h"
#include "server/kernels/cuda/rms_norm.h"
#include "server/kernels/cuda/selective_scan.h"
#include "server/kernels/cuda/ssd_scan.h"

namespace mambascope::kernels::cuda {
namespace {

constexpr int64_t kTokens = 1024, kModel = 768, kInner = 1536, kState = 16, kRank = 48;
constexpr int64_t kVocabulary = 50280;

void Check(const absl::Status& status) {
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  MS_CHECK(status.ok());
}

class Bench {
 public:
  Bench() : stream_(*Stream::Create()) {
    Check(UseDevice(0));
    cudaEventCreate(&begin_);
    cudaEventCreate(&end_);
  }

  // Microseconds of one run: the median of 9 rounds of as many runs as take a millisecond or more.
  double Time(const std::function<absl::Status()>& run) {
    for (int i = 0; i < 3; ++i) Check(run());
    int count = 1;
    while (Round(run, count) < 1000 && count < 10000) count *= 2;
    std::vector<double> rounds;
    for (int i = 0; i < 9; ++i) rounds.push_back(Round(run, count) / count);
    std::nth_element(rounds.begin(), rounds.begin() + 4, rounds.end());
    return rounds[4];
  }

  // Random values in [low, high), made on the host once and copied.
  DeviceArray<float> Numbers(int64_t size, float low = -1, float high = 1) {
    std::vector<float> host(size);
    uint32_t bits = 12345;
    for (float& v : host) {
      bits = bits * 1664525u + 1013904223u;
      v = low + (high - low) * static_cast<float>(bits >> 8) / 16777216.0f;
    }
    auto array = DeviceArray<float>::Create(size);
    Check(array.status());
    Check(array->CopyFrom(host.data(), size, stream()));
    Check(stream_.Wait());
    return *std::move(array);
  }
  template <typename T>
  DeviceArray<T> Values(const std::vector<T>& host) {
    auto array = DeviceArray<T>::Create(static_cast<int64_t>(host.size()));
    Check(array.status());
    Check(array->CopyFrom(host.data(), array->size(), stream()));
    Check(stream_.Wait());
    return *std::move(array);
  }
  template <typename T>
  DeviceArray<T> Space(int64_t size) {
    auto array = DeviceArray<T>::Create(size);
    Check(array.status());
    Check(array->Zero(stream()));
    return *std::move(array);
  }

  void Row(const char* name, double us, double bytes, double flops) {
    const double memory = bytes / copy_bytes_per_us, arithmetic = flops / flops_per_us;
    const double limit = std::max(memory, arithmetic);
    std::printf("%-46s %10.1f us %8.0f GB/s %8.2f TFLOP/s  %5.1f %% of %s\n", name, us,
                bytes / us / 1e3, flops / us / 1e6, 100 * limit / us,
                memory > arithmetic ? "memory" : "fp32");
  }
  cudaStream_t stream() { return stream_.get(); }

  double copy_bytes_per_us = 1, flops_per_us = 1;

 private:
  double Round(const std::function<absl::Status()>& run, int count) {
    cudaEventRecord(begin_, stream());
    for (int i = 0; i < count; ++i) Check(run());
    cudaEventRecord(end_, stream());
    Check(stream_.Wait());
    float ms = 0;
    cudaEventElapsedTime(&ms, begin_, end_);
    return ms * 1e3;
  }
  Stream stream_;
  cudaEvent_t begin_, end_;
};

void Ceilings(Bench& bench) {
  const DeviceInfo info = *GetDeviceInfo(0);
  constexpr int64_t kBytes = int64_t{2} << 30;
  auto from = bench.Space<char>(kBytes), to = bench.Space<char>(kBytes);
  const double us = bench.Time([&] {
    return ToStatus(
        cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, bench.stream()),
        "copy");
  });
  bench.copy_bytes_per_us = 2.0 * kBytes / us;
  int khz = 0;
  cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0);
  bench.flops_per_us = 2.0 * 128 * info.multiprocessors * khz / 1e3;
  std::printf(
      "%s, sm_%d%d, %d multiprocessors: copies move %.0f GB/s; fp32 %.1f TFLOP/s at %d MHz\n",
      info.name.c_str(), info.major, info.minor, info.multiprocessors,
      bench.copy_bytes_per_us / 1e3, bench.flops_per_us / 1e6, khz / 1000);
}

struct Sequences {
  Sequences(Bench& bench, int64_t count, int64_t tokens, int64_t state_size)
      : states(bench.Space<float>(count * state_size)) {
    std::vector<int32_t> starts = {0};
    std::vector<float*> list;
    for (int64_t s = 0; s < count; ++s) {
      starts.push_back(starts.back() + static_cast<int32_t>(tokens));
      list.push_back(states.data() + s * state_size);
    }
    seq_start = bench.Values(starts);
    pointers = bench.Values(list);
  }
  DeviceArray<float> states;
  DeviceArray<int32_t> seq_start;
  DeviceArray<float*> pointers;
};

void SelectiveScans(Bench& bench) {
  for (const auto& [count, length] : {std::pair{1, 1024}, std::pair{8, 1024}, std::pair{64, 1}}) {
    const int64_t tokens = int64_t{count} * length, stride = kRank + 2 * kState;
    const auto x = bench.Numbers(tokens * kInner), dt = bench.Numbers(tokens * kInner, -6, 0);
    const auto z = bench.Numbers(tokens * 2 * kInner), A = bench.Numbers(kState * kInner, -16, -1);
    const auto rBC = bench.Numbers(tokens * stride), D = bench.Numbers(kInner);
    auto gated = bench.Space<float>(tokens * kInner);
    const Sequences sequences(bench, count, length, kState * kInner);
    ScanInputs in;
    in.d_inner = kInner;
    in.d_state = kState;
    in.x = x.data();
    in.dt = dt.data();
    in.z = z.data();
    in.z_stride = 2 * kInner;
    in.A = A.data();
    in.B = rBC.data() + kRank;
    in.C = in.B + kState;
    in.bc_stride = stride;
    in.D = D.data();
    in.sequences = count;
    in.seq_start = sequences.seq_start.data();
    const ScanOutputs out{gated.data(), nullptr, nullptr, sequences.pointers.data()};
    const double us = bench.Time([&] { return SelectiveScan(in, out, bench.stream()); });
    const double states = double(count) * kState * kInner * 8, rows = 4.0 * tokens * kInner * 4;
    bench.Row((std::to_string(count) + " x " + std::to_string(length) + " tokens: selective scan")
                  .c_str(),
              us, rows + states, 12.0 * tokens * kInner * kState);

    const auto weight = bench.Numbers(kInner * 4), bias = bench.Numbers(kInner);
    const Sequences windows(bench, count, length, 3 * kInner);
    ConvInputs conv;
    conv.x_in = z.data();
    conv.x_stride = 2 * kInner;
    conv.channels = kInner;
    conv.taps = 4;
    conv.weight = weight.data();
    conv.bias = bias.data();
    conv.sequences = count;
    conv.tokens = tokens;
    conv.seq_start = windows.seq_start.data();
    const double conv_us = bench.Time([&] {
      return CausalConv1d(conv, {gated.data(), windows.pointers.data()}, bench.stream());
    });
    bench.Row("  causal conv1d", conv_us, 2.0 * tokens * kInner * 4 + count * 3.0 * kInner * 12,
              30.0 * tokens * kInner);

    auto h = bench.Numbers(tokens * kModel), u = bench.Space<float>(tokens * kModel);
    const auto add = bench.Numbers(tokens * kModel), w = bench.Numbers(kModel);
    const double norm_us = bench.Time([&] {
      return AddRmsNorm(add.data(), w.data(), 1e-5f, tokens, kModel, h.data(), u.data(),
                        bench.stream());
    });
    bench.Row("  residual add and RMS norm", norm_us, 4.0 * tokens * kModel * 4,
              5.0 * tokens * kModel);
  }
}

void SsdScans(Bench& bench) {
  constexpr int64_t kHeads = 24, kDim = 64, kStates = 128, kStride = kInner + 2 * kStates;
  for (const auto& [count, length] : {std::pair{1, 1024}, std::pair{64, 1}}) {
    const int64_t tokens = int64_t{count} * length;
    const auto xBC = bench.Numbers(tokens * kStride), dt = bench.Numbers(tokens * kHeads, -6, 0);
    const auto z = bench.Numbers(tokens * kInner), A = bench.Numbers(kHeads, -16, -1);
    const auto D = bench.Numbers(kHeads), dt_bias = bench.Numbers(kHeads);
    auto gated = bench.Space<float>(tokens * kInner);
    const Sequences sequences(bench, count, length, kInner * kStates);
    SsdInputs in;
    in.heads = kHeads;
    in.head_dim = kDim;
    in.d_state = kStates;
    in.x = xBC.data();
    in.B = in.x + kInner;
    in.C = in.B + kStates;
    in.xbc_stride = kStride;
    in.dt = dt.data();
    in.dt_stride = kHeads;
    in.dt_bias = dt_bias.data();
    in.A = A.data();
    in.D = D.data();
    in.z = z.data();
    in.z_stride = kInner;
    in.sequences = count;
    in.seq_start = sequences.seq_start.data();
    const SsdOutputs out{gated.data(), nullptr, sequences.pointers.data()};
    const double us = bench.Time([&] { return SsdScan(in, out, bench.stream()); });
    bench.Row(
        (std::to_string(count) + " x " + std::to_string(length) + " tokens: SSD scan").c_str(), us,
        3.0 * tokens * kInner * 4 + double(count) * kInner * kStates * 8,
        5.0 * tokens * kInner * kStates);
  }
}

void Gemms(Bench& bench) {
  auto gemm = Gemm::Create();
  Check(gemm.status());
  constexpr struct {
    const char* name;
    int64_t N, K;
  } kWeights[] = {{"in_proj", 2 * kInner, kModel},
                  {"out_proj", kModel, kInner},
                  {"x_proj", kRank + 2 * kState, kInner},
                  {"dt_proj", kInner, kRank},
                  {"head", kVocabulary, kModel}};
  for (const auto& [name, N, K] : kWeights) {
    const auto w = bench.Numbers(N * K);
    for (const ElementType type : {ElementType::kF32, ElementType::kBF16}) {
      const WeightMatrix weight(w.data(), type, N, K, K);  // as bf16, the same bytes read anew
      for (const int64_t rows : {int64_t{1}, int64_t{64}, kTokens}) {
        if (N == kVocabulary && rows == kTokens) continue;
        const int64_t covered = Gemm::RowsCovered(rows);
        const auto x = bench.Numbers(covered * K);
        auto y = bench.Space<float>(covered * N);
        auto scratch = bench.Space<char>(Gemm::LinearScratchBytes(weight, rows));
        const double us = bench.Time([&] {
          return gemm->Linear(x.data(), K, rows, weight, nullptr, y.data(), N, scratch.data(),
                              bench.stream());
        });
        const double bytes =
            double(N) * K * (type == ElementType::kF32 ? 4 : 2) + 4.0 * rows * (N + K);
        bench.Row((std::string(name) + (type == ElementType::kF32 ? " fp32, " : " bf16, ") +
                   std::to_string(rows) + " rows")
                      .c_str(),
                  us, bytes, 2.0 * rows * N * K);
      }
    }
  }
}

void Maps(Bench& bench) {
  auto gemm = Gemm::Create();
  Check(gemm.status());
  const auto delta = bench.Numbers(kTokens * kInner, 0.001f, 0.1f);
  const auto A = bench.Numbers(kState * kInner, -16, -1), BC = bench.Numbers(kTokens * 2 * kState);
  ScanParameters scan;
  scan.tokens = kTokens;
  scan.d_inner = kInner;
  scan.d_state = kState;
  scan.delta = delta.data();
  scan.A = A.data();
  scan.B = BC.data();
  scan.C = BC.data() + kState;
  scan.bc_stride = 2 * kState;
  auto scratch = bench.Space<char>(MeanMapScratchBytes(scan));
  auto map = bench.Space<float>(kTokens * kTokens), rows = bench.Space<float>(kTokens * kInner);
  auto v = bench.Space<float>(kTokens);
  double us =
      bench.Time([&] { return MeanMap(*gemm, scan, scratch.data(), map.data(), bench.stream()); });
  bench.Row("mean map of a layer, 1024 tokens", us, 4.0 * kTokens * kTokens,
            1.0 * kTokens * kTokens * kInner * kState);
  us =
      bench.Time([&] { return TargetRows(scan, kTokens - 1, false, rows.data(), bench.stream()); });
  bench.Row("target rows of a layer, 1024 tokens", us, 8.0 * kTokens * kInner,
            12.0 * kTokens * kInner * kState);
  us = bench.Time(
      [&] { return MeanAdjoint(scan, v.data(), rows.data(), v.data(), bench.stream()); });
  bench.Row("a rollout row's layer, 1024 tokens", us, 16.0 * kTokens * kInner,
            12.0 * kTokens * kInner * kState);
}

int Main() {
  if (DeviceCount() == 0) {
    std::puts("no GPU");
    return 0;
  }
  Bench bench;
  Ceilings(bench);
  SelectiveScans(bench);
  SsdScans(bench);
  Gemms(bench);
  Maps(bench);
  return 0;
}

}  // namespace
}  // namespace mambascope::kernels::cuda

int main() { return mambascope::kernels::cuda::Main(); }
