#include "server/kernels/causal_conv1d.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/reference_kernels.h"

namespace mambascope::kernels {
namespace {

using reference::Close;
using reference::OnEveryTarget;
using reference::Random;
using reference::SameBits;

constexpr Activation kActivations[] = {Activation::kSilu, Activation::kRelu, Activation::kIdentity};

struct Problem {
  int64_t channels, taps;
  Activation activation;
  std::vector<float> weight, bias;
};
struct Sequence {
  std::vector<float> x_in, conv_state;
};

Problem RandomConv(int64_t channels, int64_t taps, Activation activation) {
  return {channels, taps, activation, Random(channels * taps, 1), Random(channels, 2)};
}
Sequence RandomSequence(const Problem& p, int64_t tokens, uint32_t seed) {
  return {Random(tokens * p.channels, seed, -3, 3), Random((p.taps - 1) * p.channels, seed + 1)};
}

struct Convolved {
  std::vector<float> x;
  std::vector<std::vector<float>> conv_state;
};

// Sequences packed end to end; each row of x_in is followed by as many numbers of a gate.
Convolved Convolve(const Problem& p, const std::vector<Sequence>& sequences, int threads = 1) {
  std::vector<float> x_in;
  std::vector<int32_t> seq_start = {0};
  Convolved out;
  for (const Sequence& sequence : sequences) {
    const int64_t tokens = static_cast<int64_t>(sequence.x_in.size()) / p.channels;
    for (int64_t i = 0; i < tokens; ++i) {
      x_in.insert(x_in.end(), sequence.x_in.begin() + i * p.channels,
                  sequence.x_in.begin() + (i + 1) * p.channels);
      x_in.resize(x_in.size() + p.channels, std::nanf(""));
    }
    seq_start.push_back(static_cast<int32_t>(seq_start.back() + tokens));
    out.conv_state.push_back(sequence.conv_state);
  }
  std::vector<float*> states;
  for (std::vector<float>& state : out.conv_state) states.push_back(state.data());
  out.x.assign(seq_start.back() * p.channels, std::nanf(""));
  ThreadPool pool(threads);
  CausalConv1d(pool,
               {.x_in = x_in.data(),
                .x_stride = 2 * p.channels,
                .channels = p.channels,
                .taps = p.taps,
                .weight = p.weight.data(),
                .bias = p.bias.empty() ? nullptr : p.bias.data(),
                .activation = p.activation,
                .seq_start = seq_start},
               {.x = out.x.data(), .conv_state = states});
  return out;
}

Sequence Tokens(const Problem& p, const Sequence& sequence, int64_t begin, int64_t end) {
  return {{sequence.x_in.begin() + begin * p.channels, sequence.x_in.begin() + end * p.channels},
          sequence.conv_state};
}

std::vector<float> Concat(std::vector<float> first, const std::vector<float>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

TEST(CausalConv1d, EqualsTheSumForEveryNumberOfTapsAndActivation) {
  OnEveryTarget([] {
    for (const int64_t taps : {1, 2, 3, 4, 5, 7}) {
      for (const Activation activation : kActivations) {
        for (const int64_t tokens : {1, 2, 3, 4, 9}) {
          SCOPED_TRACE(testing::Message() << taps << " taps, " << tokens << " tokens");
          const Problem p = RandomConv(/*channels=*/37, taps, activation);
          const Sequence sequence = RandomSequence(p, tokens, /*seed=*/3);
          const Convolved convolved = Convolve(p, {sequence});
          std::vector<float> state = sequence.conv_state;
          EXPECT_TRUE(
              Close(convolved.x, reference::CausalConv1d(sequence.x_in, p.weight, p.bias,
                                                         p.channels, taps, activation, state)));
          EXPECT_TRUE(SameBits(convolved.conv_state[0], state));
        }
      }
    }
  });
}

TEST(CausalConv1d, EqualsTheSumAroundRegisterBordersAndWithoutABias) {
  OnEveryTarget([] {
    for (const int64_t channels : {1, 4, 5, 7, 8, 9, 15, 16, 17, 32, 33}) {
      SCOPED_TRACE(channels);
      Problem p = RandomConv(channels, /*taps=*/4, Activation::kSilu);
      p.bias.clear();
      const Sequence sequence = RandomSequence(p, /*tokens=*/6, /*seed=*/4);
      std::vector<float> state = sequence.conv_state;
      EXPECT_TRUE(Close(Convolve(p, {sequence}).x,
                        reference::CausalConv1d(sequence.x_in, p.weight, {}, channels, 4,
                                                Activation::kSilu, state)));
    }
  });
}

TEST(CausalConv1d, StateCarriedAcrossACutGivesTheUncutBits) {
  OnEveryTarget([] {
    for (const int64_t taps : {1, 2, 4, 6}) {
      const Problem p = RandomConv(/*channels=*/21, taps, Activation::kSilu);
      const Sequence sequence = RandomSequence(p, /*tokens=*/12, /*seed=*/5);
      const Convolved whole = Convolve(p, {sequence});
      for (const int64_t cut : {1, 2, 3, 4, 11}) {
        SCOPED_TRACE(testing::Message() << taps << " taps, cut at " << cut);
        const Convolved head = Convolve(p, {Tokens(p, sequence, 0, cut)});
        Sequence rest = Tokens(p, sequence, cut, 12);
        rest.conv_state = head.conv_state[0];
        const Convolved tail = Convolve(p, {rest});
        EXPECT_TRUE(SameBits(Concat(head.x, tail.x), whole.x));
        EXPECT_TRUE(SameBits(tail.conv_state[0], whole.conv_state[0]));
      }
    }
  });
}

TEST(CausalConv1d, APackedSequenceHasTheBitsItHasAlone) {
  OnEveryTarget([] {
    const Problem p = RandomConv(/*channels=*/50, /*taps=*/4, Activation::kSilu);
    std::vector<Sequence> sequences;
    for (const int64_t tokens : {1, 5, 2, 3, 0, 40}) {
      sequences.push_back(RandomSequence(p, tokens, /*seed=*/10 + tokens));
    }
    const Convolved packed = Convolve(p, sequences, /*threads=*/2);
    std::vector<float> x;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const Convolved alone = Convolve(p, {sequences[s]});
      x = Concat(x, alone.x);
      EXPECT_TRUE(SameBits(packed.conv_state[s], alone.conv_state[0])) << "sequence " << s;
    }
    EXPECT_TRUE(SameBits(packed.x, x));
  });
}

TEST(CausalConv1d, TheThreadCountChangesNoBit) {
  for (const int64_t channels : {16, 17, 33, 700}) {
    const Problem p = RandomConv(channels, /*taps=*/4, Activation::kSilu);
    const Sequence sequence = RandomSequence(p, /*tokens=*/40, /*seed=*/6);
    const Convolved one = Convolve(p, {sequence}, 1);
    for (const int threads : {2, 3, 8}) {
      const Convolved several = Convolve(p, {sequence}, threads);
      EXPECT_TRUE(SameBits(several.x, one.x)) << channels << ", " << threads << " threads";
      EXPECT_TRUE(SameBits(several.conv_state[0], one.conv_state[0]));
    }
  }
}

TEST(CausalConv1d, LargeInputsStayFiniteUnderSilu) {
  Problem p = RandomConv(/*channels=*/18, /*taps=*/4, Activation::kSilu);
  Sequence sequence = RandomSequence(p, /*tokens=*/8, /*seed=*/7);
  for (float& v : sequence.x_in) v *= 1e6f;
  for (const float v : Convolve(p, {sequence}).x) ASSERT_TRUE(std::isfinite(v));
}

}  // namespace
}  // namespace mambascope::kernels
