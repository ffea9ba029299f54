#include "server/kernels/gemm.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/kernels/gemm_parts.h"
#include "tests/support/reference_kernels.h"

namespace mambascope::kernels {
namespace {

using reference::Close;
using reference::OnEveryTarget;
using reference::Random;
using reference::SameBits;

struct Layer {
  int64_t M, N, K;
  std::vector<float> x, w, bias;
};

Layer RandomLayer(int64_t M, int64_t N, int64_t K) {
  return {M, N, K, Random(M * K, 1), Random(N * K, 2), Random(N, 3)};
}

ConstMatrix View(const std::vector<float>& m, int64_t rows, int64_t cols) {
  return {m.data(), rows, cols, cols};
}

// Weights in bf16 and the same in fp32, in rows of `stride`, one element off any wider alignment.
struct Bf16Weights {
  Bf16Weights(int64_t N, int64_t K, int64_t stride)
      : N(N), K(K), stride(stride), narrow(N * stride + 1), wide(N * stride + 1) {
    const std::vector<float> numbers = Random(N * stride + 1, 2);
    for (size_t i = 0; i < narrow.size(); ++i) {
      narrow[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(numbers[i]) >> 16);
      wide[i] = std::bit_cast<float>(uint32_t{narrow[i]} << 16);
    }
  }
  WeightMatrix Narrow() const { return {narrow.data() + 1, ElementType::kBF16, N, K, stride}; }
  ConstMatrix Wide() const { return {wide.data() + 1, N, K, stride}; }

  int64_t N, K, stride;
  std::vector<uint16_t> narrow;
  std::vector<float> wide;
};

// Rows [begin, end) of the layer's output.
std::vector<float> Output(ThreadPool& pool, const Layer& layer, int64_t begin, int64_t end) {
  std::vector<float> y((end - begin) * layer.N, std::nanf(""));
  Linear(pool, {layer.x.data() + begin * layer.K, end - begin, layer.K, layer.K},
         View(layer.w, layer.N, layer.K), layer.bias.data(),
         {y.data(), end - begin, layer.N, layer.N});
  return y;
}
std::vector<float> Output(ThreadPool& pool, const Layer& layer) {
  return Output(pool, layer, 0, layer.M);
}

// Around BLIS's block lengths (256; 384, at the end up to 480), registers and multiples of nothing.
constexpr int64_t kLengths[] = {1,   3,   4,   5,   48,  255, 256, 257,
                                384, 385, 479, 480, 481, 513, 777, 1537};

TEST(Linear, EqualsTheSum) {
  ThreadPool pool(2);
  for (const int64_t M : {1, 2, 5, 16, 17, 72, 73, 112, 113}) {
    for (const int64_t N : {1, 15, 16, 17, 33, 100}) {
      for (const int64_t K : {1, 3, 48, 300, 777}) {
        SCOPED_TRACE(testing::Message() << M << " x " << N << " x " << K);
        const Layer layer = RandomLayer(M, N, K);
        EXPECT_TRUE(
            Close(Output(pool, layer), reference::Linear(layer.x, layer.w, layer.bias, M, N, K)));
      }
    }
  }
}

TEST(Linear, TakesRowsOutOfWiderOnesAndLeavesTheirRestAlone) {
  ThreadPool pool(2);
  const int64_t N = 37, K = 50, pad = 3;
  for (const int64_t M : {1, 4, 30}) {
    const std::vector<float> x = Random(M * (K + pad), 1), w = Random(N * (K + pad), 2);
    std::vector<float> y(M * (N + pad), 7.0f);
    Linear(pool, {x.data(), M, K, K + pad}, {w.data(), N, K, K + pad}, nullptr,
           {y.data(), M, N, N + pad});
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t n = 0; n < N; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < K; ++k) sum += double{x[m * (K + pad) + k]} * w[n * (K + pad) + k];
        EXPECT_NEAR(y[m * (N + pad) + n], sum, 1e-5);
      }
      for (int64_t n = N; n < N + pad; ++n) EXPECT_EQ(y[m * (N + pad) + n], 7.0f);
    }
  }
}

