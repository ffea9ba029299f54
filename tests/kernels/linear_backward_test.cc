#include "server/kernels/linear_backward.h"

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <tuple>
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

// Weights [N, K] in bf16 and the same in fp32, in rows of `stride`, one element off any wider
// alignment; and the transpose [K, N] of the latter, dense.
struct Weights {
  Weights(int64_t N, int64_t K, int64_t stride)
      : N(N), K(K), stride(stride), narrow(N * stride + 1), wide(N * stride + 1), turned(K * N) {
    const std::vector<float> numbers = Random(N * stride + 1, 2);
    for (size_t i = 0; i < narrow.size(); ++i) {
      narrow[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(numbers[i]) >> 16);
      wide[i] = std::bit_cast<float>(uint32_t{narrow[i]} << 16);
    }
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t k = 0; k < K; ++k) turned[k * N + n] = wide[1 + n * stride + k];
    }
  }
  WeightMatrix Narrow() const { return {narrow.data() + 1, ElementType::kBF16, N, K, stride}; }
  ConstMatrix Wide() const { return {wide.data() + 1, N, K, stride}; }
  ConstMatrix Turned() const { return {turned.data(), K, N, N}; }

  int64_t N, K, stride;
  std::vector<uint16_t> narrow;
  std::vector<float> wide, turned;
};

// dx of dy's rows [begin, end); dy dense.
std::vector<float> Gradient(ThreadPool& pool, const std::vector<float>& dy, WeightMatrix w,
                            int64_t begin, int64_t end) {
  std::vector<float> dx((end - begin) * w.cols, std::nanf(""));
  LinearTransposed(pool, {dy.data() + begin * w.rows, end - begin, w.rows, w.rows}, w,
                   /*accumulate=*/false, {dx.data(), end - begin, w.cols, w.cols});
  return dx;
}

TEST(LinearTransposed, EqualsTheSumAndAddsItToWhatIsThere) {
  ThreadPool pool(2);
  for (const int64_t M : {1, 2, 5, 16, 17, 33, 73, 112, 113}) {
    for (const int64_t K : {1, 15, 16, 17, 33, 48, 100}) {
      for (const int64_t N : {1, 3, 48, 300, 777}) {
        SCOPED_TRACE(testing::Message() << M << " x " << N << " x " << K);
        const Weights w(N, K, K);
        const std::vector<float> dy = Random(M * N, 1), before = Random(M * K, 3);
        std::vector<double> expected = reference::Linear(dy, w.turned, {}, M, K, N);
        EXPECT_TRUE(Close(Gradient(pool, dy, w.Wide(), 0, M), expected));
        EXPECT_TRUE(Close(Gradient(pool, dy, w.Narrow(), 0, M), expected));
        std::vector<float> sum = before;
        LinearTransposed(pool, {dy.data(), M, N, N}, w.Wide(), /*accumulate=*/true,
                         {sum.data(), M, K, K});
        for (int64_t i = 0; i < M * K; ++i) expected[i] += before[i];
        EXPECT_TRUE(Close(sum, expected));
      }
    }
  }
}

TEST(LinearTransposed, IsTheGradientOfLinear) {
  ThreadPool pool(1);
  const int64_t M = 3, N = 40, K = 21;
  const Weights w(N, K, K);
  const std::vector<float> dy = Random(M * N, 1), x = Random(M * K, 4), v = Random(M * K, 5);
  const auto loss = [&](double step) {  // dy . y(x + step v)
    double sum = 0;
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t n = 0; n < N; ++n) {
        for (int64_t k = 0; k < K; ++k) {
          sum += dy[m * N + n] * (x[m * K + k] + step * v[m * K + k]) * w.wide[1 + n * K + k];
        }
      }
    }
    return sum;
  };
  const std::vector<float> dx = Gradient(pool, dy, w.Wide(), 0, M);
  double slope = 0;
  for (int64_t i = 0; i < M * K; ++i) slope += double{dx[i]} * v[i];
  EXPECT_NEAR(slope, (loss(0.5) - loss(-0.5)), 1e-4);
}

