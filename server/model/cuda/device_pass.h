#pragma once

#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "server/base/thread_pool.h"
#include "server/model/cuda/pass_workspace.h"
#include "server/model/mamba_model.h"

namespace mambascope::model::cuda {

// DeviceModel::Forward: `weights` are pointers of the device, which is the calling thread's. When
// it returns, OK or not, nothing of the pass runs any more.
absl::Status RunPass(const ModelConfig& config, const WeightViews& weights, ThreadPool& pool,
                     PassWorkspace& workspace, std::span<Piece> pieces,
                     std::span<const int32_t> seq_start, absl::FunctionRef<bool()> stop);

}  // namespace mambascope::model::cuda
