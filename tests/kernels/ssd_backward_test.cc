#include "server/kernels/ssd_backward.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/reference_backward.h"
#include "tests/support/reference_kernels.h"

namespace mambascope::kernels {
namespace {

using reference::Close;
using reference::OnEveryTarget;
using reference::Random;
using reference::SameBits;
using reference::SsdShape;
using reference::WideSsd;

// Around the kernel's chunks of 64 tokens, tasks of 4 heads and rows of 16 channels and states.
struct Case {
  int64_t tokens;
  SsdShape shape;
};
const Case kCases[] = {
    {1, {1, 1, 1, 1}},     {1, {4, 64, 1, 16}},   {63, {5, 16, 1, 5}},
    {64, {6, 64, 2, 64}},  {65, {10, 24, 2, 16}}, {65, {2, 3, 2, 1}},
    {200, {3, 20, 1, 16}}, {200, {4, 64, 2, 5}},  {129, {2, 100, 1, 256}},
};

constexpr float kUntouched = 12345.0f;

// One sequence; rows of x, B and C stand behind each other in rows of xBC, NaN between them and the
// next row.
struct Problem {
  int64_t tokens;
  SsdShape shape;
  std::vector<float> xbc, delta, A, dy;

  int64_t channels() const { return shape.heads * shape.head_dim; }
  int64_t bc() const { return shape.groups * shape.d_state; }
  int64_t stride() const { return channels() + 2 * bc() + 3; }

  Problem(int64_t tokens, const SsdShape& shape, uint32_t seed, float largest = 0.3f)
      : tokens(tokens), shape(shape) {
    xbc = Random(tokens * stride(), seed);
    for (int64_t i = 0; i < tokens; ++i) std::fill_n(xbc.begin() + (i + 1) * stride() - 3, 3, NAN);
    delta = Random(tokens * shape.heads, seed + 1, 0, largest);
    A = Random(shape.heads, seed + 2, -8, -0.01f);
    dy = Random(tokens * channels(), seed + 3);
  }
  SsdBackwardInputs Inputs() const {
    SsdBackwardInputs in;
    in.tokens = tokens;
    in.heads = shape.heads;
    in.head_dim = shape.head_dim;
    in.groups = shape.groups;
    in.d_state = shape.d_state;
    in.x = xbc.data();
    in.B = xbc.data() + channels();
    in.C = xbc.data() + channels() + bc();
    in.xbc_stride = stride();
    in.delta = delta.data();
    in.A = A.data();
    in.dy = dy.data();
    return in;
  }
  // Columns [first, first + count) of rows like those of xBC.
  template <class T>
  std::vector<T> Columns(const std::vector<float>& rows, int64_t first, int64_t count) const {
    std::vector<T> out;
    for (int64_t i = 0; i < tokens; ++i) {
      const auto row = rows.begin() + i * stride() + first;
      out.insert(out.end(), row, row + count);
    }
    return out;
  }
  WideSsd Widened() const {
    return {tokens,
            shape.heads,
            shape.head_dim,
            shape.groups,
            shape.d_state,
            Columns<double>(xbc, 0, channels()),
            {delta.begin(), delta.end()},
            {A.begin(), A.end()},
            Columns<double>(xbc, channels(), bc()),
            Columns<double>(xbc, channels() + bc(), bc())};
  }
};

std::vector<double> Wide(const std::vector<float>& v) { return {v.begin(), v.end()}; }

std::vector<float> Adjoint(const Problem& p, int threads = 1) {
  ThreadPool pool(threads);
  std::vector<float> dx(p.tokens * p.stride(), kUntouched);
  SsdBackwardInputs in = p.Inputs();
  in.x = nullptr;
  SsdAdjoint(pool, in, dx.data(), p.stride(), /*accumulate=*/false);
  const int64_t behind = p.stride() - p.channels();
  EXPECT_EQ(p.Columns<float>(dx, p.channels(), behind),
            std::vector<float>(p.tokens * behind, kUntouched));
  return p.Columns<float>(dx, 0, p.channels());
}

TEST(SsdAdjoint, EqualsTheFormulaInDouble) {
  for (const auto& [tokens, shape] : kCases) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens, " << shape.heads << " heads");
    const Problem p(tokens, shape, /*seed=*/1);
    const auto expected = SsdBackward(p.Widened(), Wide(p.dy));
    OnEveryTarget([&] { EXPECT_TRUE(Close(Adjoint(p), expected.dx)); });
  }
}

TEST(SsdAdjoint, IsTheTransposeOfTheScan) {  // sum dy y = sum x dx
  for (const auto& [tokens, shape] : kCases) {
    const Problem p(tokens, shape, /*seed=*/5);
    const WideSsd wide = p.Widened();
    const std::vector<double> y = SsdForward(wide);
    const std::vector<float> dx = Adjoint(p);
    double there = 0, back = 0, scale = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      there += p.dy[i] * y[i];
      back += wide.x[i] * dx[i];
      scale += std::abs(p.dy[i] * y[i]);
    }
    EXPECT_NEAR(there, back, 1e-5 * scale);
  }
}

