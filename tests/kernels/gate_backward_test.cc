#include "server/kernels/gate_backward.h"

#include <cstdint>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/reference_kernels.h"

namespace mambascope::kernels {
namespace {

using reference::Close;
using reference::OnEveryTarget;
using reference::Random;
using reference::SameBits;

struct Gradients {
  std::vector<float> dyd, dz;  // [tokens, d_inner], [tokens, dz_stride]
};

// x and z stand in wider rows, as in a layer.
struct Gate {
  Gate(int64_t tokens, int64_t d_inner, int64_t channels_per_skip, BackwardRule rule)
      : dgated(Random(tokens * d_inner, 1)),
        y(Random(tokens * d_inner, 2)),
        x(Random(tokens * (d_inner + 3), 3)),
        z(Random(tokens * 2 * d_inner, 4, -8, 8)),
        D(Random(d_inner / channels_per_skip, 5)),
        in{.tokens = tokens,
           .d_inner = d_inner,
           .rule = rule,
           .dgated = dgated.data(),
           .y = y.data(),
           .x = x.data(),
           .x_stride = d_inner + 3,
           .z = z.data() + d_inner,
           .z_stride = 2 * d_inner,
           .D = D.data(),
           .channels_per_skip = channels_per_skip} {}
  Gate(const Gate&) = delete;

  Gradients Run(int threads = 1) const { return Run(in, threads); }
  static Gradients Run(const GateBackwardInputs& in, int threads = 1) {
    ThreadPool pool(threads);
    const int64_t count = in.tokens * in.d_inner;
    Gradients out{std::vector<float>(count, std::nanf("")),
                  std::vector<float>(count, std::nanf(""))};
    GateBackward(pool, in, {.dyd = out.dyd.data(), .dz = out.dz.data(), .dz_stride = in.d_inner});
    return out;
  }
  double Yd(int64_t i, int64_t d) const {
    return y[i * in.d_inner + d] + double{D[d / in.channels_per_skip]} * x[i * in.x_stride + d];
  }
  double Z(int64_t i, int64_t d) const { return in.z[i * in.z_stride + d]; }

  std::vector<float> dgated, y, x, z, D;
  GateBackwardInputs in;
};

TEST(GateBackward, IsTheSlopeOfTheGate) {
  OnEveryTarget([] {
    for (const int64_t per_skip : {1, 4}) {
      for (const int64_t d_inner : {4, 12, 16, 20, 132}) {
        const Gate gate(5, d_inner, per_skip, BackwardRule::kGradient);
        std::vector<double> dyd, dz;
        for (int64_t i = 0; i < 5; ++i) {
          for (int64_t d = 0; d < d_inner; ++d) {
            const double yd = gate.Yd(i, d), z = gate.Z(i, d), step = 1e-5;
            const double gradient = gate.dgated[i * d_inner + d];
            dyd.push_back(gradient * reference::Silu(z));
            dz.push_back(gradient * yd * (reference::Silu(z + step) - reference::Silu(z - step)) /
                         (2 * step));
          }
        }
        const Gradients actual = gate.Run();
        EXPECT_TRUE(Close(actual.dyd, dyd));
        EXPECT_TRUE(Close(actual.dz, dz));
      }
    }
  });
}

TEST(GateBackward, HalvesAProductAndFreezesTheSigmoidForRelevance) {
  OnEveryTarget([] {
    for (const int64_t d_inner : {1, 7, 16, 35, 133}) {
      const Gate gate(5, d_inner, 1, BackwardRule::kRelevance);
      std::vector<double> dyd, dz;
      for (int64_t i = 0; i < 5; ++i) {
        for (int64_t d = 0; d < d_inner; ++d) {
          const double half = 0.5 * gate.dgated[i * d_inner + d];
          dyd.push_back(half * reference::Silu(gate.Z(i, d)));
          dz.push_back(half * gate.Yd(i, d) * reference::Sigmoid(gate.Z(i, d)));
        }
      }
      const Gradients actual = gate.Run();
      EXPECT_TRUE(Close(actual.dyd, dyd));
      EXPECT_TRUE(Close(actual.dz, dz));
    }
  });
}

// What conserves relevance: dyd yd + dz z = dgated gated.
TEST(GateBackward, KeepsTheRelevanceOfEachProduct) {
  const Gate gate(40, 50, 2, BackwardRule::kRelevance);
  const Gradients actual = gate.Run();
  for (int64_t i = 0; i < 40; ++i) {
    for (int64_t d = 0; d < 50; ++d) {
      const int64_t at = i * 50 + d;
      const double yd = gate.Yd(i, d), z = gate.Z(i, d);
      EXPECT_NEAR(actual.dyd[at] * yd + actual.dz[at] * z,
                  gate.dgated[at] * yd * reference::Silu(z), 1e-5);
    }
  }
}

TEST(GateBackward, WritesIntoWiderRowsAndMayWriteOverItsGradient) {
  ThreadPool pool(3);
  const int64_t tokens = 30, d_inner = 21, stride = 45;
  const Gate gate(tokens, d_inner, 1, BackwardRule::kGradient);
  const Gradients dense = gate.Run();
  const std::vector<float> before = Random(tokens * stride, 6);
  std::vector<float> dyd = gate.dgated, dz = before;
  GateBackwardInputs in = gate.in;
  in.dgated = dyd.data();
  GateBackward(pool, in, {dyd.data(), dz.data(), stride});
  EXPECT_TRUE(SameBits(dyd, dense.dyd));
  for (int64_t i = 0; i < tokens; ++i) {
    for (int64_t d = 0; d < stride; ++d) {
      const float was = before[i * stride + d];
      EXPECT_EQ(dz[i * stride + d], d < d_inner ? dense.dz[i * d_inner + d] : was);
    }
  }
}

TEST(GateBackward, HasTheSameBitsOnAnyThreadsAndForEachRowAlone) {
  const int64_t tokens = 150, d_inner = 130;
  for (const BackwardRule rule : {BackwardRule::kGradient, BackwardRule::kRelevance}) {
    const Gate gate(tokens, d_inner, 2, rule);
    const Gradients all = gate.Run();
    for (const int threads : {2, 5}) {
      const Gradients again = gate.Run(threads);
      EXPECT_TRUE(SameBits(again.dyd, all.dyd));
      EXPECT_TRUE(SameBits(again.dz, all.dz));
    }
    for (int64_t i = 0; i < tokens; ++i) {
      GateBackwardInputs row = gate.in;
      row.tokens = 1;
      row.dgated += i * d_inner;
      row.y += i * d_inner;
      row.x += i * row.x_stride;
      row.z += i * row.z_stride;
      const Gradients alone = Gate::Run(row);
      ASSERT_TRUE(SameBits(alone.dyd, std::span(all.dyd).subspan(i * d_inner, d_inner)));
      ASSERT_TRUE(SameBits(alone.dz, std::span(all.dz).subspan(i * d_inner, d_inner)));
    }
  }
}

}  // namespace
}  // namespace mambascope::kernels
