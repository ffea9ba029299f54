// LaTIM: what each token contributes to each layer's mixer outputs (methods.md, section 5; LaTIM,
// arXiv 2502.15612), as norms or ALTI shares (arXiv 2203.04212), joined over layers, or as parts of
// the target's logit (ALTI-Logit, arXiv 2305.12535). Where one row of the joined layers is wanted,
// a row vector is carried from the last layer down, so that no map is ever kept.
#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "server/base/status.h"
#include "server/explain/latim_rows.h"
#include "server/explain/latim_setup.h"
#include "server/explain/latim_target.h"
#include "server/explain/layer_attention.h"
#include "server/explain/method.h"
#include "server/explain/stream_steps.h"
#include "server/kernels/gemm.h"
#include "server/model/stream_walk.h"

namespace mambascope::explain {
namespace {

constexpr absl::string_view kName = "latim";
using v1::Latim;

constexpr int64_t kProductRows = 64;  // of the transposed product in one task

class Explainer : public Explaining {
 public:
  Explainer(const v1::Explanation& options, const Subject& subject)
      : subject_(subject),
        setup_(options, subject.model->config(), subject.tokens),
        walk_(*subject.model, *subject.trace, setup_.prefix, setup_.stream_stride),
        rows_(subject.model->config(), setup_.want, setup_.prefix),
        weights_(RowWeights(subject)) {
    const int64_t prefix = setup_.prefix;
    added_.assign(prefix, 0);
    if (setup_.carries()) carried_.assign(prefix, 0);
    if (setup_.norm == Latim::NORM_ALTI_LOGIT) {
      BeginLogit();
    } else if (setup_.carries()) {
      std::copy_n(weights_.begin(), prefix, carried_.begin());
    } else if (setup_.joined) {
      product_ = Array<float>(prefix * prefix);
      next_product_ = Array<float>(prefix * prefix);
      std::fill(product_.begin(), product_.end(), 0.0f);
      for (int64_t i = 0; i < prefix; ++i) product_[i * prefix + i] = 1;
    }
  }

  absl::Status Step(TensorWriter& writer) override {
    // A trace with more streams than the plan counted on leaves slices over.
    if (visit_ == setup_.layers.size()) return absl::OkStatus();
    const int32_t layer = setup_.layers[visit_];
    if (!open_) {
      if (!walk_.Prepare(*subject_.pool, layer)) return absl::OkStatus();
      const RowRange rows = setup_.rows(visit_);
      rows_.Open(subject_, layer, walk_.Entering(layer),
                 directions_.empty() ? nullptr : directions_.data(), rows.first, rows.count);
      open_ = true;
      return absl::OkStatus();
    }
    if (!rows_.Step()) return absl::OkStatus();
    for (const LatimRows::Row& row : rows_.rows()) RETURN_IF_ERROR(Take(layer, row, writer));
    if (!product_.empty()) MultiplyProduct();
    if (!rows_.done()) return absl::OkStatus();
    RETURN_IF_ERROR(FinishLayer(layer, writer));
    open_ = false;
    ++visit_;
    return visit_ < setup_.layers.size() ? absl::OkStatus() : Finish(writer);
  }

  v1::Quality quality() const override {
    v1::Quality quality;
    bool within = true;
    auto* decomposition = quality.mutable_decomposition();
    for (const auto& [layer, error] : errors_) {
      decomposition->add_layers(layer);
      decomposition->add_relative_error_by_layer(static_cast<float>(error));
      within = within && error <= kLatimTolerance;  // false if it is not a number
    }
    if (setup_.norm == Latim::NORM_ALTI_LOGIT) {
      double sum = embedding_ + constant_,
             largest = std::max(std::fabs(embedding_), std::fabs(constant_));
      for (const double part : carried_) {
        sum += part;
        largest = std::max(largest, std::fabs(part));
      }
      auto* completeness = quality.mutable_completeness();
      completeness->set_sum(sum);
      completeness->set_expected(subject_.explained);
      largest = std::max(largest, std::fabs(subject_.explained));
      const double missed = std::fabs(sum - subject_.explained);
      completeness->set_relative_error(largest == 0 ? missed : missed / largest);
      within = within && completeness->relative_error() <= kLatimTolerance;
    }
    quality.set_tolerance(kLatimTolerance);
    quality.set_within_tolerance(within);
    return quality;
  }

