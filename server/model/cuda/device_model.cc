#include "server/model/cuda/device_model.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/kernels/cuda/device.h"
#include "server/model/cuda/device_pass.h"
#include "server/model/cuda/device_weights.h"
#include "server/model/cuda/sequence_state.h"

namespace mambascope::model::cuda {
namespace {

using kernels::cuda::Stream;
using kernels::cuda::UseDevice;

class CudaModel : public DeviceModel {
 public:
  CudaModel(int index, const ModelConfig& config, DeviceWeights weights, Stream stream)
      : index_(index), config_(config), weights_(std::move(weights)), stream_(std::move(stream)) {}

  absl::StatusOr<std::unique_ptr<DeviceState>> NewState() const override {
    RETURN_IF_ERROR(UseDevice(index_));
    return SequenceState::Create(config_, stream_);
  }

  absl::Status Forward(ThreadPool& pool, std::unique_ptr<DeviceWorkspace>& workspace,
                       std::span<Piece> pieces, std::span<const int32_t> seq_start,
                       absl::FunctionRef<bool()> stop) const override {
    RETURN_IF_ERROR(UseDevice(index_));
    auto* buffers = static_cast<PassWorkspace*>(workspace.get());
    if (buffers == nullptr || buffers->index != index_) {
      workspace = nullptr;  // one of another device gives its memory back first
      ASSIGN_OR_RETURN(std::unique_ptr<PassWorkspace> made, PassWorkspace::Create(index_));
      buffers = made.get();
      workspace = std::move(made);
    }
    return RunPass(config_, weights_.views(), pool, *buffers, pieces, seq_start, stop);
  }

 private:
  const int index_;
  const ModelConfig config_;
  const DeviceWeights weights_;
  const Stream stream_;  // of what is not a pass
};

}  // namespace

int DeviceCount() { return kernels::cuda::DeviceCount(); }

std::string Describe(int index) {
  const auto info = kernels::cuda::GetDeviceInfo(index);
  if (!info.ok()) return "";
  return absl::StrCat(info->name, ", compute ", info->major, ".", info->minor, ", ",
                      info->multiprocessors, " multiprocessors");
}

absl::StatusOr<DeviceMemory> MemoryOf(int index) {
  RETURN_IF_ERROR(UseDevice(index));
  ASSIGN_OR_RETURN(const kernels::cuda::MemoryInfo info, kernels::cuda::GetMemoryInfo());
  DeviceMemory memory;
  memory.total_bytes = static_cast<int64_t>(info.total_bytes);
  memory.used_bytes = static_cast<int64_t>(info.total_bytes - info.free_bytes);
  return memory;
}

absl::StatusOr<std::unique_ptr<const DeviceModel>> NewModel(int index, const ModelConfig& config,
                                                            const WeightViews& weights) {
  RETURN_IF_ERROR(UseDevice(index));
  ASSIGN_OR_RETURN(Stream stream, Stream::Create());
  ASSIGN_OR_RETURN(DeviceWeights on_device, DeviceWeights::Upload(config, weights, stream));
  return std::make_unique<const CudaModel>(index, config, std::move(on_device), std::move(stream));
}

}  // namespace mambascope::model::cuda
