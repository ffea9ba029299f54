#include "server/model/mamba_model.h"

#include <algorithm>
#include <limits>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/huge_pages.h"
#include "server/base/status.h"
#include "server/kernels/gemm.h"
#include "server/kernels/selective_scan.h"
#include "server/kernels/ssd_scan.h"
#include "server/model/config_file.h"
#include "server/model/finite.h"
#include "server/model/mamba_block.h"
#include "server/model/model_head.h"
#include "server/model/vision.h"

namespace mambascope::model {
namespace {

void CheckPiece(const ModelConfig& config, bool on_device, const Piece& piece) {
  MS_CHECK(piece.state != nullptr && piece.state->on_device() == on_device);
  MS_CHECK(piece.embeddings.size() % config.d_model == 0);
  if (!piece.embeddings.empty()) {
    MS_CHECK(piece.tokens.empty() && piece.image.empty());
  } else if (config.family == Family::kVim) {
    const size_t side = config.vision.image_size;
    MS_CHECK(piece.tokens.empty() && piece.image.size() == 3 * side * side);
  } else {
    MS_CHECK(!piece.tokens.empty() && piece.image.empty());
  }
  const int64_t rows = RowsOf(config, piece);
  for (const int32_t token : piece.tokens) MS_CHECK(token >= 0 && token < config.vocabulary);
  for (const int32_t row : piece.logit_rows) {
    MS_CHECK(row >= 0 && row < rows);
    MS_CHECK(!config.mean_pooled() || row == rows - 1);
  }
  MS_CHECK(piece.logit_rows.empty() || piece.logits != nullptr);
  if (piece.trace != nullptr) {
    MS_CHECK(piece.trace->layers.size() ==
             static_cast<size_t>(config.layers) * config.directions());
    MS_CHECK(piece.trace->tokens + rows <= piece.trace->capacity);
  }
}

// The stream that enters the first layer, in workspace.h.
void EmbedPieces(ThreadPool& pool, const ModelConfig& config, const WeightViews& weights,
                 std::span<const Piece> pieces, Workspace& workspace) {
  float* h = workspace.h.data();
  for (const Piece& piece : pieces) {
    if (!piece.image.empty()) {
      EmbedImage(pool, config, weights.patches, piece.image, workspace, h);
      h += RowsOf(config, piece) * config.d_model;
      continue;
    }
    h = std::copy(piece.embeddings.begin(), piece.embeddings.end(), h);
    for (const int32_t token : piece.tokens) {
      kernels::WidenRow(weights.embeddings, token, h);
      h += config.d_model;
    }
  }
}

// Into the traces that keep it: the stream that enters layer `layer`.
void RecordStreams(const ModelConfig& config, std::span<const Piece> pieces,
                   std::span<const int32_t> seq_start, const float* h, int32_t layer) {
  const int64_t d_model = config.d_model;
  for (size_t s = 0; s < pieces.size(); ++s) {
    if (pieces[s].trace == nullptr) continue;
    float* stream = pieces[s].trace->stream(layer);
    if (stream == nullptr) continue;
    std::copy(h + seq_start[s] * d_model, h + seq_start[s + 1] * d_model,
              stream + pieces[s].trace->tokens * d_model);
  }
}

// Everything but delta.
kernels::ScanParameters WithoutDelta(const MambaModel& model, const SequenceTrace& trace,
                                     int32_t layer, int32_t direction, int64_t tokens,
                                     MambaModel::ScanBuffers& buffers) {
  const ModelConfig& config = model.config();
  const BranchWeights& branch = model.weights().layer(layer).branches[direction];
  MS_CHECK(tokens >= 0 && tokens <= trace.tokens);
  const float* selective = trace.layer(layer, direction).selective.data();

  kernels::ScanParameters scan;
  scan.tokens = tokens;
  scan.d_inner = config.maps();
  scan.d_state = config.d_state;
  scan.bc_stride = config.selective_width();
  scan.B = selective + config.selective_width() - 2 * config.groups * config.d_state;
  scan.C = scan.B + config.groups * config.d_state;
  scan.A = branch.A;
  if (config.family == Family::kMamba2) {  // one A a head, the same for every state
    buffers.A.Reserve(config.d_state * scan.d_inner);
    for (int32_t n = 0; n < config.d_state; ++n) {
      std::copy_n(branch.A, scan.d_inner, buffers.A.data() + n * scan.d_inner);
    }
    scan.A = buffers.A.data();
  }
  const size_t numbers = tokens * scan.d_inner;
  if (numbers > buffers.delta.size()) {
    buffers.delta.Reserve(numbers);
    AdviseHugePages(buffers.delta.data(), numbers * sizeof(float));
  }
  scan.delta = buffers.delta.data();
  return scan;
}

// The pass's dt_proj once more: delta before its softplus, bias included. Not of Mamba-2.
void ProjectDelta(ThreadPool& pool, const MambaModel& model, const SequenceTrace& trace,
                  int32_t layer, int32_t direction, int64_t tokens, Array<float>& delta) {
  const ModelConfig& config = model.config();
  const BranchWeights& branch = model.weights().layer(layer).branches[direction];
  const int64_t width = config.selective_width(), d_inner = config.d_inner;
  const float* selective = trace.layer(layer, direction).selective.data();
  kernels::Linear(pool, {selective, tokens, config.dt_rank, width}, branch.dt_proj, branch.dt_bias,
                  {delta.data(), tokens, d_inner, d_inner});
}

}  // namespace

absl::StatusOr<std::unique_ptr<const MambaModel>> MambaModel::Load(const std::string& folder,
                                                                   const Device& device) {
  const std::string path = absl::StrCat(folder, "/config.json");
  ASSIGN_OR_RETURN(const std::string json, ReadConfigFile(path));
  absl::StatusOr<ModelConfig> config = ParseConfig(json);
  if (!config.ok()) {
    return absl::Status(config.status().code(),
                        absl::StrCat(path, ": ", config.status().message()));
  }
  std::unique_ptr<MambaModel> model(new MambaModel);
  model->config_ = *std::move(config);
  ASSIGN_OR_RETURN(model->weights_, Weights::Load(folder, model->config_));
  model->device_ = device;
  if (device.kind != Device::Kind::kCpu) {
    ASSIGN_OR_RETURN(model->on_device_,
                     NewDeviceModel(device, model->config_, model->weights_->views()));
  }
  return model;
}

absl::StatusOr<RecurrentState> MambaModel::NewState() const {
  if (on_device_ == nullptr) return RecurrentState(config_);
  ASSIGN_OR_RETURN(std::unique_ptr<DeviceState> state, on_device_->NewState());
  return RecurrentState(config_, std::move(state));
}

namespace {

// First row of each piece in the pass, then their number.
absl::InlinedVector<int32_t, 17> Starts(const ModelConfig& config, std::span<const Piece> pieces) {
  absl::InlinedVector<int32_t, 17> starts = {0};
  for (const Piece& piece : pieces) {
    const int64_t end = starts.back() + RowsOf(config, piece);
    MS_CHECK(end <= std::numeric_limits<int32_t>::max());
    starts.push_back(static_cast<int32_t>(end));
  }
  return starts;
}

}  // namespace

absl::Status MambaModel::Forward(ThreadPool& pool, Workspace& workspace, std::span<Piece> pieces,
                                 absl::FunctionRef<bool()> stop) const {
  if (pieces.empty()) return absl::OkStatus();
  if (on_device_ != nullptr) {
    for (Piece& piece : pieces) {
      CheckPiece(config_, true, piece);
      piece.nonfinite_layer = -1;
    }
    return on_device_->Forward(pool, workspace.device, pieces, Starts(config_, pieces), stop);
  }
  for (int32_t layer = 0; layer < config_.layers; ++layer) {
    if (stop()) return absl::CancelledError("stopped between layers");
    RETURN_IF_ERROR(ForwardLayers(pool, workspace, pieces, layer, layer + 1));
  }
  return absl::OkStatus();
}

absl::Status MambaModel::ForwardLayers(ThreadPool& pool, Workspace& workspace,
                                       std::span<Piece> pieces, int32_t begin, int32_t end) const {
  const absl::InlinedVector<int32_t, 17> seq_start = Starts(config_, pieces);
  if (on_device_ != nullptr) {
    if (end < config_.layers) return absl::OkStatus();
    return Forward(pool, workspace, pieces, [] { return false; });
  }
  bool traced = false;
  for (const Piece& piece : pieces) traced |= piece.trace != nullptr;
  const PackedSequences packed{pieces, seq_start, traced};
  if (begin == 0) {
    for (Piece& piece : pieces) {
      CheckPiece(config_, false, piece);
      piece.nonfinite_layer = -1;
    }
    ReserveBlock(config_, packed, workspace);
    EmbedPieces(pool, config_, weights_->views(), pieces, workspace);
  }
  for (int32_t layer = begin; layer < end; ++layer) {
    if (traced) RecordStreams(config_, pieces, seq_start, workspace.h.data(), layer);
    RunBlock(pool, config_, weights_->layer(layer), layer, packed, workspace);
    for (size_t s = 0; s < pieces.size(); ++s) {
      const int64_t count = RowsOf(config_, pieces[s]) * config_.d_model;
      if (pieces[s].nonfinite_layer < 0 &&
          !AllFinite(pool, workspace.h.data() + seq_start[s] * int64_t{config_.d_model}, count)) {
        pieces[s].nonfinite_layer = layer;
      }
    }
  }
  if (end < config_.layers) return absl::OkStatus();
  if (traced) RecordStreams(config_, pieces, seq_start, workspace.h.data(), config_.layers);
  for (Piece& piece : pieces) {
    if (piece.trace != nullptr) piece.trace->tokens += RowsOf(config_, piece);
  }
  RunHead(pool, config_, weights_->views(), pieces, seq_start, workspace);
  return absl::OkStatus();
}

void MambaModel::Embed(ThreadPool& pool, std::span<const int32_t> tokens,
                       std::span<const float> image, std::span<float> out) const {
  const size_t d_model = config_.d_model;
  if (!image.empty()) {
    MS_CHECK(out.size() == config_.vision.tokens() * d_model);
    Workspace workspace;
    EmbedImage(pool, config_, weights_->views().patches, image, workspace, out.data());
    return;
  }
  MS_CHECK(out.size() == tokens.size() * d_model);
  for (size_t i = 0; i < tokens.size(); ++i) {
    kernels::WidenRow(weights_->views().embeddings, tokens[i], out.data() + i * d_model);
  }
}

kernels::ScanParameters MambaModel::ScanParametersOf(ThreadPool& pool, const SequenceTrace& trace,
                                                     int32_t layer, int32_t direction,
                                                     int64_t tokens, ScanBuffers& buffers) const {
  const kernels::ScanParameters scan =
      WithoutDelta(*this, trace, layer, direction, tokens, buffers);
  if (config_.family == Family::kMamba2) {
    const float* dt = trace.layer(layer, direction).selective.data();
    kernels::SsdDelta(pool, dt, config_.selective_width(),
                      weights_->layer(layer).branches[direction].dt_bias, config_.delta_min,
                      config_.delta_max, tokens, config_.heads, buffers.delta.data());
  } else {
    ProjectDelta(pool, *this, trace, layer, direction, tokens, buffers.delta);
    const std::span<float> values(buffers.delta.data(), tokens * scan.d_inner);
    kernels::Softplus(pool, values, values);
  }
  return scan;
}

kernels::ScanParameters MambaModel::ReluScanParametersOf(ThreadPool& pool,
                                                         const SequenceTrace& trace, int32_t layer,
                                                         int32_t direction, int64_t tokens,
                                                         ScanBuffers& buffers) const {
  const kernels::ScanParameters scan =
      WithoutDelta(*this, trace, layer, direction, tokens, buffers);
  if (config_.family == Family::kMamba2) {
    const float* dt = trace.layer(layer, direction).selective.data();
    const float* bias = weights_->layer(layer).branches[direction].dt_bias;
    for (int64_t i = 0; i < tokens; ++i, dt += config_.selective_width()) {
      for (int64_t h = 0; h < scan.d_inner; ++h) {
        buffers.delta[i * scan.d_inner + h] = std::max(dt[h] + bias[h], 0.0f);
      }
    }
    return scan;
  }
  ProjectDelta(pool, *this, trace, layer, direction, tokens, buffers.delta);
  pool.Split(tokens * scan.d_inner, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) buffers.delta[i] = std::max(buffers.delta[i], 0.0f);
  });
  return scan;
}

}  // namespace mambascope::model