 private:
  // q of every row, and what reaches the target without any mixer.
  void BeginLogit() {
    const model::ModelConfig& config = subject_.model->config();
    const int64_t d_model = config.d_model;
    directions_ = Array<float>(setup_.tokens * d_model);
    SeedGradient(subject_, subject_.trace->stream(config.layers), /*frozen_norm=*/true,
                 directions_.data());
    embedding_tokens_.assign(setup_.prefix, 0);
    const float* const embeddings = subject_.trace->stream(0);
    for (int64_t i = 0; i < setup_.prefix; ++i) {
      double part = 0;
      for (int64_t m = i * d_model; m < (i + 1) * d_model; ++m) {
        part += double{directions_[m]} * embeddings[m];
      }
      embedding_tokens_[i] = static_cast<float>(part);
      embedding_ += part;
    }
    const float* const bias = subject_.model->weights().views().head_bias;
    for (const Output& output : subject_.outputs) {
      if (bias == nullptr) break;
      constant_ += bias[output.token];
      if (output.contrast >= 0) constant_ -= bias[output.contrast];
    }
    per_layer_.assign(config.layers, std::vector<double>(setup_.prefix, 0));
  }

  absl::Status Take(int32_t layer, const LatimRows::Row& row, TensorWriter& writer) {
    const std::vector<float> values(row.values.begin(), row.values.end());
    RETURN_IF_ERROR(CheckFinite(kName, layer, values));
    errors_[layer] = std::max(errors_[layer], row.error);
    if (std::isnan(row.error)) errors_[layer] = row.error;
    const int64_t i = row.index;
    if (setup_.all_rows && !setup_.joined) {
      WriteRow(writer, kName, values, setup_.tokens);
    } else if (setup_.all_rows) {
      block_first_ = block_.empty() ? i : block_first_;
      block_.insert(block_.end(), values.begin(), values.end());
      block_.resize(block_.size() + setup_.prefix - values.size(), 0);
    } else {
      const double weight = setup_.joined ? carried_[i] : weights_[i];
      for (size_t j = 0; j < row.values.size(); ++j) added_[j] += weight * row.values[j];
    }
    if (row.parts.empty()) return absl::OkStatus();
    for (size_t j = 0; j < row.parts.size(); ++j) per_layer_[layer][j] += row.parts[j];
    constant_ += row.constant_part;
    return absl::OkStatus();
  }

  // The block's rows of R^{l+1} = ALTI R^l, both transposed.
  void MultiplyProduct() {
    const int64_t prefix = setup_.prefix;
    const int64_t count = static_cast<int64_t>(block_.size()) / prefix;
    subject_.pool->Run((prefix + kProductRows - 1) / kProductRows, [&](int64_t task) {
      const int64_t k = task * kProductRows, rows = std::min(kProductRows, prefix - k);
      kernels::GemmBlock({product_.data() + k * prefix, rows, prefix, prefix},
                         {block_.data(), count, prefix, prefix}, /*accumulate=*/false,
                         {next_product_.data() + k * prefix + block_first_, rows, count, prefix});
    });
    block_.clear();
  }

  absl::Status FinishLayer(int32_t layer, TensorWriter& writer) {
    if (setup_.carries()) {
      carried_.swap(added_);
      if (!directions_.empty()) {
        for (int64_t j = 0; j < setup_.prefix; ++j) carried_[j] += per_layer_[layer][j];
      }
    } else if (setup_.joined) {
      std::swap(product_, next_product_);
    } else if (!setup_.all_rows) {
      const std::vector<float> row(added_.begin(), added_.end());
      WriteRow(writer, kName, row, setup_.tokens);
    }
    std::fill(added_.begin(), added_.end(), 0.0);
    return absl::OkStatus();
  }

