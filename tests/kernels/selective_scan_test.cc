#include "server/kernels/selective_scan.h"

#include <cmath>
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

// The rows of z, B and C stand inside wider ones, as they do behind in_proj and x_proj.
constexpr int64_t kPadding = 3;

struct Problem {
  int64_t tokens, d_inner, d_state;
  std::vector<float> x, dt, z, A, B, C, D, ssm_state;
};

Problem RandomScan(int64_t tokens, int64_t d_inner, int64_t d_state, uint32_t seed) {
  Problem p{tokens, d_inner, d_state, {}, {}, {}, {}, {}, {}, {}, {}};
  p.x = Random(tokens * d_inner, seed);
  p.dt = Random(tokens * d_inner, seed + 1, -6, 3);
  p.z = Random(tokens * (d_inner + kPadding), seed + 2, -4, 4);
  p.A = Random(d_state * d_inner, seed + 3, -16, -0.01);
  p.B = Random(tokens * (d_state + kPadding), seed + 4);
  p.C = Random(tokens * (d_state + kPadding), seed + 5);
  p.D = Random(d_inner, seed + 6);
  p.ssm_state = Random(d_state * d_inner, seed + 7);
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
  part.x = Rows(p.x, p.d_inner, begin, end);
  part.dt = Rows(p.dt, p.d_inner, begin, end);
  part.z = Rows(p.z, p.d_inner + kPadding, begin, end);
  part.B = Rows(p.B, p.d_state + kPadding, begin, end);
  part.C = Rows(p.C, p.d_state + kPadding, begin, end);
  return part;
}