TEST(Linear, ARowHasTheBitsItHasAmongAnyOthers) {
  ThreadPool pool(2);
  for (const int64_t K : kLengths) {
    for (const int64_t N : {1, 15, 17, 50}) {
      const Layer layer = RandomLayer(160, N, K);
      const std::vector<float> all = Output(pool, layer);
      for (int64_t begin = 0, rows = 1; begin + rows <= 160; begin += rows, ++rows) {
        ASSERT_TRUE(SameBits(Output(pool, layer, begin, begin + rows),
                             std::span(all).subspan(begin * N, rows * N)))
            << rows << " rows, N " << N << ", K " << K;
      }
    }
  }
}

TEST(Linear, TheThreadCountChangesNoBit) {
  ThreadPool one(1);
  for (const int64_t M : {1, 7, 17, 72, 73, 112, 113, 200}) {
    for (const int64_t N : {16, 40, 250}) {
      const Layer layer = RandomLayer(M, N, /*K=*/400);
      const std::vector<float> expected = Output(one, layer);
      for (const int threads : {2, 3, 5, 16}) {
        ThreadPool pool(threads);
        ASSERT_TRUE(SameBits(Output(pool, layer), expected))
            << M << " x " << N << " on " << threads << " threads";
      }
    }
  }
}

TEST(Linear, Bf16WeightsGiveTheBitsOfTheSameWeightsInFp32) {
  ThreadPool one(1), two(2);
  for (const int64_t K : {1, 7, 9, 48, 255, 260, 481, 777, 1537}) {
    for (const int64_t N : {1, 15, 16, 33, 75, 250}) {
      for (const int64_t pad : {0, 5}) {
        const Bf16Weights w(N, K, K + pad);
        const std::vector<float> x = Random(200 * K, 1), bias = Random(N, 3);
        std::vector<float> expected(200 * N);
        Linear(one, View(x, 200, K), w.Wide(), bias.data(), {expected.data(), 200, N, N});
        for (const int64_t M : {1, 2, 3, 5, 8, 9, 16, 17, 33, 72, 73, 113, 130, 192, 193}) {
          for (ThreadPool* pool : {&one, &two}) {
            std::vector<float> y(M * N, std::nanf(""));
            Linear(*pool, View(x, M, K), w.Narrow(), bias.data(), {y.data(), M, N, N});
            ASSERT_TRUE(SameBits(y, std::span(expected).first(M * N)))
                << M << " x " << N << " x " << K << " on " << pool->threads() << " threads";
          }
        }
      }
    }
  }
}

TEST(Linear, Bf16WeightsOfManyRangesGiveTheBitsOfTheSameWeightsInFp32) {
  ThreadPool pool(2);
  const int64_t M = 200, N = 1000, K = 2500;  // more than is widened at once
  const Bf16Weights w(N, K, K);
  const std::vector<float> x = Random(M * K, 1);
  std::vector<float> expected(M * N), y(M * N, std::nanf(""));
  Linear(pool, View(x, M, K), w.Wide(), nullptr, {expected.data(), M, N, N});
  Linear(pool, View(x, M, K), w.Narrow(), nullptr, {y.data(), M, N, N});
  EXPECT_TRUE(SameBits(y, expected));
}

TEST(WidenRow, GivesTheRowExactly) {
  const Bf16Weights w(/*N=*/5, /*K=*/37, /*stride=*/40);
  for (const WeightMatrix& weights : {w.Narrow(), WeightMatrix(w.Wide())}) {
    for (int64_t row = 0; row < w.N; ++row) {
      std::vector<float> out(w.K);
      WidenRow(weights, row, out.data());
      EXPECT_TRUE(SameBits(out, std::span(w.wide).subspan(1 + row * w.stride, w.K)));
    }
  }
}

TEST(Linear, OfNoRowsWritesNothing) {
  ThreadPool pool(2);
  EXPECT_TRUE(Output(pool, RandomLayer(0, 20, 30)).empty());
}

