#include "server/kernels/ssd_map.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "server/kernels/hidden_attention.h"
#include "server/kernels/ssd_scan.h"
#include "tests/support/reference_kernels.h"

namespace mambascope::kernels {
namespace {

using reference::Close;
using reference::OnEveryTarget;
using reference::Random;
using reference::SameBits;

struct Shape {
  int64_t tokens, heads, groups, d_state;
};

// Around blocks of 64 columns and 128 rows.
const Shape kShapes[] = {{1, 1, 1, 1},    {2, 3, 1, 4},    {17, 6, 2, 5},  {63, 4, 1, 16},
                         {64, 5, 5, 3},   {65, 6, 3, 8},   {127, 2, 1, 7}, {129, 9, 3, 16},
                         {192, 24, 1, 9}, {257, 4, 2, 33}, {391, 2, 1, 3}, {30, 4, 1, 128}};

// B and C stand behind each other in rows that hold other numbers too: NaN, nobody may read them.
struct RandomHeads {
  std::vector<float> delta, A, bc;
  SsdMapInputs in;

  RandomHeads(const Shape& shape, uint32_t seed, float slowest = 1e-3f, float fastest = 0.5f) {
    const auto [tokens, heads, groups, d_state] = shape;
    delta = Random(tokens * heads, seed, std::log(slowest), std::log(fastest));
    for (float& step : delta) step = std::exp(step);
    A = Random(heads, seed + 1, -8, -0.1f);
    const int64_t size = groups * d_state, stride = 2 * size + 5;
    bc = Random(tokens * stride, seed + 2);
    for (int64_t i = 0; i < tokens; ++i) {
      bc[i * stride] = bc[i * stride + size + 1] = bc[i * stride + stride - 1] = std::nanf("");
    }
    in = {.tokens = tokens,
          .heads = heads,
          .groups = groups,
          .d_state = d_state,
          .delta = delta.data(),
          .A = A.data(),
          .B = bc.data() + 1,
          .C = bc.data() + size + 2,
          .bc_stride = stride};
  }
  RandomHeads(const RandomHeads&) = delete;
};

int64_t GroupOf(const SsdMapInputs& in, int64_t head) { return head / (in.heads / in.groups); }

// C[i, g, n] (prod_{k = j+1..i} exp(delta[k, h] A[h])) delta[j, h] B[j, g, n], in double.
double OfState(const SsdMapInputs& in, int64_t h, int64_t n, int64_t i, int64_t j) {
  if (j > i) return 0;
  double exponent = 0;
  for (int64_t k = j + 1; k <= i; ++k) exponent += double{in.delta[k * in.heads + h]} * in.A[h];
  const int64_t at = GroupOf(in, h) * in.d_state + n;
  return std::exp(exponent) * in.delta[j * in.heads + h] * in.C[i * in.bc_stride + at] *
         in.B[j * in.bc_stride + at];
}

std::vector<double> HeadMap(const SsdMapInputs& in, int64_t h) {
  const int64_t L = in.tokens, first = GroupOf(in, h) * in.d_state;
  std::vector<double> alpha(L * L);
  for (int64_t j = 0; j < L; ++j) {
    double share = in.delta[j * in.heads + h];
    for (int64_t i = j; i < L; ++i) {
      if (i > j) share *= std::exp(double{in.delta[i * in.heads + h]} * in.A[h]);
      const float *C = in.C + i * in.bc_stride + first, *B = in.B + j * in.bc_stride + first;
      alpha[i * L + j] = share * std::inner_product(C, C + in.d_state, B, 0.0);
    }
  }
  return alpha;
}

std::vector<double> Mean(const SsdMapInputs& in, bool absolute) {
  std::vector<double> mean(in.tokens * in.tokens);
  for (int64_t h = 0; h < in.heads; ++h) {
    const std::vector<double> alpha = HeadMap(in, h);
    for (size_t i = 0; i < mean.size(); ++i) {
      mean[i] += (absolute ? std::abs(alpha[i]) : alpha[i]) / static_cast<double>(in.heads);
    }
  }
  return mean;
}

constexpr float kUntouched = 12345.0f;  // every element must be written

std::vector<float> Map(const SsdMapInputs& in, bool absolute, int threads = 1) {
  std::vector<float> map(in.tokens * in.tokens, kUntouched);
  ThreadPool pool(threads);
  (absolute ? SsdAbsMeanMap : SsdMeanMap)(pool, in, map.data());
  return map;
}

TEST(SsdMap, IsTheMeanOfAllHeads) {
  uint32_t seed = 0;
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.tokens << " tokens, " << shape.heads << " heads, "
                                    << shape.groups << " groups, " << shape.d_state << " states");
    const RandomHeads random(shape, ++seed);
    const std::vector<double> mean = Mean(random.in, /*absolute=*/false);
    const std::vector<double> magnitude = Mean(random.in, /*absolute=*/true);
    OnEveryTarget([&] {
      EXPECT_TRUE(Close(Map(random.in, /*absolute=*/false), mean));
      EXPECT_TRUE(Close(Map(random.in, /*absolute=*/true), magnitude));
    });
  }
}

