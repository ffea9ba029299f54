#include "server/kernels/cuda/causal_conv1d.h"

#include <vector>

#include "tests/gpu/device.h"
#include "tests/support/kernel_problems.h"
#include "tests/support/scalar_kernels.h"

namespace mambascope::kernels::cuda {
namespace {

using reference::ConvProblem;
using reference::Pointers;
using reference::SameBits;

struct Convolved {
  std::vector<float> x;
  std::vector<std::vector<float>> states;
};

class Convolution : public DeviceTest {
 protected:
  Convolved Run(const ConvProblem& p, Activation activation = Activation::kSilu) {
    const auto x_in = ToDevice(p.x_in), weight = ToDevice(p.weight), bias = ToDevice(p.bias);
    const auto seq_start = ToDevice(p.seq_start);
    const States states = StatesToDevice(p.states);
    auto x = OnDevice<float>(p.tokens * p.channels);
    ConvInputs in;
    in.x_in = x_in.data();
    in.x_stride = p.x_stride;
    in.channels = p.channels;
    in.taps = p.taps;
    in.weight = weight.data();
    in.bias = bias.data();
    in.activation = activation;
    in.sequences = static_cast<int64_t>(p.states.size());
    in.tokens = p.tokens;
    in.seq_start = seq_start.data();
    const absl::Status status = CausalConv1d(in, {x.data(), states.pointers.data()}, stream());
    EXPECT_TRUE(status.ok()) << status;
    return {ToHost(x), StatesToHost(states)};
  }
};

TEST_F(Convolution, EqualsTheReference) {
  for (const int64_t taps : {1, 2, 4, 5}) {
    for (const Activation f : {Activation::kSilu, Activation::kRelu, Activation::kIdentity}) {
      // Sequences shorter than the window, as long as a thread's tile, and across several.
      const ConvProblem p({1, 2, 16, 0, 3, 70, 1}, 200, taps, 1);
      auto states = p.states;
      std::vector<float> x(p.tokens * p.channels);
      const auto pointers = Pointers(states);
      Flushed([&] { scalar::CausalConv1d(reference::InputsOf(p, f), {x.data(), pointers}); });
      const Convolved convolved = Run(p, f);
      EXPECT_TRUE(LikeReference(convolved.x, x)) << taps;
      EXPECT_EQ(convolved.states, states) << taps;
    }
  }
}

TEST_F(Convolution, ACutGivesTheUncutResult) {
  const ConvProblem whole({50}, 130, 4, 2);
  const Convolved uncut = Run(whole);
  for (const int32_t cut : {1, 2, 15, 16, 49}) {
    SCOPED_TRACE(cut);
    ConvProblem head = whole, tail = whole;
    head.seq_start = {0, cut};
    head.tokens = cut;
    head.x_in.resize(cut * whole.x_stride);
    const Convolved first = Run(head);
    tail.seq_start = {0, 50 - cut};
    tail.tokens = 50 - cut;
    tail.x_in.erase(tail.x_in.begin(), tail.x_in.begin() + cut * whole.x_stride);
    tail.states = first.states;
    const Convolved second = Run(tail);
    std::vector<float> joined = first.x;
    joined.insert(joined.end(), second.x.begin(), second.x.end());
    EXPECT_TRUE(SameBits(joined, uncut.x));
    EXPECT_EQ(second.states, uncut.states);
  }
}

}  // namespace
}  // namespace mambascope::kernels::cuda
