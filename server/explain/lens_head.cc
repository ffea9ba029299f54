#include "server/explain/lens_head.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/explain/layer_attention.h"
#include "server/kernels/gemm.h"

namespace mambascope::explain {
namespace {

constexpr int64_t kHeadWork = int64_t{1} << 30;  // multiply-adds of a slice, about 20 ms
constexpr int32_t kDefaultTop = 5;
constexpr int32_t kMaxTop = 100;

}  // namespace

int32_t LensTop(int32_t top, const model::ModelConfig& config) {
  return top != 0 ? top : std::min(kDefaultTop, config.outputs());
}

void CheckLensTop(int32_t top, const model::ModelConfig& config, const std::string& field,
                  Violations& violations) {
  const int32_t most = std::min(kMaxTop, config.outputs());
  if (top >= 0 && top <= most) return;
  violations.Add(field + ".top", absl::StrCat(top, " is outside [1, ", most, "]"));
}

int64_t LensHead::CellsPerSlice() const {
  return std::max<int64_t>(1, kHeadWork / (outputs_ * d_model_));
}

int64_t LensHead::Slices(int64_t cells) const {
  return (cells + CellsPerSlice() - 1) / CellsPerSlice();
}

int64_t LensHead::MemoryBytes(int64_t cells) const {
  const int64_t logits = std::min(cells, CellsPerSlice()) * outputs_;
  return 4 * (logits + outputs_ + 4 * cells * top_);
}

absl::Status LensHead::Read(const Subject& subject, absl::string_view method, int32_t layer,
                            const float* rows, int64_t cells) {
  const model::WeightViews& weights = subject.model->weights().views();
  logits_.Reserve(cells * outputs_);
  kernels::Linear(*subject.pool, {rows, cells, d_model_, d_model_}, weights.head,
                  biased_ ? weights.head_bias : nullptr,
                  {logits_.data(), cells, outputs_, outputs_});
  std::vector<int32_t> order(outputs_);
  for (int64_t cell = 0; cell < cells; ++cell) {
    const std::span<const float> logits(logits_.data() + cell * outputs_, outputs_);
    RETURN_IF_ERROR(CheckFinite(method, layer, logits));
    for (int64_t v = 0; v < outputs_; ++v) order[v] = static_cast<int32_t>(v);
    std::partial_sort(order.begin(), order.begin() + top_, order.end(), [&](int32_t a, int32_t b) {
      return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    });
    for (int64_t k = 0; k < top_; ++k) {
      ids_.push_back(order[k]);
      values_.push_back(logits[order[k]]);
    }
  }
  return absl::OkStatus();
}

void LensHead::Write(TensorWriter& writer, absl::string_view method) {
  writer.Write(method, std::span<const float>(values_));
  writer.Write("ids", std::span<const int32_t>(ids_));
  values_.clear();
  ids_.clear();
}

std::vector<v1::TensorInfo> LensTensors(absl::string_view method,
                                        const std::vector<int32_t>& layers, Axis positions,
                                        int32_t top, v1::DataType dtype) {
  const std::vector<Axis> axes = {{"layers", static_cast<int64_t>(layers.size()), layers},
                                  std::move(positions),
                                  {"rank", top, {}}};
  return {MakeTensorInfo(std::string(method), axes, dtype),
          MakeTensorInfo("ids", axes, v1::DATA_TYPE_INT32)};
}

}  // namespace mambascope::explain