  absl::Status Finish(TensorWriter& writer) {
    if (setup_.carries()) {
      const std::vector<float> row(carried_.begin(), carried_.end());
      RETURN_IF_ERROR(CheckFinite(kName, setup_.layers.back(), row));
      WriteRow(writer, kName, row, setup_.tokens);
    } else if (setup_.joined) {
      std::vector<float> row(setup_.prefix);
      for (int64_t i = 0; i < setup_.prefix; ++i) {
        for (int64_t k = 0; k < setup_.prefix; ++k) row[k] = product_[k * setup_.prefix + i];
        writer.Write(kName, std::span<const float>(row));
      }
    }
    if (directions_.empty()) return absl::OkStatus();
    for (const std::vector<double>& parts : per_layer_) {
      const std::vector<float> row(parts.begin(), parts.end());
      RETURN_IF_ERROR(CheckFinite(kName, setup_.layers.back(), row));
      WriteRow(writer, "per_layer", row, setup_.tokens);
    }
    const float embedding[] = {static_cast<float>(embedding_)};
    const float constant[] = {static_cast<float>(constant_)};
    writer.Write("embedding", std::span<const float>(embedding));
    WriteRow(writer, "embedding_tokens", embedding_tokens_, setup_.tokens);
    writer.Write("constant", std::span<const float>(constant));
    return absl::OkStatus();
  }

  const Subject subject_;
  const LatimSetup setup_;
  model::StreamWalk walk_;
  LatimRows rows_;
  const std::vector<float> weights_;  // of the target's rows
  size_t visit_ = 0;
  bool open_ = false;
  std::map<int32_t, double> errors_;     // by layer, of the rows computed
  std::vector<double> added_;            // of a layer
  std::vector<double> carried_;          // [prefix] through the layers above
  Array<float> product_, next_product_;  // [prefix, prefix]: R, transposed
  std::vector<float> block_;             // rows of ALTI
  int64_t block_first_ = 0;

  // Of ALTI_LOGIT.
  Array<float> directions_;  // [tokens, d_model] q
  std::vector<float> embedding_tokens_;
  std::vector<std::vector<double>> per_layer_;
  double embedding_ = 0, constant_ = 0;
};

class LatimMethod : public Method {
 public:
  absl::string_view name() const override { return kName; }

  void Validate(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t /*tokens*/, const std::string& field,
                Violations& violations) const override {
    CheckLatimOptions(explanation, config, field, violations);
  }

  Plan MakePlan(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, v1::DataType dtype) const override {
    const LatimSetup setup(explanation, config, tokens);
    Plan plan;
    plan.tensors = LatimTensors(setup, config, dtype);
    plan.streams = true;
    const LatimRows rows(config, setup.want, setup.prefix);
    const int32_t recomputed = RecomputedLayers(setup.layers, setup.stream_stride);
    plan.slices = recomputed;
    int64_t most_rows = 0;
    for (size_t visit = 0; visit < setup.layers.size(); ++visit) {
      const RowRange range = setup.rows(visit);
      most_rows = std::max(most_rows, range.count);
      const auto pairs = static_cast<double>(rows.Pairs(range.first, range.count));
      plan.slices += rows.Steps(range.first, range.count);
      plan.work.gemm += pairs * config.d_inner * config.d_model;
      plan.work.scan += pairs * config.directions() * config.maps() * config.d_state;
    }
    const double visits = static_cast<double>(setup.layers.size()) + recomputed;
    plan.work.forward_tokens = visits * static_cast<double>(setup.prefix) / config.layers;

    const int64_t prefix = setup.prefix;
    int64_t floats = 10 * prefix + tokens;  // rows in double and their float forms
    if (setup.all_rows && setup.joined) {
      floats += 2 * prefix * prefix + 16 * prefix;
      plan.work.gemm += visits * static_cast<double>(prefix) * prefix * prefix;
    }
    if (setup.norm == Latim::NORM_ALTI_LOGIT) {
      floats += tokens * config.d_model * (config.mean_pooled() ? 2 : 1);
      floats += 2 * config.layers * prefix + 4 * config.d_model;
    }
    plan.memory_bytes = rows.MemoryBytes(most_rows) + 4 * floats +
                        model::StreamWalk::MemoryBytes(config, prefix, setup.stream_stride);
    return plan;
  }

  std::unique_ptr<Explaining> Start(const v1::Explanation& options,
                                    const Subject& subject) const override {
    return std::make_unique<Explainer>(options, subject);
  }
};

}  // namespace

std::unique_ptr<const Method> NewLatim() { return std::make_unique<LatimMethod>(); }

}  // namespace mambascope::explain
