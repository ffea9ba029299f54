#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "server/base/check.h"
#include "server/base/thread_pool.h"
#include "server/kernels/cuda/device.h"
#include "tests/support/reference_kernels.h"

// What every device test needs: a GPU or a visible skip, vectors there and back, and how numbers of
// the device are compared with the reference's.
namespace mambascope::kernels::cuda {

// On the emulator of a machine without a GPU (tests/cuda/emulator), which takes smaller problems.
#ifdef MAMBASCOPE_EMULATED
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

// Made with MAMBASCOPE_CUDA_SAME_BITS the kernels take no function that a CPU lacks, and must give
// the reference's bits; otherwise its numbers.
inline testing::AssertionResult LikeReference(const std::vector<float>& actual,
                                              const std::vector<float>& expected) {
#ifdef MAMBASCOPE_CUDA_SAME_BITS
  return reference::SameBits(actual, expected);
#else
  return reference::Close(actual, std::vector<double>(expected.begin(), expected.end()));
#endif
}

// Runs `work` with subnormal numbers flushed to zero, as the pool does for the CPU's kernels and
// the compiler's switch for the device's.
template <typename Work>
void Flushed(const Work& work) {
  ThreadPool pool(1);
  pool.Run(1, [&](int64_t) { work(); });
}

class DeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (DeviceCount() == 0) GTEST_SKIP() << "no GPU";
    stream_.emplace(*Stream::Create());
  }
  cudaStream_t stream() { return stream_->get(); }

  template <typename T>
  DeviceArray<T> ToDevice(const std::vector<T>& host) {
    auto array = DeviceArray<T>::Create(static_cast<int64_t>(host.size()));
    MS_CHECK(array.ok());
    MS_CHECK(array->CopyFrom(host.data(), array->size(), stream()).ok());
    return *std::move(array);
  }
  // NaN everywhere: what a kernel leaves out must not look like a result.
  template <typename T>
  DeviceArray<T> OnDevice(int64_t size) {
    auto array = DeviceArray<T>::Create(size);
    MS_CHECK(array.ok());
    MS_CHECK(size == 0 ||
             cudaMemsetAsync(array->data(), 0xff, size * sizeof(T), stream()) == cudaSuccess);
    return *std::move(array);
  }
  template <typename T>
  std::vector<T> ToHost(const DeviceArray<T>& array) {
    std::vector<T> host(array.size());
    MS_CHECK(array.CopyTo(host.data(), array.size(), stream()).ok());
    const absl::Status status = stream_->Wait();
    EXPECT_TRUE(status.ok()) << status;
    return host;
  }

  // One state a sequence and the device's list of pointers to them.
  struct States {
    std::vector<DeviceArray<float>> arrays;
    DeviceArray<float*> pointers;
  };
  States StatesToDevice(const std::vector<std::vector<float>>& states) {
    States device;
    std::vector<float*> pointers;
    for (const auto& state : states) {
      device.arrays.push_back(ToDevice(state));
      pointers.push_back(device.arrays.back().data());
    }
    device.pointers = ToDevice(pointers);
    return device;
  }
  std::vector<std::vector<float>> StatesToHost(const States& device) {
    std::vector<std::vector<float>> states;
    for (const auto& array : device.arrays) states.push_back(ToHost(array));
    return states;
  }

 private:
  std::optional<Stream> stream_;
};

}  // namespace mambascope::kernels::cuda
