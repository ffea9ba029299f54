#pragma once

#include <memory>
#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/thread_pool.h"
#include "server/model/config.h"
#include "server/model/device.h"
#include "server/model/recurrent_state.h"
#include "server/model/weights.h"

namespace mambascope::model {

struct Piece;

// What a Workspace holds for passes on a device: a stream and buffers. Only its DeviceModel knows
// what is in it.
class DeviceWorkspace {
 public:
  virtual ~DeviceWorkspace() = default;
};

// The part of a MambaModel that lives on a device: a copy of its weights, and the pass over them.
// Threads: const and shareable; each concurrent Forward needs its own workspace.
class DeviceModel {
 public:
  virtual ~DeviceModel() = default;

  // Zeros. kResourceExhausted when the device's memory is short.
  virtual absl::StatusOr<std::unique_ptr<DeviceState>> NewState() const = 0;

  // MambaModel::Forward of pieces that were checked, with states of NewState. Returns when logits
  // and traces are on the host. `workspace` is made when null and grows to the largest pass.
  // kResourceExhausted when the device's memory is short: the pieces' results must not be used, a
  // later pass may succeed.
  virtual absl::Status Forward(ThreadPool& pool, std::unique_ptr<DeviceWorkspace>& workspace,
                               std::span<Piece> pieces, std::span<const int32_t> seq_start,
                               absl::FunctionRef<bool()> stop) const = 0;
};

// Copies the weights to `device`, which is not the CPU. Borrows nothing.
absl::StatusOr<std::unique_ptr<const DeviceModel>> NewDeviceModel(const Device& device,
                                                                  const ModelConfig& config,
                                                                  const WeightViews& weights);

}  // namespace mambascope::model