TEST(LinearTransposed, HasTheBitsOfLinearOfTheTransposedMatrix) {
  ThreadPool pool(2);
  for (const int64_t N : {1, 7, 255, 257, 384, 385, 480, 481, 777, 1537}) {
    for (const int64_t K : {16, 31, 48, 100}) {
      const Weights w(N, K, K + 3);
      const std::vector<float> dy = Random(130 * N, 1);
      for (const int64_t M : {1, 3, 9, 33, 72, 73, 130}) {
        std::vector<float> expected(M * K);
        Linear(pool, {dy.data(), M, N, N}, w.Turned(), nullptr, {expected.data(), M, K, K});
        ASSERT_TRUE(SameBits(Gradient(pool, dy, w.Wide(), 0, M), expected))
            << M << " x " << N << " x " << K;
        ASSERT_TRUE(SameBits(Gradient(pool, dy, w.Narrow(), 0, M), expected))
            << "bf16, " << M << " x " << N << " x " << K;
      }
    }
  }
}

TEST(LinearTransposed, TakesRowsOutOfWiderOnesAndLeavesTheirRestAlone) {
  ThreadPool pool(2);
  const int64_t N = 50, K = 37, pad = 3;
  const Weights w(N, K, K + pad);
  for (const int64_t M : {1, 4, 30, 130}) {
    const std::vector<float> dy = Random(M * (N + pad), 1);
    std::vector<float> dx(M * (K + pad), 7.0f);
    LinearTransposed(pool, {dy.data(), M, N, N + pad}, w.Wide(), /*accumulate=*/false,
                     {dx.data(), M, K, K + pad});
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t k = 0; k < K; ++k) {
        double sum = 0;
        for (int64_t n = 0; n < N; ++n) sum += double{dy[m * (N + pad) + n]} * w.turned[k * N + n];
        EXPECT_NEAR(dx[m * (K + pad) + k], sum, 1e-5);
      }
      for (int64_t k = K; k < K + pad; ++k) EXPECT_EQ(dx[m * (K + pad) + k], 7.0f);
    }
  }
}

TEST(LinearTransposed, ARowHasTheBitsItHasAmongAnyOthersAndOnAnyThreads) {
  ThreadPool one(1), two(2), five(5);
  for (const int64_t N : {80, 400, 1000}) {
    for (const int64_t K : {1, 15, 48, 250}) {
      const Weights w(N, K, K);
      const std::vector<float> dy = Random(160 * N, 1);
      const std::vector<float> all = Gradient(one, dy, w.Narrow(), 0, 160);
      ASSERT_TRUE(SameBits(Gradient(two, dy, w.Narrow(), 0, 160), all));
      ASSERT_TRUE(SameBits(Gradient(five, dy, w.Narrow(), 0, 160), all));
      for (int64_t begin = 0, rows = 1; begin + rows <= 160; begin += rows, ++rows) {
        for (ThreadPool* pool : {&one, &two, &five}) {
          ASSERT_TRUE(SameBits(Gradient(*pool, dy, w.Wide(), begin, begin + rows),
                               std::span(all).subspan(begin * K, rows * K)))
              << rows << " rows, N " << N << ", K " << K;
        }
      }
    }
  }
}

TEST(LinearTransposed, OfNothingWritesNothingOrZeros) {
  ThreadPool pool(2);
  const Weights w(20, 30, 30);
  EXPECT_TRUE(Gradient(pool, {}, w.Wide(), 0, 0).empty());
  for (const int64_t M : {2, 100}) {
    EXPECT_EQ(Gradient(pool, Random(1, 1), WeightMatrix(w.wide.data(), 0, 30, 30), 0, M),
              std::vector<float>(M * 30, 0.0f));
  }
}

