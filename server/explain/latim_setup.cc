#include "server/explain/latim_setup.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/explain/options.h"
#include "server/explain/tensor_writer.h"

namespace mambascope::explain {
namespace {

using v1::Latim;

Latim::Norm NormOf(Latim::Norm norm) {
  return norm == Latim::NORM_UNSPECIFIED ? Latim::NORM_ALTI_LOGIT : norm;
}
// Whether the layers are joined.
bool IsJoined(Latim::Norm norm) {
  return norm == Latim::NORM_ALTI_LOGIT || norm == Latim::NORM_ALTI_ROLLOUT;
}

}  // namespace

LatimSetup::LatimSetup(const v1::Explanation& explanation, const model::ModelConfig& config,
                       int64_t length)
    : norm(NormOf(explanation.latim().norm())),
      all_rows(explanation.latim().rows() == v1::ROWS_ALL),
      joined(IsJoined(norm)),
      tokens(length),
      target(TargetRowsOf(explanation, config, length)),
      prefix(all_rows ? length : ReadTokens(config, target.end() - 1, length)),
      layers(LayersOf(explanation.latim().layers(), config)),
      want{ActivationOf(explanation.latim().activation()), joined ? Latim::NORM_ALTI : norm,
           joined || explanation.latim().alti_residual()} {
  if (carries()) std::reverse(layers.begin(), layers.end());
  stream_stride = model::SequenceTrace::StreamStride(config, length);
}

void CheckLatimOptions(const v1::Explanation& explanation, const model::ModelConfig& config,
                       const std::string& field, Violations& violations) {
  const Latim& options = explanation.latim();
  const Latim::Norm norm = NormOf(options.norm());
  CheckLogitTarget(explanation, field, violations);
  const bool known =
      CheckEnum(Latim::Norm_IsValid(options.norm()), options.norm(), field + ".norm", violations);
  CheckEnum(Latim::Activation_IsValid(options.activation()), options.activation(),
            field + ".activation", violations);
  const bool rows =
      CheckEnum(v1::Rows_IsValid(options.rows()), options.rows(), field + ".rows", violations);
  CheckLayers(options.layers(), config, field, violations);
  if (!known) return;
  const std::string& spelled = Latim::Norm_Name(norm);
  if (options.alti_residual() && norm != Latim::NORM_ALTI) {
    violations.Add(field + ".alti_residual", IsJoined(norm)
                                                 ? absl::StrCat("is for NORM_ALTI only; ", spelled,
                                                                " always has the residual")
                                                 : "is for NORM_ALTI only");
  }
  if (IsJoined(norm) && !options.layers().empty()) {
    violations.Add(field + ".layers", absl::StrCat("do not go with ", spelled,
                                                   ", which needs all layers; NORM_ALTI, NORM_L1 "
                                                   "and NORM_L2 explain some"));
  }
  if (rows && norm == Latim::NORM_ALTI_LOGIT && options.rows() != v1::ROWS_UNSPECIFIED) {
    violations.Add(field + ".rows",
                   absl::StrCat(v1::Rows_Name(options.rows()),
                                " does not go with NORM_ALTI_LOGIT, whose parts are of the "
                                "target's logit; NORM_ALTI_ROLLOUT has rows"));
  }
}

std::vector<v1::TensorInfo> LatimTensors(const LatimSetup& setup, const model::ModelConfig& config,
                                         v1::DataType dtype) {
  std::vector<v1::TensorInfo> tensors;
  const Axis layers = {"layers", static_cast<int64_t>(setup.layers.size()), setup.layers};
  const Axis inputs = {"input_tokens", setup.tokens, {}};
  std::vector<Axis> axes;
  if (!setup.joined) axes.push_back(layers);
  if (setup.all_rows) axes.push_back({"output_tokens", setup.tokens, {}});
  axes.push_back(inputs);
  tensors.push_back(MakeTensorInfo("latim", std::move(axes), dtype));
  tensors.back().set_nonnegative(setup.norm != Latim::NORM_ALTI_LOGIT);
  if (setup.norm != Latim::NORM_ALTI_LOGIT) return tensors;
  tensors.push_back(MakeTensorInfo("per_layer", {{"layers", config.layers, {}}, inputs}, dtype));
  tensors.push_back(MakeTensorInfo("embedding", {{"value", 1, {}}}, dtype));
  tensors.push_back(MakeTensorInfo("embedding_tokens", {inputs}, dtype));
  tensors.push_back(MakeTensorInfo("constant", {{"value", 1, {}}}, dtype));
  return tensors;
}

}  // namespace mambascope::explain