TEST(SsdMap, TheUpperTriangleIsZero) {
  const RandomHeads random({200, 3, 1, 16}, /*seed=*/20);
  for (const bool absolute : {false, true}) {
    const std::vector<float> map = Map(random.in, absolute);
    for (int64_t i = 0; i < 200; ++i) {
      for (int64_t j = i + 1; j < 200; ++j) {
        ASSERT_TRUE(map[i * 200 + j] == 0 && !std::signbit(map[i * 200 + j])) << i << ", " << j;
      }
    }
  }
}

TEST(SsdMap, TheThreadCountChangesNoBit) {
  const RandomHeads random({300, 6, 2, 16}, /*seed=*/21);
  for (const bool absolute : {false, true}) {
    const std::vector<float> one = Map(random.in, absolute);
    for (const int threads : {2, 5}) {
      EXPECT_TRUE(SameBits(Map(random.in, absolute, threads), one)) << threads << " threads";
    }
  }
}

TEST(SsdMap, NothingOverflowsWhateverTheDecay) {
  OnEveryTarget([] {
    for (const float fastest : {1e-6f, 100.0f}) {  // products near 1, and far below the smallest
      const RandomHeads random({300, 4, 2, 8}, /*seed=*/22, fastest / 10, fastest);
      EXPECT_TRUE(Close(Map(random.in, false), Mean(random.in, false)));
      EXPECT_TRUE(Close(Map(random.in, true), Mean(random.in, true)));
    }
  });
}

// One group as a scan of hidden_attention.h: its heads are the channels, A is A[h] for every state.
struct GroupScan {
  std::vector<float> delta, A;
  ScanParameters scan;

  GroupScan(const SsdMapInputs& in, int64_t group) {
    const int64_t heads = in.heads / in.groups;
    for (int64_t i = 0; i < in.tokens; ++i) {
      const float* row = in.delta + i * in.heads + group * heads;
      delta.insert(delta.end(), row, row + heads);
    }
    for (int64_t n = 0; n < in.d_state; ++n) {
      A.insert(A.end(), in.A + group * heads, in.A + (group + 1) * heads);
    }
    scan = {.tokens = in.tokens,
            .d_inner = heads,
            .d_state = in.d_state,
            .delta = delta.data(),
            .A = A.data(),
            .B = in.B + group * in.d_state,
            .C = in.C + group * in.d_state,
            .bc_stride = in.bc_stride};
  }
  GroupScan(const GroupScan&) = delete;
};

