// Scope MIXER of hidden_attention: unified maps, from the convolution's input to out_proj's
// (methods.md, section 3; UIA, arXiv 2405.16504).

#include "server/base/status.h"
#include "server/explain/hidden_attention_setup.h"
#include "server/explain/map_statistics.h"
#include "server/explain/reconstruction.h"
#include "server/explain/stream_steps.h"
#include "server/explain/unified_attention.h"
#include "server/model/stream_walk.h"

namespace mambascope::explain {
namespace {

using Setup = HiddenAttentionSetup;
constexpr absl::string_view kName = Setup::kName;

// The rows of ABS_MEAN are not linear: where several are meant, their mean takes the whole map.
bool RowOfMap(const Setup& setup) {
  return !setup.all_rows && setup.target.spread && setup.reduction.how == v1::REDUCTION_ABS_MEAN;
}

class MixerExplainer : public Explaining {
 public:
  MixerExplainer(const v1::Explanation& options, const Subject& subject)
      : subject_(subject),
        setup_(options, subject.model->config(), subject.tokens, TargetRow(options, subject)),
        weights_(RowWeights(subject)),
        unified_(setup_),
        walk_(*subject.model, *subject.trace, unified_.scanned()),
        reconstruction_(subject),
        preparing_(StreamSteps(setup_.layers,
                               model::SequenceTrace::StreamStride(setup_.config, setup_.tokens))) {
    weights_.resize(setup_.prefix);
  }

  absl::Status Step(TensorWriter& writer) override {
    const int32_t layer = setup_.layers[done_];
    const int64_t step = next_++ - preparing_[done_];
    if (step < 0) {
      walk_.Prepare(*subject_.pool, layer);
      return absl::OkStatus();
    }
    if (step == 0) {
      while (!walk_.Prepare(*subject_.pool, layer)) {
      }
      unified_.Open(subject_, layer, walk_.Entering(layer));
      row_.assign(setup_.prefix, 0);
      constant_ = 0;
      return absl::OkStatus();
    }
    if (step <= unified_.rank_pieces()) {
      unified_.Rank(step - 1);
      return absl::OkStatus();
    }
    const int64_t piece = step - 1 - unified_.rank_pieces();
    const bool last = piece + 1 == unified_.pieces();
    RETURN_IF_ERROR(setup_.kind == Setup::Kind::kChannels ? Channels(layer, piece, writer)
                                                          : Reduced(layer, piece, last, writer));
    if (!last) return absl::OkStatus();
    if (setup_.all_rows) {
      reconstruction_.CheckUnifiedMaps(layer, unified_);
    } else {
      reconstruction_.CheckUnifiedRow(layer, weights_, unified_);
    }
    ++done_;
    next_ = 0;
    return absl::OkStatus();
  }

  v1::Quality quality() const override {
    v1::Quality quality;
    reconstruction_.Report(&quality);
    return quality;
  }

  void Describe(v1::ExplanationFinished* finished) const override {
    if (statistics_.layers_size() > 0) *finished->mutable_statistics() = statistics_;
  }

 private:
  absl::Status Channels(int32_t layer, int64_t piece, TensorWriter& writer) {
    const int64_t rows = setup_.all_rows ? setup_.prefix : 1;
    const int64_t count = unified_.PieceChannels(piece) * rows;
    values_.Reserve(unified_.largest_piece() * rows * setup_.prefix);
    constants_.resize(count);
    if (setup_.all_rows) {
      unified_.ChannelMaps(piece, values_.data(), constants_.data());
    } else {
      unified_.ChannelRows(piece, weights_, values_.data(), constants_.data());
    }
    RETURN_IF_ERROR(CheckFinite(kName, layer, {values_.data(), size_t(count * setup_.prefix)}));
    RETURN_IF_ERROR(CheckFinite(kName, layer, constants_));
    for (int64_t row = 0; row < count; ++row) {
      WriteRow(writer, kName, {values_.data() + row * setup_.prefix, size_t(setup_.prefix)},
               setup_.tokens);
    }
    writer.Write("constant", std::span<const float>(constants_));
    return absl::OkStatus();
  }

