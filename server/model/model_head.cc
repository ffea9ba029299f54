#include "server/model/model_head.h"

#include <algorithm>

#include "server/kernels/gemm.h"
#include "server/kernels/rms_norm.h"
#include "server/model/finite.h"

namespace mambascope::model {
namespace {

// Adds the normalised rows of a piece to its state, one after the other.
void Pool(ThreadPool& pool, const ModelConfig& config, const float* rows, int64_t count,
          RecurrentState& state) {
  const int64_t d_model = config.d_model;
  const std::span<double> sums = state.pooled();
  pool.Split(d_model, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t m = begin; m < end; ++m) sums[m] += rows[i * d_model + m];
    }
  });
  state.pooled_tokens += count;
}

// The head's inputs, [wanted rows, d_model], into workspace.head_rows.
void GatherMeans(ThreadPool& pool, const ModelConfig& config, const WeightViews& weights,
                 std::span<const Piece> pieces, std::span<const int32_t> seq_start,
                 Workspace& workspace) {
  const int64_t d_model = config.d_model;
  kernels::RmsNorm(pool, workspace.h.data(), weights.norm_f, config.norm_eps, seq_start.back(),
                   d_model, workspace.u.data());
  float* to = workspace.head_rows.data();
  for (size_t s = 0; s < pieces.size(); ++s) {
    RecurrentState& state = *pieces[s].state;
    Pool(pool, config, workspace.u.data() + seq_start[s] * d_model, seq_start[s + 1] - seq_start[s],
         state);
    if (pieces[s].logit_rows.empty()) continue;
    for (const double sum : state.pooled()) {
      *to++ = static_cast<float>(sum / static_cast<double>(state.pooled_tokens));
    }
  }
}

void GatherRows(ThreadPool& pool, const ModelConfig& config, const WeightViews& weights,
                std::span<const Piece> pieces, std::span<const int32_t> seq_start, int64_t rows,
                Workspace& workspace) {
  const int64_t d_model = config.d_model;
  float* to = workspace.head_rows.data();
  for (size_t s = 0; s < pieces.size(); ++s) {
    for (const int32_t row : pieces[s].logit_rows) {
      to = std::copy_n(workspace.h.data() + (seq_start[s] + row) * d_model, d_model, to);
    }
  }
  float* gathered = workspace.head_rows.data();
  kernels::RmsNorm(pool, gathered, weights.norm_f, config.norm_eps, rows, d_model, gathered);
}

}  // namespace

void RunHead(ThreadPool& pool, const ModelConfig& config, const WeightViews& weights,
             std::span<Piece> pieces, std::span<const int32_t> seq_start, Workspace& workspace) {
  const int64_t d_model = config.d_model, outputs = config.outputs();
  int64_t rows = 0, asking = 0;
  for (Piece& piece : pieces) {
    rows += piece.logit_rows.size();
    asking += piece.logit_rows.empty() ? 0 : 1;
    if (piece.logits != nullptr) piece.logits->resize(piece.logit_rows.size() * outputs);
  }
  workspace.head_rows.Reserve(rows * d_model);
  if (config.mean_pooled()) {
    GatherMeans(pool, config, weights, pieces, seq_start, workspace);
  } else if (rows > 0) {
    GatherRows(pool, config, weights, pieces, seq_start, rows, workspace);
  }
  if (rows == 0) return;

  // A piece that asks alone, perhaps for a long prompt's every row, gets them in place.
  float* logits = nullptr;
  if (asking == 1) {
    for (Piece& piece : pieces) {
      if (!piece.logit_rows.empty()) logits = piece.logits->data();
    }
  } else {
    workspace.logits.Reserve(rows * outputs);
    logits = workspace.logits.data();
  }
  kernels::Linear(pool, {workspace.head_rows.data(), rows, d_model, d_model}, weights.head,
                  weights.head_bias, {logits, rows, outputs, outputs});

  for (Piece& piece : pieces) {
    const int64_t count = piece.logit_rows.size() * outputs;
    if (count == 0) continue;
    if (piece.nonfinite_layer < 0 && !AllFinite(pool, logits, count)) {
      piece.nonfinite_layer = config.layers;
    }
    if (asking > 1) std::copy_n(logits, count, piece.logits->data());
    logits += count;
  }
}

}  // namespace mambascope::model