std::vector<float> Concat(std::vector<float> first, const std::vector<float>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// The first `cols` columns of rows that are `kPadding` wider.
std::vector<float> Dense(const std::vector<float>& padded, int64_t cols) {
  std::vector<float> dense;
  for (size_t row = 0; row < padded.size(); row += cols + kPadding) {
    dense.insert(dense.end(), padded.begin() + row, padded.begin() + row + cols);
  }
  return dense;
}

struct Scanned {
  std::vector<float> gated, y;
  std::vector<std::vector<float>> ssm_state;
};

// `sequences` packed end to end; all share A and D of the first.
Scanned Scan(const std::vector<Problem>& sequences, int threads = 1) {
  Problem all = sequences[0];
  std::vector<int32_t> seq_start = {0, static_cast<int32_t>(all.tokens)};
  Scanned out;
  out.ssm_state.push_back(all.ssm_state);
  for (size_t s = 1; s < sequences.size(); ++s) {
    const Problem& next = sequences[s];
    all.x = Concat(all.x, next.x);
    all.dt = Concat(all.dt, next.dt);
    all.z = Concat(all.z, next.z);
    all.B = Concat(all.B, next.B);
    all.C = Concat(all.C, next.C);
    seq_start.push_back(static_cast<int32_t>(seq_start.back() + next.tokens));
    out.ssm_state.push_back(next.ssm_state);
  }
  out.gated.assign(all.x.size(), std::nanf(""));
  out.y.assign(all.x.size(), std::nanf(""));
  std::vector<float*> states;
  for (std::vector<float>& state : out.ssm_state) states.push_back(state.data());
  ThreadPool pool(threads);
  SelectiveScan(pool,
                {.d_inner = all.d_inner,
                 .d_state = all.d_state,
                 .x = all.x.data(),
                 .dt = all.dt.data(),
                 .z = all.z.data(),
                 .z_stride = all.d_inner + kPadding,
                 .A = all.A.data(),
                 .B = all.B.data(),
                 .C = all.C.data(),
                 .bc_stride = all.d_state + kPadding,
                 .D = all.D.data(),
                 .seq_start = seq_start},
                {.gated = out.gated.data(), .y = out.y.data(), .ssm_state = states});
  return out;
}

reference::Scanned Expected(const Problem& p) {
  return reference::SelectiveScan(p.x, p.dt, Dense(p.z, p.d_inner), p.A, Dense(p.B, p.d_state),
                                  Dense(p.C, p.d_state), p.D, p.ssm_state);
}

TEST(SelectiveScan, EqualsTheRecurrenceForEveryNumberOfStates) {
  OnEveryTarget([] {
    for (const int64_t d_state : {1, 2, 5, 8, 15, 16, 17, 64, 128, 256}) {
      SCOPED_TRACE(d_state);
      const Problem p = RandomScan(/*tokens=*/70, /*d_inner=*/19, d_state, /*seed=*/d_state);
      const Scanned scanned = Scan({p});
      const reference::Scanned expected = Expected(p);
      EXPECT_TRUE(Close(scanned.gated, expected.gated));
      EXPECT_TRUE(Close(scanned.y, expected.y));
      EXPECT_TRUE(Close(scanned.ssm_state[0], expected.ssm_state));
    }
  });
}

TEST(SelectiveScan, EqualsTheRecurrenceAcrossTilesAndBlocksOfChannels) {
  OnEveryTarget([] {
    // Tiles are 128 channels, blocks 768 for 16 states and 48 for 256, steps take 1024 at a time.
    for (const auto& [d_inner, d_state] :
         {std::pair<int64_t, int64_t>{130, 16}, {769, 16}, {1030, 2}, {1030, 1}, {100, 256}}) {
      for (const int64_t tokens : {1, 10}) {
        SCOPED_TRACE(testing::Message() << d_inner << " channels, " << tokens << " tokens");
        const Problem p = RandomScan(tokens, d_inner, d_state, /*seed=*/11);
        const Scanned scanned = Scan({p});
        const reference::Scanned expected = Expected(p);
        EXPECT_TRUE(Close(scanned.gated, expected.gated));
        EXPECT_TRUE(Close(scanned.y, expected.y));
        EXPECT_TRUE(Close(scanned.ssm_state[0], expected.ssm_state));
      }
    }
  });
}

TEST(SelectiveScan, EqualsTheRecurrenceAroundRegisterAndChunkBorders) {
  OnEveryTarget([] {
    for (const int64_t d_inner : {1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 64}) {
      for (const int64_t tokens : {1, 2, 7, 8, 9, 65}) {
        SCOPED_TRACE(testing::Message() << d_inner << " channels, " << tokens << " tokens");
        const Problem p = RandomScan(tokens, d_inner, /*d_state=*/16, /*seed=*/7);
        const Scanned scanned = Scan({p});
        const reference::Scanned expected = Expected(p);
        EXPECT_TRUE(Close(scanned.gated, expected.gated));
        EXPECT_TRUE(Close(scanned.ssm_state[0], expected.ssm_state));
      }
    }
  });
}

TEST(SelectiveScan, StateCarriedAcrossACutGivesTheUncutBits) {
  OnEveryTarget([] {
    for (const int64_t d_state : {8, 16, 17}) {
      const Problem prompt = RandomScan(/*tokens=*/140, /*d_inner=*/37, d_state, /*seed=*/1);
      const Scanned whole = Scan({prompt});
      for (const int64_t cut : {1, 7, 8, 9, 64, 139}) {  // around the kernel's 8-token chunk
        SCOPED_TRACE(testing::Message() << d_state << " states, cut at " << cut);
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

TEST(SelectiveScan, StepsOfOneTokenGiveTheBitsOfThePrefill) {
  OnEveryTarget([] {
    for (const int64_t d_state : {1, 7, 8, 16}) {
      SCOPED_TRACE(d_state);
      const Problem prompt = RandomScan(/*tokens=*/20, /*d_inner=*/1070, d_state, /*seed=*/2);
      const Scanned whole = Scan({prompt});
      std::vector<float> gated, y, state = prompt.ssm_state;
      for (int64_t i = 0; i < prompt.tokens; ++i) {
        Problem token = Tokens(prompt, i, i + 1);
        token.ssm_state = state;
        const Scanned step = Scan({token});
        gated = Concat(gated, step.gated);
        y = Concat(y, step.y);
        state = step.ssm_state[0];
      }
      EXPECT_TRUE(SameBits(gated, whole.gated));
      EXPECT_TRUE(SameBits(y, whole.y));
      EXPECT_TRUE(SameBits(state, whole.ssm_state[0]));
    }
  });
}

TEST(SelectiveScan, APackedSequenceHasTheBitsItHasAlone) {
  OnEveryTarget([] {
    std::vector<Problem> sequences;
    for (const int64_t tokens : {5, 1, 8, 33, 1}) {
      sequences.push_back(RandomScan(tokens, /*d_inner=*/50, /*d_state=*/16, /*seed=*/tokens));
      sequences.back().A = sequences[0].A;
      sequences.back().D = sequences[0].D;
    }
    const Scanned packed = Scan(sequences, /*threads=*/2);
    std::vector<float> gated;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const Scanned alone = Scan({sequences[s]});
      gated = Concat(gated, alone.gated);
      EXPECT_TRUE(SameBits(packed.ssm_state[s], alone.ssm_state[0])) << "sequence " << s;
    }
    EXPECT_TRUE(SameBits(packed.gated, gated));
  });
}

TEST(SelectiveScan, AnEmptySequenceKeepsItsState) {
  const Problem full = RandomScan(/*tokens=*/3, /*d_inner=*/8, /*d_state=*/16, /*seed=*/3);
  const Problem empty = Tokens(full, 0, 0);
  const Scanned packed = Scan({full, empty, full});
  EXPECT_TRUE(SameBits(packed.ssm_state[1], empty.ssm_state));
  EXPECT_TRUE(SameBits(packed.ssm_state[2], packed.ssm_state[0]));
}

TEST(SelectiveScan, TheThreadCountChangesNoBit) {
  for (const int64_t d_inner : {16, 17, 100, 257}) {
    const Problem p = RandomScan(/*tokens=*/66, d_inner, /*d_state=*/16, /*seed=*/4);
    const Scanned one = Scan({p}, 1);
    for (const int threads : {2, 3, 8}) {
      const Scanned several = Scan({p}, threads);
      EXPECT_TRUE(SameBits(several.gated, one.gated)) << d_inner << ", " << threads << " threads";
      EXPECT_TRUE(SameBits(several.ssm_state[0], one.ssm_state[0])) << threads << " threads";
    }
  }
}

TEST(SelectiveScan, ExtremeStepsStayFinite) {
  OnEveryTarget([] {
    Problem p = RandomScan(/*tokens=*/10, /*d_inner=*/20, /*d_state=*/16, /*seed=*/5);
    for (size_t i = 0; i < p.dt.size(); ++i) p.dt[i] = i % 3 == 0 ? 100.0f : -100.0f;
    for (size_t i = 0; i < p.z.size(); ++i) p.z[i] = i % 2 == 0 ? 100.0f : -100.0f;
    const Scanned scanned = Scan({p});
    for (const float v : scanned.gated) ASSERT_TRUE(std::isfinite(v));
    for (const float v : scanned.ssm_state[0]) ASSERT_TRUE(std::isfinite(v));
    EXPECT_TRUE(Close(scanned.gated, Expected(p).gated));
  });
}

TEST(SelectiveScan, ANotANumberStaysInItsChannel) {
  Problem p = RandomScan(/*tokens=*/4, /*d_inner=*/20, /*d_state=*/16, /*seed=*/6);
  const Scanned clean = Scan({p});
  p.dt[5] = std::nanf("");
  const Scanned scanned = Scan({p});
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t d = 0; d < 20; ++d) {
      const float v = scanned.gated[i * 20 + d];
      if (d == 5) {
        EXPECT_TRUE(std::isnan(v)) << i;
      } else {
        EXPECT_EQ(v, clean.gated[i * 20 + d]);
      }
    }
  }
}

TEST(Softplus, IsTheOneOfTheScan) {
  OnEveryTarget([] {
    // With B = C = x = 1 and A = -0 the first y is delta itself.
    const int64_t d_inner = 37;
    Problem p = RandomScan(/*tokens=*/1, d_inner, /*d_state=*/1, /*seed=*/8);
    p.dt = Random(d_inner, /*seed=*/9, -80, 30);
    p.x.assign(d_inner, 1.0f);
    p.A.assign(d_inner, -0.0f);
    p.ssm_state.assign(d_inner, 0.0f);
    p.B[0] = p.C[0] = 1;
    std::vector<float> delta = p.dt;
    ThreadPool pool(2);
    Softplus(pool, delta, delta);
    EXPECT_TRUE(SameBits(Scan({p}).y, delta));
  });
}

TEST(Softplus, KeepsItsDigitsFromTheSmallestStepToTheLargest) {
  OnEveryTarget([] {
    ThreadPool pool(1);
    std::vector<float> dt;
    for (float v = -86; v < 90; v += 0.001f) dt.push_back(v);
    std::vector<float> delta(dt.size());
    Softplus(pool, dt, delta);
    for (size_t i = 0; i < dt.size(); ++i) {
      // 5 roundings of 6e-8 and a polynomial of 1e-7: see vector_math-inl.h.
      ASSERT_NEAR(delta[i] / reference::Softplus(dt[i]), 1, 4e-7) << dt[i];
    }
  });
}

}  // namespace
}  // namespace mambascope::kernels