  absl::Status Reduced(int32_t layer, int64_t piece, bool last, TensorWriter& writer) {
    const int64_t size = setup_.prefix * setup_.prefix;
    if (setup_.all_rows || RowOfMap(setup_)) {
      values_.Reserve(size);
      row_constants_.resize(setup_.prefix);
      unified_.AddMap(piece, values_.data(), row_constants_);
    } else {
      unified_.AddRow(piece, weights_, row_, &constant_);
    }
    if (!last) return absl::OkStatus();
    if (setup_.reduction.how == v1::REDUCTION_TOP_K) writer.Write("indices", unified_.channels());
    if (setup_.all_rows) {
      const std::span<const float> map(values_.data(), size);
      constants_.assign(row_constants_.begin(), row_constants_.end());
      RETURN_IF_ERROR(CheckFinite(kName, layer, map));
      RETURN_IF_ERROR(CheckFinite(kName, layer, constants_));
      AddStatistics(*subject_.pool, layer, map.data(), setup_.tokens, &statistics_);
      writer.Write(kName, map);
      writer.Write("constant", std::span<const float>(constants_));
      return absl::OkStatus();
    }
    if (RowOfMap(setup_)) AverageRows();
    const std::vector<float> row(row_.begin(), row_.end());
    constants_.assign(1, static_cast<float>(constant_));
    RETURN_IF_ERROR(CheckFinite(kName, layer, row));
    RETURN_IF_ERROR(CheckFinite(kName, layer, constants_));
    WriteRow(writer, kName, row, setup_.tokens);
    writer.Write("constant", std::span<const float>(constants_));
    return absl::OkStatus();
  }

  void AverageRows() {
    for (int64_t i = 0; i < setup_.prefix; ++i) {
      const float* row = values_.data() + i * setup_.prefix;
      constant_ += weights_[i] * row_constants_[i];
      for (int64_t j = 0; j <= i; ++j) row_[j] += static_cast<double>(weights_[i]) * row[j];
    }
  }

  const Subject subject_;
  const Setup setup_;
  std::vector<float> weights_;  // of rows, [prefix]
  UnifiedAttention unified_;
  model::StreamWalk walk_;
  Reconstruction reconstruction_;
  const std::vector<int32_t> preparing_;  // steps before each layer
  size_t done_ = 0;                       // layers
  int64_t next_ = 0;                      // step of the layer
  Array<float> values_;                   // a map, or those or the rows of a piece's channels
  std::vector<double> row_, row_constants_;
  double constant_ = 0;
  std::vector<float> constants_;
  v1::MapStatistics statistics_;
};

}  // namespace

std::unique_ptr<Explaining> ExplainMixer(const v1::Explanation& options, const Subject& subject) {
  return std::make_unique<MixerExplainer>(options, subject);
}

void PlanMixer(const HiddenAttentionSetup& setup, Plan* plan) {
  const UnifiedAttention unified(setup);
  const model::ModelConfig& config = setup.config;
  const auto layers = static_cast<int64_t>(setup.layers.size());
  const int32_t stride = model::SequenceTrace::StreamStride(config, setup.tokens);
  const int64_t preparing = RecomputedLayers(setup.layers, stride);
  plan->streams = true;
  plan->slices = preparing + layers * (1 + unified.rank_pieces() + unified.pieces());
  int64_t floats = 12 * setup.prefix;
  if (setup.kind == Setup::Kind::kChannels) {
    floats += unified.largest_piece() * (setup.all_rows ? setup.prefix : 1) * (setup.prefix + 1);
  } else if (setup.all_rows || RowOfMap(setup)) {
    floats += setup.prefix * setup.prefix;
  }
  plan->memory_bytes = unified.memory_bytes() + 4 * floats +
                       Reconstruction::MemoryBytes(config, setup.prefix) +
                       model::StreamWalk::MemoryBytes(config, unified.scanned(), stride);
  Work layer = setup.all_rows ? Reconstruction::MapsWork(config, setup.prefix)
                              : Reconstruction::RowWork(config, setup.prefix);
  layer += unified.work();
  plan->work = static_cast<double>(layers) * layer;
  plan->work.forward_tokens += static_cast<double>(preparing * unified.scanned()) / config.layers;
}

}  // namespace mambascope::explain
