// The maps themselves: each layer's hidden attention, of the scan or of the whole mixer
// (methods.md, sections 2 and 3). What is asked for and what will come; the numbers are made in
// hidden_attention_scan.cc and hidden_attention_mixer.cc.
#include <string>

#include "absl/strings/str_cat.h"
#include "server/explain/hidden_attention_setup.h"

namespace mambascope::explain {
namespace {

using Setup = HiddenAttentionSetup;
constexpr int32_t kMostChannels = 64;

class HiddenAttention : public Method {
 public:
  absl::string_view name() const override { return Setup::kName; }

  void Validate(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t /*tokens*/, const std::string& field,
                Violations& violations) const override {
    const v1::HiddenAttention& options = explanation.hidden_attention();
    const v1::Part part = options.part();
    CheckEnum(v1::Part_IsValid(part), part, field + ".part", violations);
    CheckEnum(v1::Rows_IsValid(options.rows()), options.rows(), field + ".rows", violations);
    CheckLayers(options.layers(), config, field, violations);
    CheckScope(options, config, field, violations);
    const v1::Reduction reduction = options.reduction();
    if (IsFactor(part) && v1::Reduction_IsValid(reduction) &&
        reduction != v1::REDUCTION_UNSPECIFIED && reduction != v1::REDUCTION_CHANNELS) {
      violations.Add(field + ".reduction",
                     absl::StrCat(v1::Reduction_Name(reduction), " does not go with ",
                                  v1::Part_Name(part), ", which allows REDUCTION_CHANNELS only"));
    }
    const bool factor = IsFactor(part) && v1::Reduction_IsValid(reduction);
    const bool mixer = options.scope() == v1::HiddenAttention::SCOPE_MIXER;
    CheckReduction(factor ? v1::REDUCTION_CHANNELS : reduction, options.channels(), kMostChannels,
                   options.top_k(), mixer ? ByChannel(config) : config, field, violations);
    CheckIndices(options.states(), config.d_state, config.d_state, field + ".states", violations);
    if (v1::Part_IsValid(part) && !options.states().empty() && part != v1::PART_STATE &&
        part != v1::PART_H) {
      violations.Add(field + ".states", "is for PART_STATE and PART_H only");
    }
    if (IsPerToken(part) && options.rows() == v1::ROWS_TARGET) {
      violations.Add(field + ".rows", absl::StrCat("ROWS_TARGET does not go with ",
                                                   v1::Part_Name(part), ", which has no rows"));
    }
  }

  Plan MakePlan(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, v1::DataType dtype) const override {
    const Setup setup(explanation, config, tokens, TargetRow(explanation, config, tokens));
    const Axis layers = {"layers", static_cast<int64_t>(setup.layers.size()), setup.layers};
    Plan plan;
    plan.tensors.push_back(MakeTensorInfo(std::string(Setup::kName), Axes(setup), dtype));
    plan.tensors[0].set_nonnegative(setup.reduction.how == v1::REDUCTION_ABS_MEAN);
    if (setup.mixer()) {
      plan.tensors.push_back(MakeTensorInfo("constant", ConstantAxes(setup), dtype));
    }
    if (setup.reduction.how == v1::REDUCTION_TOP_K) {
      plan.tensors.push_back(MakeTensorInfo(
          "indices", {layers, {"rank", setup.reduction.top_k, {}}}, v1::DATA_TYPE_INT32));
    }
    (setup.mixer() ? PlanMixer : PlanScan)(setup, &plan);
    return plan;
  }

  std::unique_ptr<Explaining> Start(const v1::Explanation& options,
                                    const Subject& subject) const override {
    const bool mixer = options.hidden_attention().scope() == v1::HiddenAttention::SCOPE_MIXER;
    return (mixer ? ExplainMixer : ExplainScan)(options, subject);
  }

 private:
  static void CheckScope(const v1::HiddenAttention& options, const model::ModelConfig& config,
                         const std::string& field, Violations& violations) {
    using Options = v1::HiddenAttention;
    const v1::Part part = options.part();
    CheckEnum(Options::Scope_IsValid(options.scope()), options.scope(), field + ".scope",
              violations);
    if (options.scope() == Options::SCOPE_MIXER && v1::Part_IsValid(part) &&
        part != v1::PART_UNSPECIFIED && part != v1::PART_ALPHA) {
      violations.Add(field + ".part",
                     absl::StrCat(v1::Part_Name(part),
                                  " does not go with SCOPE_MIXER, which allows PART_ALPHA only"));
    }
    if (!CheckEnum(Options::Direction_IsValid(options.direction()), options.direction(),
                   field + ".direction", violations)) {
      return;
    }
    const bool one = options.direction() == Options::DIRECTION_FORWARD ||
                     options.direction() == Options::DIRECTION_BACKWARD;
    if (config.directions() == 1 && options.direction() != Options::DIRECTION_UNSPECIFIED) {
      violations.Add(field + ".direction",
                     absl::StrCat(Options::Direction_Name(options.direction()),
                                  " is for models with two scans only"));
    }
    if (config.directions() == 2 && v1::Part_IsValid(part) && IsFactor(part) && !one) {
      violations.Add(
          field + ".direction",
          absl::StrCat(v1::Part_Name(part), " belongs to one scan: DIRECTION_FORWARD or ",
                       "DIRECTION_BACKWARD must be named"));
    }
  }

  static std::vector<Axis> ConstantAxes(const Setup& setup) {
    std::vector<Axis> axes = {{"layers", static_cast<int64_t>(setup.layers.size()), setup.layers}};
    if (setup.kind == Setup::Kind::kChannels) {
      axes.push_back({"channels", static_cast<int64_t>(setup.channels().size()), setup.channels()});
    }
    if (setup.all_rows) axes.push_back({"output_tokens", setup.tokens, {}});
    return axes;
  }

  static std::vector<Axis> Axes(const Setup& setup) {
    const auto channels = static_cast<int64_t>(setup.channels().size());
    const Axis layer_axis = {"layers", static_cast<int64_t>(setup.layers.size()), setup.layers};
    const Axis channel_axis = {"channels", channels, setup.channels()};
    const Axis state_axis = {"states", static_cast<int64_t>(setup.states.size()), setup.states};
    std::vector<Axis> axes = {layer_axis};
    if (setup.kind == Setup::Kind::kPerToken) {
      axes.insert(axes.end(), {{"tokens", setup.tokens, {}}, channel_axis, state_axis});
      return axes;
    }
    if (setup.kind != Setup::Kind::kReduced) axes.push_back(channel_axis);
    if (setup.kind == Setup::Kind::kInner) axes.push_back(state_axis);
    if (setup.all_rows) axes.push_back({"output_tokens", setup.tokens, {}});
    axes.push_back({"input_tokens", setup.tokens, {}});
    return axes;
  }
};

}  // namespace

std::unique_ptr<const Method> NewHiddenAttention() { return std::make_unique<HiddenAttention>(); }

}  // namespace mambascope::explain
