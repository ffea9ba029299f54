#include "server/explain/variants.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/status.h"
#include "server/model/mamba_block.h"
#include "server/model/sampling.h"

namespace mambascope::explain {
namespace {

// Rows of the outputs counted back from the last, as a schedule wants them.
std::vector<int64_t> BackFromLast(const Subject& subject, int64_t rows) {
  if (subject.outputs.size() == 1) return {0};  // the last row, whatever is deleted; Vim cuts none
  std::vector<int64_t> back;
  for (auto it = subject.outputs.rbegin(); it != subject.outputs.rend(); ++it) {
    back.push_back(rows - 1 - it->position);
  }
  return back;
}

std::vector<int64_t> LastRows(int64_t count) {
  std::vector<int64_t> back(count);
  for (int64_t i = 0; i < count; ++i) back[i] = i;
  return back;
}

}  // namespace

VariantRunner::VariantRunner(const Subject& subject, const Removal& removal,
                             std::vector<std::vector<int32_t>> removed, bool share)
    : subject_(subject),
      removal_(removal),
      removed_(std::move(removed)),
      rows_(ReadTokens(subject.model->config(), subject.position, subject.tokens)),
      outcomes_(removed_.size()) {
  const model::ModelConfig& config = subject_.model->config();
  const bool on_device = subject_.model->device().kind != model::Device::Kind::kCpu;
  limits_ = PassLimits::Of(config, rows_, share && !on_device);
  MS_CHECK(removal_.how != Removal::How::kDelete || subject_.outputs.size() == 1);
  std::vector<VariantExtent> extents;
  for (size_t v = 0; v < removed_.size(); ++v) {
    const VariantExtent extent = ExtentOf(removed_[v]);
    if (extent.rows == 0) {
      SetOutcomeOfNothing(static_cast<int32_t>(v));
      continue;
    }
    extents.push_back(extent);
    length_.push_back(extent.rows);
    variants_.push_back(static_cast<int32_t>(v));
  }
  running_.resize(extents.size());
  schedule_ = std::make_unique<VariantSchedule>(std::move(extents), rows_,
                                                BackFromLast(subject_, rows_), limits_);
  const ScheduleTotals all = TotalsOf(*schedule_);
  passes_ = all.passes;
  most_rows_ = all.most_rows;
  slices_of_pass_ = on_device ? 1 : limits_.SlicesOf(config);  // a device does a pass at once
}

VariantExtent VariantRunner::ExtentOf(const std::vector<int32_t>& removed) const {
  VariantExtent extent{rows_ - 1, rows_};  // of the unchanged input: its last row alone
  if (removed.empty()) return extent;
  MS_CHECK(removed.front() >= 0 && removed.back() < rows_);
  extent.start = removed.front();
  if (removal_.how != Removal::How::kDelete) return extent;
  extent.rows -= static_cast<int64_t>(removed.size());
  int64_t last = rows_ - 1;  // that is kept
  for (auto it = removed.rbegin(); it != removed.rend() && *it == last; ++it) --last;
  extent.start = std::min(extent.start, std::max<int64_t>(last, 0));
  return extent;
}

// The empty sequence pools to 0.
void VariantRunner::SetOutcomeOfNothing(int32_t variant) {
  const model::WeightViews& weights = subject_.model->weights().views();
  std::vector<float> logits(subject_.model->config().outputs(), 0);
  if (weights.head_bias != nullptr) {
    std::copy_n(weights.head_bias, logits.size(), logits.begin());
  }
  Running nothing(model::RecurrentState(subject_.model->config()));
  Add(logits, nothing);
  outcomes_[variant] = nothing.sum;
}

absl::Status VariantRunner::Step() {
  const int32_t layers = subject_.model->config().layers;
  if (layer_ == 0) RETURN_IF_ERROR(BeginPass());
  const int32_t end = slices_of_pass_ == 1 ? layers : std::min(layers, layer_ + limits_.layers);
  RETURN_IF_ERROR(subject_.model->ForwardLayers(*subject_.pool, workspace_, pieces_, layer_, end));
  layer_ = end;
  if (layer_ < layers) return absl::OkStatus();
  layer_ = 0;
  return EndPass();
}

absl::Status VariantRunner::Prepare() {
  const model::ModelConfig& config = subject_.model->config();
  ASSIGN_OR_RETURN(model::RecurrentState state, subject_.model->NewState());
  unchanged_ = std::make_unique<Running>(std::move(state));
  if (!subject_.image.empty()) {
    image_rows_ = Array<float>(rows_ * config.d_model);
    subject_.model->Embed(*subject_.pool, {}, subject_.image, image_rows_);
  }
  replacement_ = Array<float>(config.d_model);
  std::fill(replacement_.begin(), replacement_.end(), 0.0f);
  if (removal_.how == Removal::How::kToken) {
    subject_.model->Embed(*subject_.pool, {&removal_.token, 1}, {}, replacement_);
  }
  // At once: buffers that grow from pass to pass hold their old ones meanwhile.
  embeddings_ = Array<float>(most_rows_ * config.d_model);
  if (subject_.model->device().kind == model::Device::Kind::kCpu) {
    const int32_t starts[] = {0, static_cast<int32_t>(most_rows_)};
    model::ReserveBlock(config, {{}, starts}, workspace_);
  }
  return absl::OkStatus();
}

absl::Status VariantRunner::BeginPass() {
  if (unchanged_ == nullptr) RETURN_IF_ERROR(Prepare());
  MS_CHECK(schedule_->Next(pass_));
  parts_.clear();
  parts_.resize(pass_.parts.size());
  pieces_.assign(pass_.parts.size(), model::Piece());
  float* to = embeddings_.data();
  for (size_t i = 0; i < pass_.parts.size(); ++i) {
    const VariantSchedule::Part& scheduled = pass_.parts[i];
    if (scheduled.starts) RETURN_IF_ERROR(Start(scheduled.variant));
    Part& part = parts_[i];
    part.running = scheduled.variant == VariantSchedule::kUnchanged
                       ? unchanged_.get()
                       : running_[scheduled.variant].get();
    WantLogits(scheduled, part);
    float* const end = WriteRows(scheduled, to);
    pieces_[i].embeddings = {to, end};
    pieces_[i].state = &part.running->state;
    pieces_[i].logit_rows = part.logit_rows;
    pieces_[i].logits = &part.logits;
    to = end;
  }
  return absl::OkStatus();
}

// From the state of the unchanged input, and with what that gave so far; or from the start.
absl::Status VariantRunner::Start(int32_t variant) {
  std::unique_ptr<Running>& running = running_[variant];
  if (limits_.shared_rows == 0) {
    ASSIGN_OR_RETURN(model::RecurrentState state, subject_.model->NewState());
    running = std::make_unique<Running>(std::move(state));
    return absl::OkStatus();
  }
  running = std::make_unique<Running>(unchanged_->state.Copy());
  running->sum = unchanged_->sum;
  running->next_output = unchanged_->next_output;
  return absl::OkStatus();
}

// What enters the first layer; returns its end.
float* VariantRunner::WriteRows(const VariantSchedule::Part& part, float* out) {
  static const std::vector<int32_t> kNone;
  const bool unchanged = part.variant == VariantSchedule::kUnchanged;
  const std::vector<int32_t>& removed = unchanged ? kNone : removed_[variants_[part.variant]];
  const int64_t d_model = subject_.model->config().d_model;
  auto next = removed.begin();
  int64_t row = 0;  // of the variant
  for (int32_t position = 0; row < part.end; ++position) {
    const bool gone = next != removed.end() && *next == position;
    if (gone) ++next;
    if (gone && removal_.how == Removal::How::kDelete) continue;
    if (row++ < part.begin) continue;
    if (gone) {
      std::copy_n(replacement_.data(), d_model, out);
    } else if (!image_rows_.empty()) {
      std::copy_n(image_rows_.data() + position * d_model, d_model, out);
    } else {
      subject_.model->Embed(*subject_.pool, subject_.token_ids.subspan(position, 1), {},
                            {out, static_cast<size_t>(d_model)});
    }
    out += d_model;
  }
  return out;
}

void VariantRunner::WantLogits(const VariantSchedule::Part& part, Part& wanted) const {
  const model::ModelConfig& config = subject_.model->config();
  const bool unchanged = part.variant == VariantSchedule::kUnchanged;
  if (config.family == model::Family::kVim) {
    const std::vector<int32_t>& removed = removed_[variants_[part.variant]];
    int64_t row = config.vision.class_position();
    if (removal_.how == Removal::How::kDelete) {
      row -= std::lower_bound(removed.begin(), removed.end(), row) - removed.begin();
    }
    wanted.logit_rows.push_back(static_cast<int32_t>(row));
    return;
  }
  const int64_t rows = unchanged ? rows_ : length_[part.variant];
  for (size_t i = wanted.running->next_output; i < subject_.outputs.size(); ++i) {
    const int64_t row = subject_.outputs.size() == 1 ? rows - 1 : subject_.outputs[i].position;
    if (row >= part.end) break;
    wanted.logit_rows.push_back(static_cast<int32_t>(row - part.begin));
  }
}

absl::Status VariantRunner::EndPass() {
  const auto outputs = static_cast<size_t>(subject_.model->config().outputs());
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (pieces_[i].nonfinite_layer >= 0) {
      return absl::InternalError(
          absl::StrCat("the input with tokens removed: the result is not "
                       "finite from layer ",
                       pieces_[i].nonfinite_layer, " on"));
    }
    const std::span<const float> logits = parts_[i].logits;
    for (size_t row = 0; row < parts_[i].logit_rows.size(); ++row) {
      Add(logits.subspan(row * outputs, outputs), *parts_[i].running);
    }
    const int32_t variant = pass_.parts[i].variant;
    if (variant == VariantSchedule::kUnchanged || pass_.parts[i].end < length_[variant]) continue;
    outcomes_[variants_[variant]] = running_[variant]->sum;
    running_[variant] = nullptr;
  }
  parts_.clear();
  pieces_.clear();
  return absl::OkStatus();
}