void ExpectFewRowsToHaveTheBitsOfBlis() {
  for (const int64_t K : kLengths) {
    for (const int64_t N : {16, 17, 31, 33, 75}) {
      const int64_t M = kFewRowsLimit + 1;
      const std::vector<float> x = Random(M * K, 1);
      const Bf16Weights w(N, K, K);
      std::vector<float> expected(M * N);
      BlisLinear(View(x, M, K), w.Wide(), {expected.data(), M, N, N});
      for (int64_t rows = 1; rows < M; rows += rows < 20 ? 1 : 19) {
        for (const WeightMatrix& weights : {WeightMatrix(w.Wide()), w.Narrow()}) {
          std::vector<float> actual(rows * N, std::nanf(""));
          const int64_t middle = N / 2 / kFewestColumns * kFewestColumns;  // as if on two threads
          for (const auto& [begin, end] : {std::pair{int64_t{0}, middle}, std::pair{middle, N}}) {
            FewRowsLinear(View(x, rows, K), weights, nullptr, begin, end,
                          {actual.data(), rows, N, N});
          }
          ASSERT_TRUE(SameBits(actual, std::span(expected).first(rows * N)))
              << rows << " rows, N " << N << ", K " << K;
        }
      }
    }
  }
}

// Around the tiles (32 x 12, 16 x 6) and the rows packed at a time (480 and 3072, 168 and 4080).
void ExpectPackedGemmToHaveTheBitsOfBlis() {
  std::vector<std::tuple<int64_t, int64_t, int64_t>> sizes = {
      {1, 1, 1}, {500, 3, 300}, {3, 500, 300}, {3100, 5, 3}, {5, 4100, 3}};
  for (const int64_t K : kLengths) {
    for (const int64_t N : {1, 16, 31, 80, 100}) {
      for (const int64_t M : {1, 6, 11, 12, 28, 65}) sizes.emplace_back(M, N, K);
    }
  }
  for (const auto& [M, N, K] : sizes) {
    const int64_t pad = M % 2 * 3;
    const std::vector<float> x = Random(M * (K + pad), 1), before = Random(M * (N + pad), 3);
    const Bf16Weights w(N, K, K + pad);
    for (const bool accumulate : {false, true}) {
      std::vector<float> expected = before;
      BlisGemm({x.data(), M, K, K + pad}, w.Wide(), accumulate ? 1.0f : 0.0f,
               {expected.data(), M, N, N + pad});
      for (const WeightMatrix& weights : {WeightMatrix(w.Wide()), w.Narrow()}) {
        std::vector<float> actual = before;
        ASSERT_TRUE(PackedGemm({x.data(), M, K, K + pad}, weights, accumulate,
                               {actual.data(), M, N, N + pad}));
        ASSERT_TRUE(SameBits(actual, expected)) << M << " x " << N << " x " << K;
      }
    }
  }
}

TEST(FewRows, HaveTheBitsOfBlisOnEveryTargetThatFusesMultiplyAdd) {
  int64_t fused = 0;
  OnEveryTarget([&] {
    if (!FewRowsHaveTheBitsOfBlis()) return;
    ++fused;
    ExpectFewRowsToHaveTheBitsOfBlis();
  });
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  EXPECT_GE(fused, (avx2 ? 1 : 0) + (__builtin_cpu_supports("avx512bw") ? 1 : 0));
#endif
}

#if defined(__x86_64__)
// BLIS reads BLIS_ARCH_TYPE once in a process, so each choice gets one of its own.
TEST(GemmDeathTest, OurKernelsHaveTheBitsOfBlisWithItsAvx2KernelsToo) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) GTEST_SKIP();
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  setenv("BLIS_ARCH_TYPE", "3", /*overwrite=*/1);  // haswell in Debian's BLIS 0.9
  EXPECT_EXIT(
      {
        ThreadPool pool(1);
        if (CheckGemm(pool).implementation.find("haswell") == std::string::npos) std::exit(2);
        if (!FewRowsHaveTheBitsOfBlis()) std::exit(3);
        ExpectFewRowsToHaveTheBitsOfBlis();
        if (!PackedGemmHasTheBitsOfBlis()) std::exit(5);
        ExpectPackedGemmToHaveTheBitsOfBlis();
        std::exit(testing::Test::HasFailure() ? 4 : 0);
      },
      testing::ExitedWithCode(0), "");
  unsetenv("BLIS_ARCH_TYPE");
}

