#include "server/model/recurrent_state.h"

#include <algorithm>
#include <utility>

#include "server/base/check.h"
#include "server/base/status.h"

namespace mambascope::model {
namespace {

int64_t ConvSize(const ModelConfig& config) {
  return static_cast<int64_t>(config.d_conv - 1) * config.conv_channels();
}

int64_t SsmSize(const ModelConfig& config) {
  return static_cast<int64_t>(config.d_state) * config.d_inner;
}

int64_t Scans(const ModelConfig& config) {
  return static_cast<int64_t>(config.layers) * config.directions();
}

int64_t PooledSize(const ModelConfig& config) { return config.mean_pooled() ? config.d_model : 0; }

template <typename T>
Array<T> CopyOf(const Array<T>& values) {
  Array<T> copy(values.size());
  std::copy(values.begin(), values.end(), copy.begin());
  return copy;
}

}  // namespace

RecurrentState::RecurrentState(const ModelConfig& config, std::unique_ptr<DeviceState> device)
    : directions_(config.directions()),
      conv_size_(ConvSize(config)),
      ssm_size_(SsmSize(config)),
      scans_(Scans(config)),
      pooled_size_(PooledSize(config)),
      device_(std::move(device)) {}

RecurrentState::RecurrentState(const ModelConfig& config) : RecurrentState(config, nullptr) {
  values_ = Array<float>(scans_ * (conv_size_ + ssm_size_));
  pooled_ = Array<double>(pooled_size_);
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
  copy.conv_size_ = conv_size_;
  copy.ssm_size_ = ssm_size_;
  copy.scans_ = scans_;
  copy.pooled_size_ = pooled_size_;
  copy.pooled_tokens = pooled_tokens;
  if (device_ == nullptr) {
    copy.values_ = CopyOf(values_);
    copy.pooled_ = CopyOf(pooled_);
  } else {
    copy.values_ = Array<float>(scans_ * (conv_size_ + ssm_size_));
    copy.pooled_ = Array<double>(pooled_size_);
    RETURN_IF_ERROR(device_->Read(copy.values_, copy.pooled_));
  }
  return copy;
}

float* RecurrentState::conv_state(int32_t layer, int32_t direction) {
  MS_CHECK(!on_device());
  return values_.data() + (int64_t{layer} * directions_ + direction) * (conv_size_ + ssm_size_);
}

float* RecurrentState::ssm_state(int32_t layer, int32_t direction) {
  return conv_state(layer, direction) + conv_size_;
}

std::span<double> RecurrentState::pooled() {
  MS_CHECK(!on_device());
  return pooled_;
}

int64_t RecurrentState::Bytes(const ModelConfig& config) {
  return Scans(config) * (ConvSize(config) + SsmSize(config)) *
             static_cast<int64_t>(sizeof(float)) +
         PooledSize(config) * static_cast<int64_t>(sizeof(double));
}

}  // namespace mambascope::model
