#include "server/model/recurrent_state.h"

#include <algorithm>
#include <utility>

#include "server/base/check.h"
#include "server/base/status.h"

namespace mambascope::model {
namespace {

template <typename T>
Array<T> CopyOf(const Array<T>& values) {
  Array<T> copy(values.size());
  std::copy(values.begin(), values.end(), copy.begin());
  return copy;
}

}  // namespace

StateSizes SizesOf(const ModelConfig& config) {
  StateSizes sizes;
  sizes.conv = static_cast<int64_t>(config.d_conv - 1) * config.conv_channels();
  sizes.ssm = static_cast<int64_t>(config.d_state) * config.d_inner;
  sizes.scans = static_cast<int64_t>(config.layers) * config.directions();
  sizes.pooled = config.mean_pooled() ? config.d_model : 0;
  return sizes;
}

RecurrentState::RecurrentState(const ModelConfig& config, std::unique_ptr<DeviceState> device)
    : directions_(config.directions()), sizes_(SizesOf(config)), device_(std::move(device)) {}

RecurrentState::RecurrentState(const ModelConfig& config) : RecurrentState(config, nullptr) {
  values_ = Array<float>(sizes_.values());
  pooled_ = Array<double>(sizes_.pooled);
  std::fill(values_.begin(), values_.end(), 0.0f);
  std::fill(pooled_.begin(), pooled_.end(), 0.0);
}

RecurrentState RecurrentState::Copy() const {
  MS_CHECK(!on_device());
  return *ToHost();
}

absl::StatusOr<RecurrentState> RecurrentState::ToHost() const {
  RecurrentState copy;
  copy.directions_ = directions_;
  copy.sizes_ = sizes_;
  copy.pooled_tokens = pooled_tokens;
  if (device_ == nullptr) {
    copy.values_ = CopyOf(values_);
    copy.pooled_ = CopyOf(pooled_);
  } else {
    copy.values_ = Array<float>(sizes_.values());
    copy.pooled_ = Array<double>(sizes_.pooled);
    RETURN_IF_ERROR(device_->Read(copy.values_, copy.pooled_));
  }
  return copy;
}

float* RecurrentState::conv_state(int32_t layer, int32_t direction) {
  MS_CHECK(!on_device());
  return values_.data() + (int64_t{layer} * directions_ + direction) * (sizes_.conv + sizes_.ssm);
}

float* RecurrentState::ssm_state(int32_t layer, int32_t direction) {
  return conv_state(layer, direction) + sizes_.conv;
}

std::span<double> RecurrentState::pooled() {
  MS_CHECK(!on_device());
  return pooled_;
}

int64_t RecurrentState::Bytes(const ModelConfig& config) {
  const StateSizes sizes = SizesOf(config);
  return sizes.values() * static_cast<int64_t>(sizeof(float)) +
         sizes.pooled * static_cast<int64_t>(sizeof(double));
}

}  // namespace mambascope::model
