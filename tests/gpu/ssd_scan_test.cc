#include "server/kernels/cuda/ssd_scan.h"

#include <vector>

#include "tests/gpu/device.h"
#include "tests/support/kernel_problems.h"
#include "tests/support/scalar_kernels.h"

namespace mambascope::kernels::cuda {
namespace {

using reference::Pointers;
using reference::SameBits;
using reference::SsdProblem;

struct Scanned {
  std::vector<float> gated, y;
  std::vector<std::vector<float>> states;
};

class SsdScanTest : public DeviceTest {
 protected:
  // Sequences [first, last) of the problem, packed alone.
  Scanned Run(const SsdProblem& p, size_t first, size_t last) {
    const auto xBC = ToDevice(p.xBC), dt = ToDevice(p.dt), dt_bias = ToDevice(p.dt_bias);
    const auto A = ToDevice(p.A), D = ToDevice(p.D), z = ToDevice(p.z);
    const int64_t begin = p.seq_start[first], end = p.seq_start[last];
    std::vector<int32_t> starts;
    for (size_t s = first; s <= last; ++s) starts.push_back(p.seq_start[s] - p.seq_start[first]);
    const auto seq_start = ToDevice(starts);
    const States states = StatesToDevice({p.states.begin() + first, p.states.begin() + last});
    auto gated = OnDevice<float>((end - begin) * p.channels);
    auto y = OnDevice<float>((end - begin) * p.channels);
    SsdInputs in;
    in.heads = p.heads;
    in.head_dim = p.head_dim;
    in.groups = p.groups;
    in.d_state = p.d_state;
    in.x = xBC.data() + begin * p.xbc_stride;
    in.B = in.x + p.channels;
    in.C = in.B + p.groups * p.d_state;
    in.xbc_stride = p.xbc_stride;
    in.dt = dt.data() + begin * p.dt_stride;
    in.dt_stride = p.dt_stride;
    in.dt_bias = dt_bias.data();
    in.delta_min = p.delta_min;
    in.delta_max = p.delta_max;
    in.A = A.data();
    in.D = D.data();
    in.z = z.data() + begin * p.z_stride;
    in.z_stride = p.z_stride;
    in.sequences = static_cast<int64_t>(last - first);
    in.seq_start = seq_start.data();
    const absl::Status status =
        SsdScan(in, {gated.data(), y.data(), states.pointers.data()}, stream());
    EXPECT_TRUE(status.ok()) << status;
    return {ToHost(gated), ToHost(y), StatesToHost(states)};
  }
};

TEST_F(SsdScanTest, EqualsTheReference) {
  for (const int64_t d_state : {5, 16, 64, 128, 256}) {
    for (const int64_t head_dim : {4, 20, 64}) {
      const SsdProblem p({1, 16, 0, 40}, {4, head_dim, 2, d_state}, 1);
      auto states = p.states;
      std::vector<float> gated(p.tokens * p.channels), y(p.tokens * p.channels);
      const auto pointers = Pointers(states);
      Flushed([&] { scalar::SsdScan(reference::InputsOf(p), {gated.data(), y.data(), pointers}); });
      const Scanned scanned = Run(p, 0, 4);
      EXPECT_TRUE(LikeReference(scanned.gated, gated)) << d_state << ' ' << head_dim;
      EXPECT_TRUE(LikeReference(scanned.y, y)) << d_state << ' ' << head_dim;
      for (size_t s = 0; s < states.size(); ++s) {
        EXPECT_TRUE(LikeReference(scanned.states[s], states[s])) << d_state << ' ' << head_dim;
      }
    }
  }
}

TEST_F(SsdScanTest, ASequenceDoesNotDependOnItsNeighbours) {
  const SsdProblem p({33, 20, 1}, {6, 64, 1, 128}, 2);
  const Scanned together = Run(p, 0, 3);
  for (size_t s = 0; s < 3; ++s) {
    const Scanned alone = Run(p, s, s + 1);
    EXPECT_TRUE(SameBits(
        alone.gated, {together.gated.data() + p.seq_start[s] * p.channels, alone.gated.size()}));
    EXPECT_EQ(alone.states[0], together.states[s]);
  }
}

TEST_F(SsdScanTest, ACutAnywhereGivesTheUncutResult) {
  for (const int32_t cut : {1, 15, 16, 17, 39}) {
    SsdProblem whole({40}, {3, 24, 1, 128}, 3);
    const Scanned uncut = Run(whole, 0, 1);
    SsdProblem pieces = whole;  // the same tokens as two sequences, run one after the other
    pieces.seq_start = {0, cut, 40};
    pieces.states.push_back(whole.states[0]);
    const Scanned head = Run(pieces, 0, 1);
    pieces.states[1] = head.states[0];
    const Scanned tail = Run(pieces, 1, 2);
    std::vector<float> gated = head.gated;
    gated.insert(gated.end(), tail.gated.begin(), tail.gated.end());
    EXPECT_TRUE(SameBits(gated, uncut.gated)) << cut;
    EXPECT_EQ(tail.states, uncut.states) << cut;
  }
}

}  // namespace
}  // namespace mambascope::kernels::cuda