// The next output's row.
void VariantRunner::Add(std::span<const float> logits, Running& running) const {
  const Output& output = subject_.outputs[running.next_output++];
  VariantOutcome& sum = running.sum;
  double value = logits[output.token];
  if (output.contrast >= 0) value -= logits[output.contrast];
  sum.value += value;
  sum.log_probability += model::LogProbability(logits, output.token);
  sum.hit = sum.hit && logits[output.token] >= *std::max_element(logits.begin(), logits.end());
}

VariantCost VariantRunner::CostOf(const model::ModelConfig& config,
                                  std::vector<VariantExtent> extents, bool starts_known,
                                  int64_t rows, int64_t outputs, int64_t removed) {
  const PassLimits limits = PassLimits::Of(config, rows, /*share=*/true);
  const auto variants = static_cast<int64_t>(extents.size());
  ScheduleTotals totals =
      TotalsOf(VariantSchedule(std::move(extents), rows, LastRows(outputs), limits));
  VariantCost cost;
  cost.slices = totals.passes * limits.SlicesOf(config);
  cost.work.forward_tokens = static_cast<double>(totals.rows);
  cost.work.gemm = static_cast<double>(totals.logit_rows) * config.outputs() * config.d_model;

  if (!starts_known) {  // variants that share more are more in a pass, beside the unchanged input
    totals.most_rows += std::min(limits.shared_rows, rows - 1);
    totals.most_parts = std::min(limits.variants, variants) + 1;
    totals.most_logit_rows = std::min(limits.variants, variants);
  }

  const bool vim = config.family == model::Family::kVim;
  // A forward pass's buffers, and what enters it.
  const int64_t row = config.d_model + model::BlockFloats(config, /*traced=*/false);
  int64_t floats = totals.most_rows * row;
  floats += totals.most_logit_rows * (config.d_model + 2 * int64_t{config.outputs()});
  if (vim) {
    const int64_t pixels = 3ll * config.vision.patch_size * config.vision.patch_size;
    floats += rows * (2 * config.d_model + pixels);
  }
  constexpr int64_t kOfVariant = 160;     // its outcome, extent and places in lists, some twice
  constexpr int64_t kOfRunner = 8 << 10;  // itself and a pass's lists
  cost.memory_bytes = kOfRunner + static_cast<int64_t>(sizeof(float)) * (floats + removed) +
                      variants * kOfVariant +
                      (totals.most_parts + 1) * model::RecurrentState::Bytes(config);
  return cost;
}

}  // namespace mambascope::explain