TEST(SsdAdjoint, AddsWhereAsked) {
  const Problem p(70, {3, 20, 1, 6}, /*seed=*/9);
  std::vector<float> dx(p.tokens * p.stride(), 0.5f), expected = Adjoint(p);
  for (float& v : expected) v += 0.5f;
  ThreadPool pool(1);
  SsdAdjoint(pool, p.Inputs(), dx.data(), p.stride(), /*accumulate=*/true);
  EXPECT_TRUE(SameBits(p.Columns<float>(dx, 0, p.channels()), expected));
}

TEST(SsdAdjoint, BitsDoNotDependOnThreads) {
  const Problem p(130, {18, 24, 2, 16}, /*seed=*/13);
  const std::vector<float> one = Adjoint(p, 1);
  EXPECT_TRUE(SameBits(Adjoint(p, 2), one));
  EXPECT_TRUE(SameBits(Adjoint(p, 5), one));
}

struct Gradients {
  std::vector<float> dx, ddelta, dB, dC;
};

Gradients Backward(const Problem& p, int threads = 1) {
  ThreadPool pool(threads);
  std::vector<float> dxbc(p.tokens * p.stride(), kUntouched);
  std::vector<float> ddelta(p.delta.size() + 1, kUntouched);
  float* dB = dxbc.data() + p.channels();
  SsdBackward(pool, p.Inputs(),
              {.dx = dxbc.data(),
               .accumulate_dx = false,
               .dB = dB,
               .dC = dB + p.bc(),
               .xbc_stride = p.stride(),
               .ddelta = ddelta.data()});
  EXPECT_EQ(ddelta.back(), kUntouched);
  ddelta.pop_back();
  EXPECT_EQ(p.Columns<float>(dxbc, p.stride() - 3, 3),
            std::vector<float>(p.tokens * 3, kUntouched));
  return {p.Columns<float>(dxbc, 0, p.channels()), ddelta,
          p.Columns<float>(dxbc, p.channels(), p.bc()),
          p.Columns<float>(dxbc, p.channels() + p.bc(), p.bc())};
}

void ExpectClose(const Gradients& actual, const reference::WideGradients& expected) {
  EXPECT_TRUE(Close(actual.dx, expected.dx));
  EXPECT_TRUE(Close(actual.ddelta, expected.ddelta));
  EXPECT_TRUE(Close(actual.dB, expected.dB));
  EXPECT_TRUE(Close(actual.dC, expected.dC));
}

TEST(SsdBackward, EqualsTheFormulasInDouble) {
  for (const auto& [tokens, shape] : kCases) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens, " << shape.heads << " heads");
    const Problem p(tokens, shape, /*seed=*/21);
    const auto expected = SsdBackward(p.Widened(), Wide(p.dy));
    OnEveryTarget([&] { ExpectClose(Backward(p), expected); });
  }
}

// What dy . y gains when *value does, by central differences in double.
double Slope(WideSsd& scan, const std::vector<double>& dy, double* value) {
  const double at = *value, step = 1e-5;
  const auto product = [&] {
    const std::vector<double> y = SsdForward(scan);
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += dy[i] * y[i];
    return sum;
  };
  *value = at + step;
  const double above = product();
  *value = at - step;
  const double below = product();
  *value = at;
  return (above - below) / (2 * step);
}

TEST(SsdBackward, EqualsFiniteDifferences) {
  const Problem p(67, {2, 2, 1, 3}, /*seed=*/25);
  WideSsd scan = p.Widened();
  const auto slopes = [&](std::vector<double>& of) {
    std::vector<double> all;
    for (double& value : of) all.push_back(Slope(scan, Wide(p.dy), &value));
    return all;
  };
  ExpectClose(Backward(p), {slopes(scan.x), slopes(scan.delta), slopes(scan.B), slopes(scan.C)});
}

TEST(SsdBackward, DxIsTheAdjointBitForBit) {
  const Problem p(130, {6, 24, 2, 16}, /*seed=*/29);
  EXPECT_TRUE(SameBits(Backward(p).dx, Adjoint(p)));
}

// Long decays vanish and short ones do not, whatever stands between them.
TEST(SsdBackward, SurvivesVanishingDecays) {
  Problem p(200, {3, 20, 1, 16}, /*seed=*/33);
  for (size_t k = 0; k < p.delta.size(); ++k) p.delta[k] = k % 7 == 0 ? 50.0f : 1e-4f * (k % 5);
  ExpectClose(Backward(p), SsdBackward(p.Widened(), Wide(p.dy)));
}

TEST(SsdBackward, OfNoTokensWritesNothing) {
  const Problem p(0, {3, 20, 1, 16}, /*seed=*/40);
  const Gradients none = Backward(p, 2);
  EXPECT_TRUE(none.dx.empty() && none.ddelta.empty());
  EXPECT_TRUE(Adjoint(p, 2).empty());
}

TEST(SsdBackward, BitsDoNotDependOnThreads) {
  const Problem p(130, {18, 24, 2, 16}, /*seed=*/37);
  const Gradients one = Backward(p, 1);
  for (const int threads : {2, 5}) {
    const Gradients more = Backward(p, threads);
    EXPECT_TRUE(SameBits(more.dx, one.dx));
    EXPECT_TRUE(SameBits(more.ddelta, one.ddelta));
    EXPECT_TRUE(SameBits(more.dB, one.dB));
    EXPECT_TRUE(SameBits(more.dC, one.dC));
  }
}

}  // namespace
}  // namespace mambascope::kernels
