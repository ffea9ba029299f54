// Attention rollout: the product over layers of I + hidden attention (methods.md, sections 4 and 9;
// The Hidden Attention of Mamba Models, arXiv 2403.01590, eq. 19-20). A row of it needs no map
// where the reduction is linear: from the last layer down, a row vector is multiplied by one
// adjoint scan a layer.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/status.h"
#include "server/explain/layer_attention.h"
#include "server/explain/method.h"
#include "server/explain/options.h"
#include "server/explain/reconstruction.h"
#include "server/explain/rollout_product.h"
#include "server/explain/target_row.h"

namespace mambascope::explain {
namespace {

constexpr absl::string_view kName = "attention_rollout";
using Rollout = v1::AttentionRollout;

constexpr int64_t kProductWork = int64_t{1} << 30;  // multiply-adds of a slice, about 20 ms

// What the options come to for a model and an input.
struct Setup {
  enum class Kind {
    kAdjointRow,  // the target's row, by scans
    kMapRow,      // the target's row, by maps: ABS_MEAN
    kCodeRow,     // every row of a layer's matrix is the target's
    kProduct,     // all rows
  };

  Setup(const v1::Explanation& explanation, const model::ModelConfig& config, int64_t length,
        const TargetRow& row)
      : tokens(length),
        target(row),
        causal(config.directions() == 1),
        start_layer(explanation.attention_rollout().start_layer()),
        layers(config.layers - start_layer),
        variant(VariantOf(explanation.attention_rollout().variant())),
        reduction(ReductionOf(explanation.attention_rollout(), config)),
        kind(KindOf(explanation.attention_rollout())),
        row_sum(RowSum(explanation.attention_rollout())),
        prefix(kind == Kind::kProduct ? tokens : row.prefix),
        attention(reduction, Wanted(), /*relu=*/false, config, tokens, prefix) {}

  Kind KindOf(const Rollout& options) const {
    if (IsCode(variant)) return Kind::kCodeRow;
    if (options.rows() == v1::ROWS_ALL) return Kind::kProduct;
    return reduction.how == v1::REDUCTION_ABS_MEAN ? Kind::kMapRow : Kind::kAdjointRow;
  }
  LayerAttention::Want Wanted() const {
    if (kind == Kind::kAdjointRow) return LayerAttention::Want::kRow;
    return kind == Kind::kCodeRow ? LayerAttention::Want::kChannelRows : LayerAttention::Want::kMap;
  }
  bool RowSum(const Rollout& options) const {
    if (options.normalization() != Rollout::NORMALIZATION_UNSPECIFIED) {
      return options.normalization() == Rollout::NORMALIZATION_ROW_SUM;
    }
    return reduction.how == v1::REDUCTION_ABS_MEAN;
  }

  // A layer's steps, in this order.
  int64_t sum_steps() const {
    return kind == Kind::kAdjointRow && row_sum ? attention.pieces() : 0;
  }
  int64_t product_steps() const {
    if (kind != Kind::kProduct) return 0;
    const int64_t work = RolloutProduct::Work(prefix, causal);
    return std::clamp<int64_t>(work / kProductWork, 1, RolloutProduct::Blocks(prefix));
  }
  int64_t steps_per_layer() const {
    return attention.rank_pieces() + sum_steps() + attention.pieces() + product_steps();
  }

  int64_t tokens;
  TargetRow target;
  bool causal;  // maps are lower triangular
  int32_t start_layer, layers;
  v1::Variant variant;
  ChannelReduction reduction;
  Kind kind;
  bool row_sum;
  int64_t prefix;
  LayerAttention attention;
};

class Explainer : public Explaining {
 public:
  Explainer(const v1::Explanation& options, const Subject& subject)
      : subject_(subject),
        setup_(options, subject.model->config(), subject.tokens, TargetRow(options, subject)),
        reconstruction_(subject) {
    const int64_t prefix = setup_.prefix;
    if (all_rows()) {
      product_ = RolloutProduct(prefix, setup_.causal);
    } else {
      weights_ = setup_.target.Weights(subject);
      row_.assign(weights_.begin(), weights_.end());
    }
    if (all_rows() || setup_.kind == Setup::Kind::kMapRow) map_ = Array<float>(prefix * prefix);
  }

  absl::Status Step(TensorWriter& writer) override {
    const int64_t steps = setup_.steps_per_layer(), step = next_ % steps;
    const auto done = static_cast<int32_t>(next_ / steps);
    MS_CHECK(done < setup_.layers);
    // A row is multiplied from the left, beginning with the last layer; the whole product grows
    // from the first on.
    const int32_t layer = setup_.start_layer + (all_rows() ? done : setup_.layers - 1 - done);
    ++next_;
    RETURN_IF_ERROR(LayerStep(layer, step));
    if (step + 1 < steps) return absl::OkStatus();

    if (all_rows() || setup_.kind == Setup::Kind::kMapRow) {
      reconstruction_.CheckMaps(layer, Reconstruction::MapsOf(setup_.attention), setup_.attention,
                                map_.data());
    } else {
      reconstruction_.CheckRow(layer, setup_.target, weights_, setup_.attention);
    }
    if (done + 1 < setup_.layers) return absl::OkStatus();
    return all_rows() ? WriteProduct(writer) : WriteTargetRow(writer);
  }

