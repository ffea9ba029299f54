#include "client/cli/build_request.h"

#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/delivery_option.h"
#include "client/cli/explain_option.h"
#include "client/cli/faithfulness_option.h"
#include "client/cli/image_file.h"
#include "client/cli/target_option.h"
#include "server/base/status.h"

namespace mambascope::cli {
namespace {

absl::Status SetInput(const PredictFlags& flags, v1::PredictRequest* request) {
  const int given = (flags.text ? 1 : 0) + (flags.tokens ? 1 : 0) + (flags.image ? 1 : 0);
  if (given != 1) {
    return absl::InvalidArgumentError("exactly one of --text, --tokens and --image is needed");
  }
  if (flags.image) {
    ASSIGN_OR_RETURN(*request->mutable_image(), ReadImageFile(*flags.image));
    return absl::OkStatus();
  }
  if (flags.text) {
    request->set_text(*flags.text);
    return absl::OkStatus();
  }
  for (const absl::string_view token : absl::StrSplit(*flags.tokens, ',')) {
    int32_t id = 0;
    if (!absl::SimpleAtoi(token, &id)) {
      return absl::InvalidArgumentError(absl::StrCat("--tokens: '", token, "' is not a token id"));
    }
    request->mutable_token_ids()->add_ids(id);
  }
  return absl::OkStatus();
}

void SetGeneration(const PredictFlags& flags, v1::PredictRequest* request) {
  v1::Generation generation;
  if (flags.max_tokens) generation.set_max_tokens(*flags.max_tokens);
  if (flags.temperature) generation.set_temperature(*flags.temperature);
  if (flags.top_p) generation.set_top_p(*flags.top_p);
  if (flags.top_k) generation.set_top_k(*flags.top_k);
  if (flags.seed) generation.set_seed(*flags.seed);
  if (flags.top_logprobs) generation.set_top_logprobs(*flags.top_logprobs);
  for (const std::string& stop : flags.stop) generation.add_stop(stop);
  generation.set_ignore_eos(flags.ignore_eos);
  generation.set_return_logits(flags.logits);
  if (generation.ByteSizeLong() > 0) *request->mutable_generation() = std::move(generation);
}

// The status of reading an option, with its name in front.
absl::Status Named(absl::string_view flag, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat(flag, ": ", status.message()));
}

absl::StatusOr<v1::Target> CommonTarget(const PredictFlags& flags) {
  v1::Target target;
  if (flags.target) RETURN_IF_ERROR(Named("--target", ParseTarget(*flags.target, &target)));
  if (flags.contrast) RETURN_IF_ERROR(Named("--contrast", ParseContrast(*flags.contrast, &target)));
  if (flags.target_value) {
    RETURN_IF_ERROR(Named("--target_value", ParseTargetValue(*flags.target_value, &target)));
  }
  return target;
}

// Nothing if no flag asks for it.
absl::StatusOr<std::optional<v1::Faithfulness>> CommonFaithfulness(const PredictFlags& flags) {
  v1::Faithfulness common;
  bool given = !flags.faithfulness.empty();
  if (given) RETURN_IF_ERROR(Named("--faithfulness", ParseRemoval(flags.faithfulness, &common)));
  const std::pair<absl::string_view, const std::optional<std::string>&> parts[] = {
      {"faithfulness_draws", flags.faithfulness_draws},
      {"faithfulness_seed", flags.faithfulness_seed},
      {"faithfulness_shares", flags.faithfulness_shares},
      {"faithfulness_points", flags.faithfulness_points}};
  for (const auto& [key, value] : parts) {
    if (!value) continue;
    given = true;
    const absl::Status status = SetFaithfulnessKey(key, *value, &common);
    if (!status.ok()) return absl::InvalidArgumentError(absl::StrCat("--", status.message()));
  }
  return given ? std::optional<v1::Faithfulness>(common) : std::nullopt;
}

// Where the explanation says nothing else. What it removes and by which token belong together.
void FillFaithfulness(v1::Faithfulness common, v1::Explanation* explanation) {
  if (explanation->faithfulness().removal() != v1::Faithfulness::REMOVAL_UNSPECIFIED) {
    common.clear_token_id();
  }
  if (explanation->faithfulness().shares_size() > 0) common.clear_shares();
  common.MergeFrom(explanation->faithfulness());
  *explanation->mutable_faithfulness() = std::move(common);
}

absl::Status AddFaithfulness(const PredictFlags& flags, v1::PredictRequest* request) {
  ASSIGN_OR_RETURN(const std::optional<v1::Faithfulness> common, CommonFaithfulness(flags));
  if (!common) return absl::OkStatus();
  bool taken = false;
  for (v1::Explanation& explanation : *request->mutable_explanations()) {
    if (!GivesScores(explanation)) continue;
    FillFaithfulness(*common, &explanation);
    taken = true;
  }
  if (taken) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--faithfulness needs an --explain that gives one score for each token, as mamba_lrp");
}

absl::Status SetExplanations(const PredictFlags& flags, v1::PredictRequest* request) {
  const bool targeted = flags.target || flags.contrast || flags.target_value;
  if (flags.explain.empty() && targeted) {
    return absl::InvalidArgumentError("--target, --contrast and --target_value need an --explain");
  }
  ASSIGN_OR_RETURN(const v1::Target target, CommonTarget(flags));
  for (const std::string& option : flags.explain) {
    v1::Explanation& explanation = *request->add_explanations();
    ASSIGN_OR_RETURN(explanation, ParseExplain(option));
    if (targeted) FillTarget(target, explanation.mutable_target());
  }
  return AddFaithfulness(flags, request);
}

absl::Status SetDelivery(const PredictFlags& flags, v1::PredictRequest* request) {
  if (!flags.delivery.empty()) {
    RETURN_IF_ERROR(
        Named("--delivery", ParseDeliveryType(flags.delivery, request->mutable_delivery())));
  }
  if (!flags.sparse.empty()) {
    RETURN_IF_ERROR(Named("--sparse", ParseSparse(flags.sparse, request->mutable_delivery())));
  }
  return absl::OkStatus();
}

absl::Status SetLabels(const PredictFlags& flags, v1::PredictRequest* request) {
  for (const std::string& label : flags.labels) {
    const size_t equals = label.find('=');
    if (equals == std::string::npos || equals == 0) {
      return absl::InvalidArgumentError(absl::StrCat("--label: '", label, "' is not key=value"));
    }
    if (!request->mutable_labels()
             ->insert({label.substr(0, equals), label.substr(equals + 1)})
             .second) {
      return absl::InvalidArgumentError(
          absl::StrCat("--label: ", label.substr(0, equals), " is given twice"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::PredictRequest> BuildRequest(const PredictFlags& flags) {
  v1::PredictRequest request;
  request.set_request_id(flags.request_id);
  RETURN_IF_ERROR(SetInput(flags, &request));
  SetGeneration(flags, &request);
  RETURN_IF_ERROR(SetExplanations(flags, &request));
  RETURN_IF_ERROR(SetLabels(flags, &request));
  RETURN_IF_ERROR(SetDelivery(flags, &request));
  return request;
}

}  // namespace mambascope::cli
