#include "server/model/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/model/sequence.h"

namespace mambascope::model {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Device, TheCpuIsAlwaysThereAndTheDefault) {
  const auto device = ParseDevice("cpu");
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_EQ(*device, Device{});
  EXPECT_EQ(Name(*device), "cpu");
  EXPECT_EQ(Name(Device{Device::Kind::kCuda, 3}), "cuda:3");
}

TEST(Device, AWordThatIsNoDeviceIsRefusedWithWhatExists) {
  for (const char* text : {"", "CPU", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda: 1",
                           "cuda:01", "cuda:1 ", "cuda:0x1", "cuda0", "cuda:99999999999"}) {
    const absl::Status status = ParseDevice(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(
        std::string(status.message()),
        AllOf(HasSubstr(std::string("device: '") + text + "'"), HasSubstr("there is: cpu")));
  }
  EXPECT_LT(ParseDevice(std::string(1 << 20, 'x')).status().message().size(), 300u);
}

TEST(Device, ADeviceThatIsNotThereIsNotFound) {
  const absl::Status status = ParseDevice("cuda:9999").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("device: 'cuda:9999' does not exist"), HasSubstr("there is: cpu")));
}

TEST(Device, TheCpuHasNoMemoryOfItsOwn) {
  EXPECT_EQ(MemoryOf(Device{}).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(Describe(Device{}), "");
}

TEST(Device, ANewStateOnTheCpuIsZeros) {
  for (const char* family : {"mamba", "mamba2"}) {
    testing::RandomModel shape;
    shape.family = family;
    if (shape.family == "mamba2") shape.d_model = 15;  // d_inner is 2 d_model
    const std::unique_ptr<const MambaModel> model = Random(shape);
    EXPECT_EQ(model->device(), Device{});
    auto state = model->NewState();
    ASSERT_TRUE(state.ok()) << state.status();
    EXPECT_FALSE(state->on_device());
    const ModelConfig& config = model->config();
    const auto zeros = [](const float* values, int64_t count) {
      return std::all_of(values, values + count, [](float value) { return value == 0; });
    };
    for (int32_t l = 0; l < config.layers; ++l) {
      EXPECT_TRUE(zeros(state->conv_state(l), (config.d_conv - 1) * config.conv_channels()));
      EXPECT_TRUE(zeros(state->ssm_state(l), int64_t{config.d_state} * config.d_inner));
    }
    EXPECT_EQ(state->pooled_tokens, 0);
    EXPECT_TRUE(state->pooled().empty());
  }
}

}  // namespace
}  // namespace mambascope::model
