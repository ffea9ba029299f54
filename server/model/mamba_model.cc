#include "server/model/mamba_model.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/status.h"
#include "server/kernels/gemm.h"
#include "server/kernels/rms_norm.h"
#include "server/kernels/selective_scan.h"
#include "server/model/config_file.h"
#include "server/model/finite.h"
#include "server/model/mamba_block.h"

namespace mambascope::model {
namespace {

// Below this many numbers, waking the pool costs more than looking at them.
constexpr int64_t kFewNumbers = 1 << 16;

bool AllFiniteOn(ThreadPool& pool, const float* values, int64_t count) {
  if (count <= kFewNumbers) return AllFinite(values, count);
  std::atomic<bool> finite = true;
  pool.Split(count, 16, [&](int64_t begin, int64_t end) {
    if (!AllFinite(values + begin, end - begin)) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load(std::memory_order_relaxed);
}

void CheckPiece(const ModelConfig& config, const Piece& piece) {
  MS_CHECK(!piece.tokens.empty() && piece.state != nullptr);
  for (const int32_t token : piece.tokens) MS_CHECK(token >= 0 && token < config.vocabulary);
  for (const int32_t row : piece.logit_rows) {
    MS_CHECK(row >= 0 && static_cast<size_t>(row) < piece.tokens.size());
  }
  MS_CHECK(piece.logit_rows.empty() || piece.logits != nullptr);
  if (piece.trace != nullptr) {
    const size_t width = config.dt_rank + 2 * config.d_state;
    MS_CHECK(piece.trace->layers.size() == static_cast<size_t>(config.layers));
    MS_CHECK((piece.trace->tokens + piece.tokens.size()) * width <=
             piece.trace->layers[0].x_dbl.size());
  }
}

// Final norm and vocabulary matrix, on the wanted rows of all pieces at once: the matrix is then
// read once.
void RunHead(ThreadPool& pool, const ModelConfig& config, const Weights& weights,
             std::span<Piece> pieces, std::span<const int32_t> seq_start, Workspace& workspace) {
  const int64_t d_model = config.d_model, vocabulary = config.vocabulary;
  int64_t rows = 0, asking = 0;
  for (const Piece& piece : pieces) {
    rows += piece.logit_rows.size();
    asking += piece.logit_rows.empty() ? 0 : 1;
  }
  for (Piece& piece : pieces) {
    if (piece.logits != nullptr) piece.logits->resize(piece.logit_rows.size() * vocabulary);
  }
  if (rows == 0) return;

  workspace.head_rows.Reserve(rows * d_model);
  float* gathered = workspace.head_rows.data();
  for (size_t s = 0; s < pieces.size(); ++s) {
    for (const int32_t row : pieces[s].logit_rows) {
      std::copy_n(workspace.h.data() + (seq_start[s] + row) * d_model, d_model, gathered);
      gathered += d_model;
    }
  }
  float* normed = workspace.head_rows.data();
  kernels::RmsNorm(pool, normed, weights.norm_f(), config.norm_eps, rows, d_model, normed);

  // A piece that asks alone, perhaps for a long prompt's every row, gets them in place.
  float* logits = nullptr;
  if (asking == 1) {
    for (Piece& piece : pieces) {
      if (!piece.logit_rows.empty()) logits = piece.logits->data();
    }
  } else {
    workspace.logits.Reserve(rows * vocabulary);
    logits = workspace.logits.data();
  }
  kernels::Linear(pool, {normed, rows, d_model, d_model},
                  {weights.head(), vocabulary, d_model, d_model}, nullptr,
                  {logits, rows, vocabulary, vocabulary});

  for (Piece& piece : pieces) {
    const int64_t count = piece.logit_rows.size() * vocabulary;
    if (count == 0) continue;
    if (piece.nonfinite_layer < 0 && !AllFiniteOn(pool, logits, count)) {
      piece.nonfinite_layer = config.layers;
    }
    if (asking > 1) std::copy_n(logits, count, piece.logits->data());
    logits += count;
  }
}

// The parameters with `delta` before its softplus: the dt_proj of the pass, once more.
kernels::ScanParameters BeforeSoftplus(ThreadPool& pool, const MambaModel& model,
                                       const SequenceTrace& trace, int32_t layer, int64_t tokens,
                                       Array<float>& delta) {
  const ModelConfig& config = model.config();
  const LayerWeights& weights = model.weights().layer(layer);
  const int64_t d_inner = config.d_inner, dt_rank = config.dt_rank;
  const int64_t width = dt_rank + 2 * config.d_state;
  MS_CHECK(tokens >= 0 && tokens <= trace.tokens);
  const float* x_dbl = trace.layers[layer].x_dbl.data();

  delta.Reserve(tokens * d_inner);
  kernels::Linear(pool, {x_dbl, tokens, dt_rank, width},
                  {weights.dt_proj, d_inner, dt_rank, dt_rank}, weights.dt_proj_bias,
                  {delta.data(), tokens, d_inner, d_inner});
  kernels::ScanParameters scan;
  scan.tokens = tokens;
  scan.d_inner = d_inner;
  scan.d_state = config.d_state;
  scan.delta = delta.data();
  scan.A = weights.A;
  scan.B = x_dbl + dt_rank;
  scan.C = x_dbl + dt_rank + config.d_state;
  scan.bc_stride = width;
  return scan;
}

}  // namespace

absl::StatusOr<std::unique_ptr<const MambaModel>> MambaModel::Load(const std::string& folder) {
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
  return model;
}

absl::Status MambaModel::Forward(ThreadPool& pool, Workspace& workspace, std::span<Piece> pieces,
                                 absl::FunctionRef<bool()> stop) const {
  if (pieces.empty()) return absl::OkStatus();
  const int64_t d_model = config_.d_model;

  int64_t tokens = 0;
  bool traced = false;
  absl::InlinedVector<int32_t, 17> seq_start;
  for (Piece& piece : pieces) {
    CheckPiece(config_, piece);
    piece.nonfinite_layer = -1;
    traced |= piece.trace != nullptr;
    seq_start.push_back(static_cast<int32_t>(tokens));
    tokens += piece.tokens.size();
    MS_CHECK(tokens <= std::numeric_limits<int32_t>::max());
  }
  seq_start.push_back(static_cast<int32_t>(tokens));

  const PackedSequences packed{pieces, seq_start, traced};
  ReserveBlock(config_, packed, workspace);
  float* h = workspace.h.data();
  for (const Piece& piece : pieces) {
    for (const int32_t token : piece.tokens) {
      std::copy_n(weights_->embeddings() + token * d_model, d_model, h);
      h += d_model;
    }
  }

  for (int32_t layer = 0; layer < config_.layers; ++layer) {
    if (stop()) return absl::CancelledError("stopped between layers");
    RunBlock(pool, config_, weights_->layer(layer), layer, packed, workspace);
    for (size_t s = 0; s < pieces.size(); ++s) {
      const int64_t count = static_cast<int64_t>(pieces[s].tokens.size()) * d_model;
      if (pieces[s].nonfinite_layer < 0 &&
          !AllFiniteOn(pool, workspace.h.data() + seq_start[s] * d_model, count)) {
        pieces[s].nonfinite_layer = layer;
      }
    }
  }
  for (Piece& piece : pieces) {
    if (piece.trace != nullptr) piece.trace->tokens += piece.tokens.size();
  }
  RunHead(pool, config_, *weights_, pieces, seq_start, workspace);
  return absl::OkStatus();
}

kernels::ScanParameters MambaModel::ScanParametersOf(ThreadPool& pool, const SequenceTrace& trace,
                                                     int32_t layer, int64_t tokens,
                                                     Array<float>& delta) const {
  const kernels::ScanParameters scan = BeforeSoftplus(pool, *this, trace, layer, tokens, delta);
  const std::span<float> values(delta.data(), tokens * config_.d_inner);
  kernels::Softplus(pool, values, values);
  return scan;
}

kernels::ScanParameters MambaModel::ReluScanParametersOf(ThreadPool& pool,
                                                         const SequenceTrace& trace, int32_t layer,
                                                         int64_t tokens,
                                                         Array<float>& delta) const {
  const kernels::ScanParameters scan = BeforeSoftplus(pool, *this, trace, layer, tokens, delta);
  pool.Split(tokens * config_.d_inner, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) delta[i] = std::max(delta[i], 0.0f);
  });
  return scan;
}

}  // namespace mambascope::model
