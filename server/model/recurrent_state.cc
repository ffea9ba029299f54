#include "server/model/recurrent_state.h"

#include <algorithm>

namespace mambascope::model {
namespace {

int64_t ConvSize(const ModelConfig& config) {
  return static_cast<int64_t>(config.d_conv - 1) * config.d_inner;
}

int64_t SsmSize(const ModelConfig& config) {
  return static_cast<int64_t>(config.d_state) * config.d_inner;
}

}  // namespace

RecurrentState::RecurrentState(const ModelConfig& config)
    : conv_size_(ConvSize(config)),
      ssm_size_(SsmSize(config)),
      values_(config.layers * (conv_size_ + ssm_size_)) {
  std::fill(values_.begin(), values_.end(), 0.0f);
}

RecurrentState RecurrentState::Copy() const {
  RecurrentState copy;
  copy.conv_size_ = conv_size_;
  copy.ssm_size_ = ssm_size_;
  copy.values_ = Array<float>(values_.size());
  std::copy(values_.begin(), values_.end(), copy.values_.begin());
  return copy;
}

float* RecurrentState::conv_state(int32_t layer) {
  return values_.data() + layer * (conv_size_ + ssm_size_);
}

float* RecurrentState::ssm_state(int32_t layer) { return conv_state(layer) + conv_size_; }

int64_t RecurrentState::Bytes(const ModelConfig& config) {
  return config.layers * (ConvSize(config) + SsmSize(config)) * static_cast<int64_t>(sizeof(float));
}

}  // namespace mambascope::model