TEST(SsdMap, HiddenAttentionOfAGroupIsThatOfItsHeads) {
  ThreadPool pool(2);
  const RandomHeads random({70, 6, 3, 20}, /*seed=*/23);
  const SsdMapInputs& in = random.in;
  const int64_t L = in.tokens, heads = in.heads / in.groups;
  std::vector<double> mean(L * L), absolute(L * L);
  for (int64_t g = 0; g < in.groups; ++g) {
    const GroupScan group(in, g);
    std::vector<double> group_mean(L * L), target(L * heads), adjoint(L);
    const std::vector<float> v = Random(L, 24);
    for (int32_t c = 0; c < heads; ++c) {
      const int64_t h = g * heads + c;
      const std::vector<double> alpha = HeadMap(in, h);
      std::vector<float> map(L * L);
      ChannelMaps(pool, group.scan, {{c}}, map.data());
      EXPECT_TRUE(Close(map, alpha)) << "head " << h;

      const int32_t states[] = {0, 7, 19};
      std::vector<float> inner(3 * L * L);
      StateMaps(pool, group.scan, c, states, inner.data());
      std::vector<double> expected_inner;
      for (const int32_t n : states) {
        for (int64_t i = 0; i < L; ++i) {
          for (int64_t j = 0; j < L; ++j) expected_inner.push_back(OfState(in, h, n, i, j));
        }
      }
      EXPECT_TRUE(Close(inner, expected_inner)) << "head " << h;

      for (int64_t i = 0; i < L; ++i) {
        target[i * heads + c] = alpha[(L - 1) * L + i];
        for (int64_t j = 0; j < L; ++j) {
          group_mean[i * L + j] += alpha[i * L + j] / static_cast<double>(heads);
          adjoint[j] += v[i] * alpha[i * L + j] / static_cast<double>(heads);
        }
      }
    }
    std::vector<float> rows(L * heads), back(L), map(L * L);
    TargetRows(pool, group.scan, L - 1, false, rows.data());
    EXPECT_TRUE(Close(rows, target));
    MeanAdjoint(pool, group.scan, {}, v.data(), back.data());
    EXPECT_TRUE(Close(back, adjoint));
    MeanMap(pool, group.scan, map.data());
    EXPECT_TRUE(Close(map, group_mean));
    for (int64_t at = 0; at < L * L; ++at) mean[at] += map[at] / static_cast<double>(in.groups);
    AbsMeanMap(pool, group.scan, map.data());
    for (int64_t at = 0; at < L * L; ++at) absolute[at] += map[at] / static_cast<double>(in.groups);
  }
  EXPECT_TRUE(Close(Map(in, false), mean));
  EXPECT_TRUE(Close(Map(in, true), absolute));
}

TEST(SsdMap, AlphaTimesXIsTheScansY) {
  ThreadPool pool(2);
  const int64_t tokens = 90, heads = 4, head_dim = 3, channels = heads * head_dim;
  const RandomHeads random({tokens, heads, /*groups=*/2, /*d_state=*/16}, /*seed=*/25);
  const std::vector<float> x = Random(tokens * random.in.bc_stride, 26);
  const std::vector<float> dt = Random(tokens * heads, 27, -6, 1), bias = Random(heads, 28);
  const std::vector<float> D(heads), z(tokens * channels, 1.0f);
  std::vector<float> gated(tokens * channels), y(tokens * channels), state(channels * 16);
  const int32_t seq_start[] = {0, static_cast<int32_t>(tokens)};
  float* const states[] = {state.data()};
  SsdInputs scan;
  scan.heads = heads;
  scan.head_dim = head_dim;
  scan.groups = 2;
  scan.d_state = 16;
  scan.x = x.data();
  scan.B = random.in.B;
  scan.C = random.in.C;
  scan.xbc_stride = random.in.bc_stride;
  scan.dt = dt.data();
  scan.dt_stride = heads;
  scan.dt_bias = bias.data();
  scan.delta_max = 0.5f;
  scan.A = random.A.data();
  scan.D = D.data();
  scan.z = z.data();
  scan.z_stride = channels;
  scan.seq_start = seq_start;
  SsdScan(pool, scan, {.gated = gated.data(), .y = y.data(), .ssm_state = states});

  std::vector<float> delta(tokens * heads);
  SsdDelta(pool, dt.data(), heads, bias.data(), scan.delta_min, scan.delta_max, tokens, heads,
           delta.data());
  SsdMapInputs in = random.in;
  in.delta = delta.data();
  std::vector<double> expected(tokens * channels);
  for (int64_t h = 0; h < heads; ++h) {
    const std::vector<double> alpha = HeadMap(in, h);
    for (int64_t i = 0; i < tokens; ++i) {
      for (int64_t c = h * head_dim; c < (h + 1) * head_dim; ++c) {
        for (int64_t j = 0; j <= i; ++j) {
          expected[i * channels + c] += alpha[i * tokens + j] * x[j * scan.xbc_stride + c];
        }
      }
    }
  }
  EXPECT_TRUE(Close(y, expected));
}

}  // namespace
}  // namespace mambascope::kernels