  v1::Quality quality() const override {
    v1::Quality quality;
    reconstruction_.Report(&quality);
    if (setup_.row_sum || IsCode(setup_.variant)) {
      quality.set_smallest_row_sum(static_cast<float>(smallest_row_sum_));
    }
    return quality;
  }

 private:
  bool all_rows() const { return setup_.kind == Setup::Kind::kProduct; }
  // Behind the last entry of a map's row that may differ from 0.
  int64_t RowEnd(int64_t row) const { return setup_.causal ? row + 1 : setup_.prefix; }

  absl::Status LayerStep(int32_t layer, int64_t step) {
    LayerAttention& attention = setup_.attention;
    const size_t prefix = setup_.prefix;
    if (step == 0) {
      attention.Open(subject_, layer);
      sums_.assign(prefix, 1);  // the identity's
      added_.assign(prefix, 0);
    }
    if (step < attention.rank_pieces()) {
      attention.Rank(step);
      return absl::OkStatus();
    }
    step -= attention.rank_pieces();
    if (step < setup_.sum_steps()) {
      attention.AddRowSums(step, sums_);
      if (step + 1 < setup_.sum_steps()) return absl::OkStatus();
      RETURN_IF_ERROR(NoteRowSums(layer));
      for (size_t i = 0; i < prefix; ++i) row_[i] /= sums_[i];
      return absl::OkStatus();
    }
    step -= setup_.sum_steps();
    const bool last_piece = step + 1 == attention.pieces();
    switch (setup_.kind) {
      case Setup::Kind::kAdjointRow: {
        const std::vector<float> v(row_.begin(), row_.end());
        attention.AddAdjoint(step, v.data(), added_);
        if (last_piece) AddToRow();
        break;
      }
      case Setup::Kind::kCodeRow:
        attention.AddExtremes(step, setup_.target.position,
                              setup_.variant == v1::VARIANT_CODE_QUIRKS, /*positive=*/false, added_,
                              &extremes_);
        if (last_piece) {
          sums_.assign(1, MultiplyByRepeatedRow(added_, row_));
          return NoteRowSums(layer);
        }
        break;
      case Setup::Kind::kMapRow:
        attention.AddMap(step, map_.data());
        if (last_piece) return MultiplyRow(layer);
        break;
      case Setup::Kind::kProduct:
        if (step < attention.pieces()) {
          attention.AddMap(step, map_.data());
          if (last_piece) return SumRows(layer);
        } else {
          const int64_t part = step - attention.pieces(), parts = setup_.product_steps();
          product_.Multiply(*subject_.pool, map_.data(), setup_.row_sum ? sums_.data() : nullptr,
                            part, parts);
        }
        break;
    }
    return absl::OkStatus();
  }

  // The smallest so far, and an error if one is 0.
  absl::Status NoteRowSums(int32_t layer) {
    for (size_t i = 0; i < sums_.size(); ++i) {
      if (sums_[i] == 0) {
        return absl::InternalError(
            absl::StrCat(kName, ": layer ", layer, " is not finite: row ", i,
                         " of I + alpha sums to 0, by which NORMALIZATION_ROW_SUM would divide"));
      }
      smallest_row_sum_ = std::min(smallest_row_sum_, std::fabs(sums_[i]));
    }
    return absl::OkStatus();
  }

  // From the map, if rows are divided at all.
  absl::Status SumRows(int32_t layer) {
    if (!setup_.row_sum) return absl::OkStatus();
    subject_.pool->Split(setup_.prefix, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float* row = map_.data() + i * setup_.prefix;
        double sum = 1;
        for (int64_t j = 0; j < RowEnd(i); ++j) sum += row[j];
        sums_[i] = sum;
      }
    });
    return NoteRowSums(layer);
  }

  void AddToRow() {
    for (size_t j = 0; j < row_.size(); ++j) row_[j] += added_[j];
  }