TEST(LinearDeathTest, StaysRowInvariantWhereTheOrderOfBlisCannotBeFollowed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  setenv("BLIS_ARCH_TYPE", "5", /*overwrite=*/1);  // penryn: no fused multiply-add
  EXPECT_EXIT(
      {
        ThreadPool pool(2);
        const GemmReport report = CheckGemm(pool);
        if (report.implementation.find("few rows too") == std::string::npos) std::exit(2);
        std::exit(report.row_invariant ? 0 : 3);
      },
      testing::ExitedWithCode(0), "");
  unsetenv("BLIS_ARCH_TYPE");
}
#endif

TEST(PackedGemm, HasTheBitsOfBlisOnEveryTarget) {
  OnEveryTarget([] {
    EXPECT_TRUE(PackedGemmHasTheBitsOfBlis());
    ExpectPackedGemmToHaveTheBitsOfBlis();
  });
}

TEST(GemmBlock, AddsToWhatIsThereOrReplacesIt) {
  const int64_t M = 33, N = 21, K = 70;
  const Layer layer = RandomLayer(M, N, K);
  const std::vector<double> product = reference::Linear(layer.x, layer.w, {}, M, N, K);
  std::vector<float> c(M * N, std::nanf(""));
  GemmBlock(View(layer.x, M, K), View(layer.w, N, K), /*accumulate=*/false, {c.data(), M, N, N});
  EXPECT_TRUE(Close(c, product));
  GemmBlock(View(layer.x, M, K), View(layer.w, N, K), /*accumulate=*/true, {c.data(), M, N, N});
  std::vector<double> twice = product;
  for (double& v : twice) v *= 2;
  EXPECT_TRUE(Close(c, twice));
}

// BLIS keeps its packing buffers in a pool of its own, shared by all threads of the process.
TEST(GemmBlock, HasTheSameBitsOnManyThreadsAtOnce) {
  std::vector<Layer> layers;
  std::vector<std::vector<float>> expected;
  for (const auto& [M, N, K] :
       {std::tuple{5, 7, 11}, {64, 64, 64}, {100, 33, 500}, {17, 200, 481}, {1, 300, 769}}) {
    layers.push_back(RandomLayer(M, N, K));
    expected.emplace_back(M * N);
    GemmBlock(View(layers.back().x, M, K), View(layers.back().w, N, K), false,
              {expected.back().data(), M, N, N});
  }
  std::vector<std::thread> threads;
  std::vector<int> wrong(8);
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 60; ++i) {
        const size_t which = (i + t) % layers.size();
        const Layer& layer = layers[which];
        std::vector<float> c(expected[which].size());
        GemmBlock(View(layer.x, layer.M, layer.K), View(layer.w, layer.N, layer.K), false,
                  {c.data(), layer.M, layer.N, layer.N});
        wrong[t] += !SameBits(c, expected[which]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(8));
}

TEST(Linear, HasTheSameBitsFromSeveralPoolsAtOnce) {
  const Layer layer = RandomLayer(60, 150, 500);
  ThreadPool one(1);
  const std::vector<float> expected = Output(one, layer);
  std::vector<std::thread> callers;
  std::vector<int> wrong(3);
  for (int t = 0; t < 3; ++t) {
    callers.emplace_back([&, t] {
      ThreadPool pool(2 + t);
      for (int i = 0; i < 20; ++i) {
        const int64_t begin = (7 * i) % 50, end = begin + 1 + (5 * i + t) % 10;
        wrong[t] += !SameBits(Output(pool, layer, begin, end),
                              std::span(expected).subspan(begin * 150, (end - begin) * 150));
        wrong[t] += !SameBits(Output(pool, layer), expected);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, std::vector<int>(3));
}

TEST(CheckGemm, FindsRowsInvariantHere) {
  ThreadPool pool(2);
  const GemmReport report = CheckGemm(pool);
  EXPECT_TRUE(report.row_invariant);
  EXPECT_GT(report.gflops, 0);
  EXPECT_EQ(report.implementation.substr(0, 4), "BLIS");
  RecordProperty("implementation", report.implementation);
}

}  // namespace
}  // namespace mambascope::kernels
