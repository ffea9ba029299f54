#include "server/model/cuda/sequence_state.h"

#include "server/base/check.h"
#include "server/base/status.h"

namespace mambascope::model::cuda {

using kernels::cuda::DeviceArray;
using kernels::cuda::Stream;

absl::StatusOr<std::unique_ptr<DeviceState>> SequenceState::Create(const ModelConfig& config,
                                                                   const Stream& stream) {
  std::unique_ptr<SequenceState> state(new SequenceState);
  state->sizes_ = SizesOf(config);
  ASSIGN_OR_RETURN(state->values_, DeviceArray<float>::Create(state->sizes_.values()));
  ASSIGN_OR_RETURN(state->pooled_, DeviceArray<double>::Create(state->sizes_.pooled));
  RETURN_IF_ERROR(state->values_.Zero(stream.get()));
  RETURN_IF_ERROR(state->pooled_.Zero(stream.get()));
  RETURN_IF_ERROR(stream.Wait());  // passes run on streams of their own
  return std::unique_ptr<DeviceState>(std::move(state));
}

absl::Status SequenceState::Read(std::span<float> values, std::span<double> pooled) const {
  MS_CHECK(static_cast<int64_t>(values.size()) == values_.size());
  MS_CHECK(static_cast<int64_t>(pooled.size()) == pooled_.size());
  // Every pass has waited for its own stream, so nothing writes here any more.
  ASSIGN_OR_RETURN(const Stream stream, Stream::Create());
  RETURN_IF_ERROR(values_.CopyTo(values.data(), values_.size(), stream.get()));
  RETURN_IF_ERROR(pooled_.CopyTo(pooled.data(), pooled_.size(), stream.get()));
  return stream.Wait();
}

}  // namespace mambascope::model::cuda
