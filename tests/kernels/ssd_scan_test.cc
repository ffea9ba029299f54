#include "server/kernels/ssd_scan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/reference_kernels.h"

namespace mambascope::kernels {
namespace {

using reference::Close;
using reference::OnEveryTarget;
using reference::Random;
using reference::SameBits;
using reference::SsdShape;

// One sequence. The rows of x, B and C stand behind each other in rows of xBC, those of dt and z
// inside wider ones; what lies between is NaN, because nobody may read it.
constexpr int64_t kPadding = 3;

struct Problem {
  SsdShape shape;
  int64_t tokens;
  std::vector<float> x, B, C, dt, z, dt_bias, A, D, ssm_state;
  float delta_min = 0, delta_max = std::numeric_limits<float>::infinity();

  int64_t channels() const { return shape.heads * shape.head_dim; }
  int64_t bc() const { return shape.groups * shape.d_state; }
};

Problem RandomScan(const SsdShape& shape, int64_t tokens, uint32_t seed) {
  Problem p{shape, tokens, {}, {}, {}, {}, {}, {}, {}, {}, {}};
  p.x = Random(tokens * p.channels(), seed);
  p.B = Random(tokens * p.bc(), seed + 1);
  p.C = Random(tokens * p.bc(), seed + 2);
  p.dt = Random(tokens * shape.heads, seed + 3, -6, 3);
  p.z = Random(tokens * p.channels(), seed + 4, -4, 4);
  p.dt_bias = Random(shape.heads, seed + 5);
  p.A = Random(shape.heads, seed + 6, -4, -0.01);
  p.D = Random(shape.heads, seed + 7);
  p.ssm_state = Random(p.channels() * shape.d_state, seed + 8);
  return p;
}

// Rows [begin, end) of a matrix with `cols` columns.
std::vector<float> Rows(const std::vector<float>& matrix, int64_t cols, int64_t begin,
                        int64_t end) {
  return {matrix.begin() + begin * cols, matrix.begin() + end * cols};
}

Problem Tokens(const Problem& p, int64_t begin, int64_t end) {
  Problem part = p;
  part.tokens = end - begin;
  part.x = Rows(p.x, p.channels(), begin, end);
  part.B = Rows(p.B, p.bc(), begin, end);
  part.C = Rows(p.C, p.bc(), begin, end);
  part.dt = Rows(p.dt, p.shape.heads, begin, end);
  part.z = Rows(p.z, p.channels(), begin, end);
  return part;
}

std::vector<float> Concat(std::vector<float> first, const std::vector<float>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// `matrix` [rows, cols] into columns `at` .. of `to`, whose rows are `stride` wide.
void Place(const std::vector<float>& matrix, int64_t cols, int64_t at, int64_t stride,
           std::vector<float>& to) {
  const int64_t rows = static_cast<int64_t>(matrix.size()) / cols;
  to.resize(rows * stride, std::nanf(""));
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(matrix.begin() + i * cols, cols, to.begin() + i * stride + at);
  }
}

struct Scanned {
  std::vector<float> gated, y;
  std::vector<std::vector<float>> ssm_state;
};

constexpr float kUntouched = 12345.0f;

// `sequences` packed end to end; all share the parameters of the first.
Scanned Scan(const std::vector<Problem>& sequences, int threads = 1, bool with_y = true) {
  Problem all = sequences[0];
  std::vector<int32_t> seq_start = {0, static_cast<int32_t>(all.tokens)};
  Scanned out;
  // A number behind each state and behind the outputs shows that nothing else is written.
  const auto guarded = [](std::vector<float> v) { return Concat(std::move(v), {kUntouched}); };
  out.ssm_state.push_back(guarded(all.ssm_state));
  for (size_t s = 1; s < sequences.size(); ++s) {
    const Problem& next = sequences[s];
    all.x = Concat(all.x, next.x);
    all.B = Concat(all.B, next.B);
    all.C = Concat(all.C, next.C);
    all.dt = Concat(all.dt, next.dt);
    all.z = Concat(all.z, next.z);
    seq_start.push_back(static_cast<int32_t>(seq_start.back() + next.tokens));
    out.ssm_state.push_back(guarded(next.ssm_state));
  }
  out.gated = out.y = guarded(std::vector<float>(all.x.size(), std::nanf("")));
  std::vector<float*> states;
  for (std::vector<float>& state : out.ssm_state) states.push_back(state.data());

  const int64_t channels = all.channels(), heads = all.shape.heads;
  const int64_t stride = channels + 2 * all.bc() + kPadding;
  std::vector<float> xbc, dt, z;
  Place(all.x, channels, 0, stride, xbc);
  Place(all.B, all.bc(), channels, stride, xbc);
  Place(all.C, all.bc(), channels + all.bc(), stride, xbc);
  Place(all.dt, heads, 0, heads + kPadding, dt);
  Place(all.z, channels, 0, channels + kPadding, z);
  ThreadPool pool(threads);
  SsdScan(pool,
          {.heads = heads,
           .head_dim = all.shape.head_dim,
           .groups = all.shape.groups,
           .d_state = all.shape.d_state,
           .x = xbc.data(),
           .B = xbc.data() + channels,
           .C = xbc.data() + channels + all.bc(),
           .xbc_stride = stride,
           .dt = dt.data(),
           .dt_stride = heads + kPadding,
           .dt_bias = all.dt_bias.data(),
           .delta_min = all.delta_min,
           .delta_max = all.delta_max,
           .A = all.A.data(),
           .D = all.D.data(),
           .z = z.data(),
           .z_stride = channels + kPadding,
           .seq_start = seq_start},
          {.gated = out.gated.data(), .y = with_y ? out.y.data() : nullptr, .ssm_state = states});
  for (std::vector<float>* v : {&out.gated, &out.y}) {
    EXPECT_EQ(v->back(), kUntouched);
    v->pop_back();
  }
  for (std::vector<float>& state : out.ssm_state) {
    EXPECT_EQ(state.back(), kUntouched);
    state.pop_back();
  }
  return out;
}

reference::Scanned Expected(const Problem& p) {
  return reference::SsdScan(p.shape, p.x, p.B, p.C, p.dt, p.dt_bias, p.delta_min, p.delta_max, p.A,
                            p.D, p.z, p.ssm_state);
}

void ExpectTheDefinition(const Problem& p) {
  SCOPED_TRACE(testing::Message() << p.tokens << " tokens, " << p.shape.heads << " heads of "
                                  << p.shape.head_dim << ", " << p.shape.groups << " groups, "
                                  << p.shape.d_state << " states");
  const Scanned scanned = Scan({p});
  const reference::Scanned expected = Expected(p);
  EXPECT_TRUE(Close(scanned.gated, expected.gated));
  EXPECT_TRUE(Close(scanned.y, expected.y));
  EXPECT_TRUE(Close(scanned.ssm_state[0], expected.ssm_state));
}

TEST(SsdScan, EqualsTheRecurrenceForEveryShape) {
  OnEveryTarget([] {
    const SsdShape shapes[] = {{1, 1, 1, 1},   {2, 4, 1, 4},     {3, 8, 3, 16},   {4, 5, 2, 7},
                               {6, 64, 2, 5},  {2, 65, 1, 10},   {3, 63, 3, 128}, {1, 256, 1, 9},
                               {2, 100, 2, 3}, {24, 64, 1, 128}, {2, 33, 1, 256}, {6, 16, 3, 6}};
    uint32_t seed = 0;
    for (const SsdShape& shape : shapes) ExpectTheDefinition(RandomScan(shape, 35, ++seed));
  });
}

TEST(SsdScan, EqualsTheRecurrenceAroundChunkBorders) {
  OnEveryTarget([] {
    for (const int64_t tokens : {1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65}) {
      ExpectTheDefinition(RandomScan({4, 24, 2, 18}, tokens, /*seed=*/1));
    }
  });
}

TEST(SsdScan, StepsStayWithinTheirLimits) {
  OnEveryTarget([] {
    Problem p = RandomScan({4, 8, 1, 16}, /*tokens=*/40, /*seed=*/2);
    p.delta_min = 0.1f;  // softplus of -6 .. 3 is 0.002 .. 3.05
    p.delta_max = 0.7f;
    ExpectTheDefinition(p);
    p.delta_min = 0.1f;
    p.delta_max = std::numeric_limits<float>::infinity();
    ExpectTheDefinition(p);
  });
}

TEST(SsdScan, StateCarriedAcrossACutGivesTheUncutBits) {
  OnEveryTarget([] {
    for (const SsdShape& shape : {SsdShape{4, 72, 2, 17}, SsdShape{3, 5, 1, 128}}) {
      const Problem prompt = RandomScan(shape, /*tokens=*/70, /*seed=*/3);
      const Scanned whole = Scan({prompt});
      for (const int64_t cut : {1, 15, 16, 31, 32, 33, 64, 69}) {  // around chunks of 32
        SCOPED_TRACE(cut);
        const Scanned head = Scan({Tokens(prompt, 0, cut)});
        Problem rest = Tokens(prompt, cut, prompt.tokens);
        rest.ssm_state = head.ssm_state[0];
        const Scanned tail = Scan({rest});
        EXPECT_TRUE(SameBits(Concat(head.gated, tail.gated), whole.gated));
        EXPECT_TRUE(SameBits(Concat(head.y, tail.y), whole.y));
        EXPECT_TRUE(SameBits(tail.ssm_state[0], whole.ssm_state[0]));
      }
    }
  });
}

TEST(SsdScan, StepsOfOneTokenGiveTheBitsOfThePrefill) {
  OnEveryTarget([] {
    const Problem prompt = RandomScan({6, 64, 1, 30}, /*tokens=*/20, /*seed=*/4);
    const Scanned whole = Scan({prompt});
    std::vector<float> gated, state = prompt.ssm_state;
    for (int64_t i = 0; i < prompt.tokens; ++i) {
      Problem token = Tokens(prompt, i, i + 1);
      token.ssm_state = state;
      const Scanned step = Scan({token});
      gated = Concat(gated, step.gated);
      state = step.ssm_state[0];
    }
    EXPECT_TRUE(SameBits(gated, whole.gated));
    EXPECT_TRUE(SameBits(state, whole.ssm_state[0]));
  });
}

TEST(SsdScan, APackedSequenceHasTheBitsItHasAlone) {
  OnEveryTarget([] {
    std::vector<Problem> sequences;
    for (const int64_t tokens : {5, 1, 0, 32, 67, 1}) {
      sequences.push_back(RandomScan({6, 20, 3, 16}, tokens, /*seed=*/tokens));
      sequences.back().A = sequences[0].A;
      sequences.back().D = sequences[0].D;
      sequences.back().dt_bias = sequences[0].dt_bias;
    }
    const Scanned packed = Scan(sequences, /*threads=*/2);
    std::vector<float> gated;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const Scanned alone = Scan({sequences[s]});
      gated = Concat(gated, alone.gated);
      EXPECT_TRUE(SameBits(packed.ssm_state[s], alone.ssm_state[0])) << "sequence " << s;
    }
    EXPECT_TRUE(SameBits(packed.gated, gated));
    EXPECT_TRUE(SameBits(packed.ssm_state[2], sequences[2].ssm_state)) << "an empty sequence";
  });
}

TEST(SsdScan, TheThreadCountChangesNoBit) {
  for (const SsdShape& shape : {SsdShape{1, 200, 1, 16}, SsdShape{9, 24, 3, 16}}) {
    const Problem p = RandomScan(shape, /*tokens=*/66, /*seed=*/5);
    const Scanned one = Scan({p}, 1, /*with_y=*/false);
    for (const int threads : {2, 3, 8}) {
      const Scanned several = Scan({p}, threads);
      EXPECT_TRUE(SameBits(several.gated, one.gated)) << threads << " threads";
      EXPECT_TRUE(SameBits(several.ssm_state[0], one.ssm_state[0])) << threads << " threads";
    }
  }
}

TEST(SsdScan, ExtremeStepsStayFinite) {
  OnEveryTarget([] {
    Problem p = RandomScan({3, 7, 1, 16}, /*tokens=*/40, /*seed=*/6);
    for (size_t i = 0; i < p.dt.size(); ++i) p.dt[i] = i % 3 == 0 ? 100.0f : -100.0f;
    for (size_t i = 0; i < p.z.size(); ++i) p.z[i] = i % 2 == 0 ? 100.0f : -100.0f;
    const Scanned scanned = Scan({p});
    for (const float v : scanned.gated) ASSERT_TRUE(std::isfinite(v));
    for (const float v : scanned.ssm_state[0]) ASSERT_TRUE(std::isfinite(v));
    EXPECT_TRUE(Close(scanned.gated, Expected(p).gated));
  });
}

TEST(SsdScan, ANotANumberStaysInItsHead) {
  Problem p = RandomScan({3, 20, 1, 16}, /*tokens=*/4, /*seed=*/7);
  p.delta_min = 0.01f;
  p.delta_max = 1.0f;
  const Scanned clean = Scan({p});
  p.dt[1] = std::nanf("");
  const Scanned scanned = Scan({p});
  for (size_t i = 0; i < scanned.gated.size(); ++i) {
    if (i / 20 % 3 == 1) {
      EXPECT_TRUE(std::isnan(scanned.gated[i])) << i;
    } else {
      EXPECT_EQ(scanned.gated[i], clean.gated[i]) << i;
    }
  }
}

TEST(SsdDelta, IsTheOneOfTheScan) {
  OnEveryTarget([] {
    // With B = C = x = 1 and no state before the first y is delta itself.
    const int64_t heads = 37;
    Problem p = RandomScan({heads, 1, 1, 1}, /*tokens=*/1, /*seed=*/8);
    p.dt = Random(heads, /*seed=*/9, -20, 20);
    p.x.assign(heads, 1.0f);
    p.ssm_state.assign(heads, 0.0f);
    p.B[0] = p.C[0] = 1;
    p.delta_min = 1e-4f;
    p.delta_max = 10;
    ThreadPool pool(2);
    std::vector<float> delta(heads);
    SsdDelta(pool, p.dt.data(), heads, p.dt_bias.data(), p.delta_min, p.delta_max, 1, heads,
             delta.data());
    EXPECT_TRUE(SameBits(Scan({p}).y, delta));
    for (int64_t h = 0; h < heads; ++h) {
      const double exact = reference::Softplus(double{p.dt[h]} + p.dt_bias[h]);
      EXPECT_NEAR(delta[h] / std::clamp<double>(exact, p.delta_min, p.delta_max), 1, 3e-6);
    }
  });
}

TEST(SsdDelta, ReadsStridedRowsAndNothingElse) {
  OnEveryTarget([] {
    const int64_t tokens = 600, heads = 5;
    const std::vector<float> dense = Random(tokens * heads, 10, -6, 3), bias = Random(heads, 11);
    std::vector<float> strided;
    Place(dense, heads, 0, heads + kPadding, strided);
    const auto delta = [&](const std::vector<float>& dt, int64_t stride, int threads) {
      std::vector<float> out(tokens * heads, std::nanf(""));
      ThreadPool pool(threads);
      SsdDelta(pool, dt.data(), stride, bias.data(), 0.01f, 1.0f, tokens, heads, out.data());
      return out;
    };
    EXPECT_TRUE(SameBits(delta(strided, heads + kPadding, 3), delta(dense, heads, 1)));
  });
}

}  // namespace
}  // namespace mambascope::kernels