// Around the tiles and the blocks that are packed, as for PackedGemm (gemm_test.cc).
void ExpectEachWayToHaveTheBitsOfBlis() {
  const bool fused = FewRowsHaveTheBitsOfBlis();
  std::vector<std::tuple<int64_t, int64_t, int64_t>> sizes = {
      {1, 1, 1}, {500, 300, 3}, {3, 300, 500}, {3100, 3, 5}, {5, 3, 4100}};
  for (const int64_t N : {1, 3, 48, 255, 384, 385, 480, 481, 513, 777}) {
    for (const int64_t K : {1, 31, 100, 131, 200}) {
      for (const int64_t M : {1, 3, 6, 11, 12, 28, 65}) sizes.emplace_back(M, N, K);
    }
  }
  for (const auto& [M, N, K] : sizes) {
    const int64_t pad = M % 2 * 3;
    const std::vector<float> dy = Random(M * (N + pad), 1), before = Random(M * (K + pad), 3);
    const Weights w(N, K, K + pad);
    for (const bool accumulate : {false, true}) {
      std::vector<float> expected = before;
      BlisGemm({dy.data(), M, N, N + pad}, w.Turned(), accumulate ? 1.0f : 0.0f,
               {expected.data(), M, K, K + pad});
      for (const WeightMatrix& weights : {WeightMatrix(w.Wide()), w.Narrow()}) {
        std::vector<float> packed = before, blis = before;
        ASSERT_TRUE(PackedTransposed({dy.data(), M, N, N + pad}, weights, accumulate,
                                     {packed.data(), M, K, K + pad}));
        ASSERT_TRUE(SameBits(packed, expected)) << M << " x " << N << " x " << K;
        BlisTransposed({dy.data(), M, N, N + pad}, weights, accumulate,
                       {blis.data(), M, K, K + pad});
        ASSERT_TRUE(SameBits(blis, expected)) << M << " x " << N << " x " << K;
        std::vector<float> few = before;
        if (!fused) continue;
        ASSERT_TRUE(FewRowsTransposed({dy.data(), M, N, N + pad}, weights, accumulate,
                                      {few.data(), M, K, K + pad}));
        ASSERT_TRUE(SameBits(few, expected)) << M << " x " << N << " x " << K;
      }
    }
  }
}

TEST(LinearTransposed, HasTheBitsOfBlisEachWayOnEveryTarget) {
  OnEveryTarget([] { ExpectEachWayToHaveTheBitsOfBlis(); });
}

#if defined(__x86_64__)
// BLIS reads BLIS_ARCH_TYPE once in a process, so each choice gets one of its own.
void ExpectToHoldWithArchitecture(const char* type, const char* name) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  setenv("BLIS_ARCH_TYPE", type, /*overwrite=*/1);
  EXPECT_EXIT(
      {
        if (BlisName().find(name) == std::string::npos) std::exit(2);
        ExpectEachWayToHaveTheBitsOfBlis();
        ThreadPool pool(2);
        const Weights w(500, 100, 100);
        const std::vector<float> dy = Random(150 * 500, 1);
        const std::vector<float> all = Gradient(pool, dy, w.Wide(), 0, 150);
        for (int64_t begin = 0, rows = 1; begin + rows <= 150; begin += rows, ++rows) {
          EXPECT_TRUE(SameBits(Gradient(pool, dy, w.Narrow(), begin, begin + rows),
                               std::span(all).subspan(begin * 100, rows * 100)));
        }
        std::exit(testing::Test::HasFailure() ? 4 : 0);
      },
      testing::ExitedWithCode(0), "");
  unsetenv("BLIS_ARCH_TYPE");
}

TEST(LinearTransposedDeathTest, HoldsWithTheAvx2KernelsOfBlis) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) GTEST_SKIP();
  ExpectToHoldWithArchitecture("3", "haswell");
}

TEST(LinearTransposedDeathTest, HoldsWhereTheOrderOfBlisCannotBeFollowed) {
  ExpectToHoldWithArchitecture("5", "penryn");  // no fused multiply-add
}
#endif

}  // namespace
}  // namespace mambascope::kernels
