#include "server/kernels/cuda/selective_scan.h"

#include <vector>

#include "tests/gpu/device.h"
#include "tests/support/kernel_problems.h"
#include "tests/support/scalar_kernels.h"

namespace mambascope::kernels::cuda {
namespace {

using reference::Pointers;
using reference::SameBits;
using reference::ScanProblem;

struct Scanned {
  std::vector<float> gated, y, delta;
  std::vector<std::vector<float>> states;
};

class SelectiveScanTest : public DeviceTest {
 protected:
  Scanned Run(const ScanProblem& p) {
    const auto x = ToDevice(p.x), dt = ToDevice(p.dt), z = ToDevice(p.z), A = ToDevice(p.A);
    const auto BC = ToDevice(p.BC), D = ToDevice(p.D);
    const auto seq_start = ToDevice(p.seq_start);
    const States states = StatesToDevice(p.states);
    auto gated = OnDevice<float>(p.x.size()), y = OnDevice<float>(p.x.size());
    auto delta = OnDevice<float>(p.x.size());
    ScanInputs in;
    in.d_inner = p.d_inner;
    in.d_state = p.d_state;
    in.x = x.data();
    in.dt = dt.data();
    in.z = z.data();
    in.z_stride = p.z_stride;
    in.A = A.data();
    in.B = BC.data();
    in.C = BC.data() + p.d_state;
    in.bc_stride = p.bc_stride;
    in.D = D.data();
    in.sequences = static_cast<int64_t>(p.states.size());
    in.seq_start = seq_start.data();
    const absl::Status status =
        SelectiveScan(in, {gated.data(), y.data(), delta.data(), states.pointers.data()}, stream());
    EXPECT_TRUE(status.ok()) << status;
    return {ToHost(gated), ToHost(y), ToHost(delta), StatesToHost(states)};
  }
};

// Tokens [begin, end) of a problem with one sequence, from the given state on.
ScanProblem Tokens(const ScanProblem& p, int32_t begin, int32_t end,
                   std::vector<std::vector<float>> states) {
  ScanProblem part = p;
  const auto rows = [&](const std::vector<float>& matrix, int64_t cols) {
    return std::vector<float>(matrix.begin() + begin * cols, matrix.begin() + end * cols);
  };
  part.seq_start = {0, end - begin};
  part.tokens = end - begin;
  part.x = rows(p.x, p.d_inner);
  part.dt = rows(p.dt, p.d_inner);
  part.z = rows(p.z, p.z_stride);
  part.BC = rows(p.BC, p.bc_stride);
  part.states = std::move(states);
  return part;
}

TEST_F(SelectiveScanTest, EqualsTheReference) {
  for (const int64_t d_state : {1, 8, 16, 17, 32, 64, 128, 256}) {
    SCOPED_TRACE(d_state);
    // Around a tile of 16 tokens and a stage of 64; the last block of channels is not full.
    const ScanProblem p({1, 15, 0, 16, 17, 130}, 21, d_state, 1);
    auto states = p.states;
    std::vector<float> gated(p.x.size()), y(p.x.size());
    const auto pointers = Pointers(states);
    Flushed([&] {
      scalar::SelectiveScan(reference::InputsOf(p), {gated.data(), y.data(), pointers});
    });
    const Scanned scanned = Run(p);
    EXPECT_TRUE(LikeReference(scanned.gated, gated));
    EXPECT_TRUE(LikeReference(scanned.y, y));
    for (size_t s = 0; s < states.size(); ++s) {
      EXPECT_TRUE(LikeReference(scanned.states[s], states[s])) << s;
    }
  }
}

TEST_F(SelectiveScanTest, ACutAnywhereGivesTheUncutResult) {
  const ScanProblem whole({150}, 40, 16, 2);
  const Scanned uncut = Run(whole);
  for (const int32_t cut : {1, 15, 16, 63, 64, 65, 149}) {
    SCOPED_TRACE(cut);
    const Scanned head = Run(Tokens(whole, 0, cut, whole.states));
    const Scanned tail = Run(Tokens(whole, cut, 150, head.states));
    std::vector<float> gated = head.gated;
    gated.insert(gated.end(), tail.gated.begin(), tail.gated.end());
    EXPECT_TRUE(SameBits(gated, uncut.gated));
    EXPECT_EQ(tail.states, uncut.states);
  }
}

TEST_F(SelectiveScanTest, StepsGiveThePromptsBits) {
  const ScanProblem whole({20}, 40, 16, 3);
  const Scanned prompt = Run(whole);
  auto states = whole.states;
  std::vector<float> gated;
  for (int32_t token = 0; token < 20; ++token) {
    Scanned step = Run(Tokens(whole, token, token + 1, states));
    states = step.states;
    gated.insert(gated.end(), step.gated.begin(), step.gated.end());
  }
  EXPECT_TRUE(SameBits(gated, prompt.gated));
  EXPECT_EQ(states, prompt.states);
}

TEST_F(SelectiveScanTest, ASequenceDoesNotDependOnItsNeighbours) {
  const ScanProblem packed({33, 90, 7}, 40, 16, 4);
  const Scanned together = Run(packed);
  for (size_t s = 0; s < 3; ++s) {
    const int32_t begin = packed.seq_start[s], end = packed.seq_start[s + 1];
    const Scanned alone = Run(Tokens(packed, begin, end, {packed.states[s]}));
    EXPECT_TRUE(SameBits(alone.gated, {together.gated.data() + begin * packed.d_inner,
                                       static_cast<size_t>((end - begin) * packed.d_inner)}));
    EXPECT_EQ(alone.states[0], together.states[s]);
  }
}

TEST_F(SelectiveScanTest, HandsOutTheDeltaThatItUsed) {
  const ScanProblem p({70}, 24, 16, 5);
  const Scanned scanned = Run(p);
  auto delta = ToDevice(p.dt);
  ASSERT_TRUE(Softplus(delta.data(), nullptr, p.tokens, p.d_inner, delta.data(), stream()).ok());
  EXPECT_TRUE(SameBits(ToHost(delta), scanned.delta));
}

}  // namespace
}  // namespace mambascope::kernels::cuda