  // row <- row (I + map), rows divided by their sums.
  absl::Status MultiplyRow(int32_t layer) {
    RETURN_IF_ERROR(SumRows(layer));
    if (setup_.row_sum) {
      for (size_t i = 0; i < row_.size(); ++i) row_[i] /= sums_[i];
    }
    subject_.pool->Split(setup_.prefix, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = setup_.causal ? begin : 0; i < setup_.prefix; ++i) {
        const float* row = map_.data() + i * setup_.prefix;
        const int64_t last = std::min(end, RowEnd(i));
        for (int64_t j = begin; j < last; ++j) added_[j] += row_[i] * row[j];
      }
    });
    AddToRow();
    return absl::OkStatus();
  }

  absl::Status WriteProduct(TensorWriter& writer) {
    RETURN_IF_ERROR(CheckFinite(kName, LastLayer(), product_.values()));
    product_.ForEachBlock(*subject_.pool,
                          [&](std::span<const float> rows) { writer.Write(kName, rows); });
    return absl::OkStatus();
  }

  absl::Status WriteTargetRow(TensorWriter& writer) {
    std::vector<float> row(row_.begin(), row_.end());
    RETURN_IF_ERROR(CheckFinite(kName, setup_.start_layer, row));
    if (IsCode(setup_.variant)) {
      WriteCodeRow(writer, kName, std::move(row), setup_.target.position, setup_.tokens);
    } else {
      WriteRow(writer, kName, row, setup_.tokens);
    }
    return absl::OkStatus();
  }

  int32_t LastLayer() const { return setup_.start_layer + setup_.layers - 1; }

  const Subject subject_;
  Setup setup_;
  std::vector<float> weights_;  // of rows, unless all are wanted
  Reconstruction reconstruction_;
  int64_t next_ = 0;
  Array<float> map_;           // of a layer
  RolloutProduct product_;     // of the layers so far
  std::vector<double> row_;    // or one row of R
  std::vector<double> sums_;   // of the rows of I + alpha of a layer
  std::vector<double> added_;  // what a layer adds to the row
  LayerAttention::Extremes extremes_;
  double smallest_row_sum_ = std::numeric_limits<double>::infinity();
};

class AttentionRollout : public Method {
 public:
  absl::string_view name() const override { return kName; }

  void Validate(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, const std::string& field, Violations& violations) const override {
    const Rollout& options = explanation.attention_rollout();
    CheckReduction(options.reduction(), options.channels(), config.maps(), options.top_k(), config,
                   field, violations);
    CheckStartLayer(options.start_layer(), config, field, violations);
    CheckVariant(options.variant(), options.reduction(), field, violations);
    CheckOneRow(options.variant(), explanation, config, tokens, field, violations);
    CheckEnum(Rollout::Normalization_IsValid(options.normalization()), options.normalization(),
              field + ".normalization", violations);
    CheckEnum(v1::Rows_IsValid(options.rows()), options.rows(), field + ".rows", violations);
    if (!IsCode(options.variant())) return;
    const std::string& variant = v1::Variant_Name(options.variant());
    if (options.normalization() == Rollout::NORMALIZATION_PAPER) {
      violations.Add(field + ".normalization",
                     absl::StrCat("NORMALIZATION_PAPER does not go with ", variant,
                                  ", which always divides rows by their sums"));
    }
    if (options.rows() == v1::ROWS_ALL) {
      violations.Add(field + ".rows", absl::StrCat("ROWS_ALL does not go with ", variant,
                                                   ", which knows the target's row only"));
    }
  }

  Plan MakePlan(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, v1::DataType dtype) const override {
    const Setup setup(explanation, config, tokens, TargetRow(explanation, config, tokens));
    const bool all_rows = setup.kind == Setup::Kind::kProduct;
    std::vector<Axis> axes;
    if (all_rows) axes.push_back({"output_tokens", tokens, {}});
    axes.push_back(setup.kind == Setup::Kind::kCodeRow
                       ? TokensWithout(setup.target.position, tokens)
                       : Axis{"input_tokens", tokens, {}});
    Plan plan;
    plan.tensors.push_back(MakeTensorInfo(std::string(kName), std::move(axes), dtype));
    plan.tensors[0].set_nonnegative(setup.kind == Setup::Kind::kCodeRow ||
                                    setup.reduction.how == v1::REDUCTION_ABS_MEAN);
    plan.slices = setup.layers * setup.steps_per_layer();
    constexpr int64_t kRows = 10;  // three rows in double, and float forms of one and its input
    int64_t floats = kRows * tokens;
    if (setup.kind == Setup::Kind::kMapRow) floats += setup.prefix * setup.prefix;
    if (all_rows) floats += tokens * tokens + RolloutProduct::MemoryFloats(tokens, setup.causal);
    plan.memory_bytes = setup.attention.memory_bytes() + 4 * floats +
                        Reconstruction::MemoryBytes(config, setup.prefix);
    const bool maps = all_rows || setup.kind == Setup::Kind::kMapRow;
    Work layer = setup.attention.work();
    if (setup.sum_steps() > 0) layer += setup.attention.work();
    layer += maps ? Reconstruction::MapsWork(config, setup.prefix)
                  : Reconstruction::RowWork(config, setup.prefix);
    if (all_rows)
      layer.gemm += static_cast<double>(RolloutProduct::Work(setup.prefix, setup.causal));
    plan.work = setup.layers * layer;
    return plan;
  }

  std::unique_ptr<Explaining> Start(const v1::Explanation& options,
                                    const Subject& subject) const override {
    return std::make_unique<Explainer>(options, subject);
  }
};

}  // namespace

std::unique_ptr<const Method> NewAttentionRollout() { return std::make_unique<AttentionRollout>(); }

}  // namespace mambascope::explain
