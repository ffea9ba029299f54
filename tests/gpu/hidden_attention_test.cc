#include "server/kernels/cuda/hidden_attention.h"

#include <vector>

#include "tests/gpu/device.h"
#include "tests/support/reference_attention.h"
#include "tests/support/scalar_kernels.h"

namespace mambascope::kernels::cuda {
namespace {

using reference::Close;
using reference::Random;
using reference::RandomScan;
using reference::ReferenceAttention;
using reference::SameBits;

class HiddenAttention : public DeviceTest {
 protected:
  // The scan's buffers on the device; the last one made stays until the next.
  ScanParameters ToDeviceScan(const RandomScan& scan) {
    delta_ = ToDevice(scan.delta);
    A_ = ToDevice(scan.A);
    bc_ = ToDevice(scan.bc);
    ScanParameters device = scan.parameters;
    device.delta = delta_.data();
    device.A = A_.data();
    device.B = bc_.data() + (scan.parameters.B - scan.bc.data());
    device.C = bc_.data() + (scan.parameters.C - scan.bc.data());
    return device;
  }

  std::vector<float> Mean(Gemm& gemm, const RandomScan& scan) {
    const ScanParameters device = ToDeviceScan(scan);
    auto scratch = OnDevice<char>(MeanMapScratchBytes(device));
    auto map = OnDevice<float>(device.tokens * device.tokens);
    const absl::Status status = MeanMap(gemm, device, scratch.data(), map.data(), stream());
    EXPECT_TRUE(status.ok()) << status;
    return ToHost(map);
  }

 private:
  DeviceArray<float> delta_, A_, bc_;
};

TEST_F(HiddenAttention, TheMeanMapEqualsTheDefinition) {
  auto gemm = Gemm::Create();
  ASSERT_TRUE(gemm.ok()) << gemm.status();
  // Around runs of 16 tokens: inside one, whole pairs, pairs that the end cuts.
  for (const int64_t tokens : {1, 15, 16, 17, 48, 64, 100, 129, 200}) {
    for (const int64_t d_state : {1, 16, 20}) {
      if (kEmulated && tokens * d_state > 1000) continue;
      SCOPED_TRACE(testing::Message() << tokens << " tokens, " << d_state << " states");
      const RandomScan scan(tokens, 24, d_state, 1);
      const ReferenceAttention attention(scan.parameters);
      EXPECT_TRUE(Close(Mean(*gemm, scan), attention.Mean(attention.AllChannels())));
    }
  }
}

TEST_F(HiddenAttention, TheMeanMapStaysFiniteAndExactForFastAndSlowDecays) {
  auto gemm = Gemm::Create();
  ASSERT_TRUE(gemm.ok()) << gemm.status();
  for (const auto& [slowest, fastest] : {std::pair{1e-6f, 1e-5f}, std::pair{1.0f, 20.0f}}) {
    const RandomScan scan(150, 10, 16, 2, slowest, fastest);
    const ReferenceAttention attention(scan.parameters);
    EXPECT_TRUE(Close(Mean(*gemm, scan), attention.Mean(attention.AllChannels())));
  }
}

TEST_F(HiddenAttention, TheMeanMapIsTheSameEachTime) {
  auto gemm = Gemm::Create();
  ASSERT_TRUE(gemm.ok()) << gemm.status();
  const RandomScan scan(kEmulated ? 50 : 333, kEmulated ? 40 : 300, 16, 3);
  EXPECT_TRUE(SameBits(Mean(*gemm, scan), Mean(*gemm, scan)));
}

TEST_F(HiddenAttention, TargetRowsAreRowsOfTheChannelsMaps) {
  for (const int64_t d_state : {1, 16, 40, 128}) {
    const RandomScan scan(75, 13, d_state, 4);
    const ReferenceAttention attention(scan.parameters);
    for (const int64_t target : {0, 16, 64, 74}) {
      SCOPED_TRACE(testing::Message() << d_state << " states, target " << target);
      const ScanParameters device = ToDeviceScan(scan);
      auto rows = OnDevice<float>(75 * 13);
      ASSERT_TRUE(TargetRows(device, target, false, rows.data(), stream()).ok());
      std::vector<double> expected(75 * 13);
      for (int64_t d = 0; d < 13; ++d) {
        const std::vector<double> map = attention.ChannelMap(d);
        for (int64_t j = 0; j <= target; ++j) expected[j * 13 + d] = map[target * 75 + j];
      }
      EXPECT_TRUE(Close(ToHost(rows), expected));
    }
  }
}

TEST_F(HiddenAttention, TheQuirkLeavesTheTargetsDecayAndSelfEntryOut) {
  const RandomScan scan(40, 9, 16, 5);
  const ReferenceAttention attention(scan.parameters);
  constexpr int64_t kTarget = 31;
  const ScanParameters device = ToDeviceScan(scan);
  auto rows = OnDevice<float>(40 * 9);
  ASSERT_TRUE(TargetRows(device, kTarget, true, rows.data(), stream()).ok());
  std::vector<double> expected(40 * 9);
  for (int64_t d = 0; d < 9; ++d) {
    for (int64_t j = 0; j < kTarget; ++j) {
      for (int64_t n = 0; n < 16; ++n) {
        expected[j * 9 + d] +=
            attention.Q(n, kTarget) * attention.Decay(n, d, kTarget - 1, j) * attention.K(n, d, j);
      }
    }
  }
  EXPECT_TRUE(Close(ToHost(rows), expected));
}

TEST_F(HiddenAttention, BothDirectionsEqualTheReference) {
  constexpr int64_t kTokens = kEmulated ? 40 : 150;  // more than a stage of 32
  for (const int64_t d_state : {16, 24}) {
    const RandomScan scan(kTokens, 530, d_state, 6);  // means of rows by a whole block
    const std::vector<float> v = Random(kTokens, 7), wide_v = Random(kTokens * 530, 8);
    std::vector<float> rows(kTokens * 530), expected_rows = rows, adjoint(kTokens),
                                            forward(kTokens);
    Flushed([&] {
      scalar::AdjointScan(scan.parameters, wide_v.data(), 530, true, expected_rows.data());
      scalar::AdjointScan(scan.parameters, v.data(), 1, false, rows.data());
      scalar::RowMeans(rows.data(), kTokens, 530, adjoint.data());
      scalar::ForwardScan(scan.parameters, v.data(), rows.data());
      scalar::RowMeans(rows.data(), kTokens, 530, forward.data());
    });
    const ScanParameters device = ToDeviceScan(scan);
    const auto device_v = ToDevice(v), device_wide = ToDevice(wide_v);
    auto scratch = OnDevice<float>(kTokens * 530), out = OnDevice<float>(kTokens);
    ASSERT_TRUE(AdjointScan(device, device_wide.data(), 530, true, scratch.data(), stream()).ok());
    EXPECT_TRUE(LikeReference(ToHost(scratch), expected_rows));
    ASSERT_TRUE(MeanAdjoint(device, device_v.data(), scratch.data(), out.data(), stream()).ok());
    EXPECT_TRUE(LikeReference(ToHost(out), adjoint));
    ASSERT_TRUE(MeanForward(device, device_v.data(), scratch.data(), out.data(), stream()).ok());
    EXPECT_TRUE(LikeReference(ToHost(out), forward));
  }
}

}  // namespace
}  // namespace mambascope::kernels::cuda
