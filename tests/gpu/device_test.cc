#include "tests/gpu/device.h"

namespace mambascope::kernels::cuda {
namespace {

class Device : public DeviceTest {};

// Also without a GPU: the server must start where there is none.
TEST(DeviceChoice, ADeviceThatIsNotThereIsAnInvalidArgument) {
  const absl::Status status = UseDevice(DeviceCount());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST_F(Device, DescribesItself) {
  const auto info = GetDeviceInfo(0);
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_GE(info->major, 8);
  EXPECT_GT(info->multiprocessors, 0);
  const auto memory = GetMemoryInfo();
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_LE(memory->free_bytes, memory->total_bytes);
}

TEST_F(Device, MoreMemoryThanThereIsIsResourceExhaustedAndHarmless) {
  const auto memory = GetMemoryInfo();
  ASSERT_TRUE(memory.ok());
  const auto array = DeviceArray<char>::Create(memory->total_bytes * 2);
  EXPECT_EQ(array.status().code(), absl::StatusCode::kResourceExhausted) << array.status();
  EXPECT_TRUE(LaunchStatus("the next kernel").ok());
  EXPECT_TRUE(DeviceArray<char>::Create(1 << 20).ok());
}

TEST_F(Device, VectorsComeBackAsTheyWent) {
  const std::vector<float> numbers = {1, 2, 3};
  EXPECT_EQ(ToHost(ToDevice(numbers)), numbers);
}

}  // namespace
}  // namespace mambascope::kernels::cuda
