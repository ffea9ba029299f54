#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/array.h"
#include "server/model/config.h"

namespace mambascope::model {

// Elements of a state. `scans`: layers x directions, each with a conv_state, then an ssm_state.
struct StateSizes {
  int64_t conv = 0, ssm = 0;  // of one scan
  int64_t scans = 0;
  int64_t pooled = 0;  // doubles

  int64_t values() const { return scans * (conv + ssm); }
};
StateSizes SizesOf(const ModelConfig& config);

// The numbers of a state in a device's memory, in the layout that they have on the host. Freed with
// the object, on any thread.
class DeviceState {
 public:
  virtual ~DeviceState() = default;
  // Copies all of them to the host, and blocks until they are there.
  virtual absl::Status Read(std::span<float> values, std::span<double> pooled) const = 0;
};

// Everything a sequence carries from one token to the next, of all layers; fp32 always, because
// rounding the state drifts on long inputs. Starts as zeros, "before the first token". Lies where
// its model runs (MambaModel::NewState). Move only; costly copies have a name.
class RecurrentState {
 public:
  explicit RecurrentState(const ModelConfig& config);  // on the host
  RecurrentState(const ModelConfig& config, std::unique_ptr<DeviceState> device);

  RecurrentState Copy() const;                    // of a state on the host
  absl::StatusOr<RecurrentState> ToHost() const;  // a copy, wherever it lies
  // The part on a device, or null: then the accessors below mean the host's memory.
  DeviceState* device() { return device_.get(); }
  bool on_device() const { return device_ != nullptr; }
  // [d_conv - 1, conv_channels] the last convolution inputs, oldest first. `direction` 1 is Vim's
  // backward scan.
  float* conv_state(int32_t layer, int32_t direction = 0);
  // [d_state, d_inner]; Mamba-2: [heads, d_state, head_dim]
  float* ssm_state(int32_t layer, int32_t direction = 0);
  // Of models that pool the mean: the sum of the normalised outputs so far, [d_model], and of how
  // many; double, added token by token, so that a cut changes no bit. Empty otherwise.
  std::span<double> pooled();
  int64_t pooled_tokens = 0;

  static int64_t Bytes(const ModelConfig& config);

 private:
  RecurrentState() = default;

  int32_t directions_ = 1;
  StateSizes sizes_;
  Array<float> values_;  // per layer and direction: conv_state, then ssm_state
  Array<double> pooled_;
  std::unique_ptr<DeviceState> device_;  // then the arrays above are empty
};

}  // namespace mambascope::model
