#include "client/cli/faithfulness_option.h"

#include <cstdint>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/cli/field_option.h"

namespace mambascope::cli {
namespace {

struct Key {
  absl::string_view key, field;
};
constexpr Key kKeys[] = {{"faithfulness_draws", "random_draws"},
                         {"faithfulness_seed", "seed"},
                         {"faithfulness_shares", "shares"},
                         {"faithfulness_points", "points"}};

const Key* FindKey(absl::string_view name) {
  for (const Key& key : kKeys) {
    if (key.key == name) return &key;
  }
  return nullptr;
}

// The published code leaves the target's own entry out.
bool IsPaper(v1::Variant variant) {
  return variant == v1::VARIANT_UNSPECIFIED || variant == v1::VARIANT_PAPER;
}

bool LatimGivesScores(const v1::Latim& latim) {
  return latim.norm() == v1::Latim::NORM_UNSPECIFIED ||
         latim.norm() == v1::Latim::NORM_ALTI_LOGIT ||
         (latim.norm() == v1::Latim::NORM_ALTI_ROLLOUT && latim.rows() != v1::ROWS_ALL);
}

}  // namespace

absl::Status ParseRemoval(absl::string_view option, v1::Faithfulness* faithfulness) {
  const absl::string_view given = option;
  int32_t id = 0;
  if (option == "zero") {
    faithfulness->set_removal(v1::Faithfulness::REMOVAL_ZERO);
  } else if (option == "delete") {
    faithfulness->set_removal(v1::Faithfulness::REMOVAL_DELETE);
  } else if (absl::ConsumePrefix(&option, "token:") && absl::SimpleAtoi(option, &id)) {
    faithfulness->set_removal(v1::Faithfulness::REMOVAL_TOKEN);
    faithfulness->set_token_id(id);
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("'", given, "' is not one of zero, delete, token:ID"));
  }
  return absl::OkStatus();
}

bool IsFaithfulnessKey(absl::string_view key) { return FindKey(key) != nullptr; }

absl::Status SetFaithfulnessKey(absl::string_view key, absl::string_view value,
                                v1::Faithfulness* faithfulness) {
  absl::Status status = SetField(FindKey(key)->field, value, faithfulness);
  if (status.ok()) return status;
  absl::string_view message = status.message();
  absl::ConsumePrefix(&message, absl::StrCat(FindKey(key)->field, ": "));
  return absl::InvalidArgumentError(absl::StrCat(key, ": ", message));
}

std::vector<std::string> FaithfulnessKeys() {
  std::vector<std::string> keys;
  for (const Key& key : kKeys) keys.emplace_back(key.key);
  return keys;
}

bool GivesScores(const v1::Explanation& explanation) {
  switch (explanation.method_case()) {
    case v1::Explanation::kRawAttention:
      return IsPaper(explanation.raw_attention().variant());
    case v1::Explanation::kAttentionRollout:
      return IsPaper(explanation.attention_rollout().variant()) &&
             explanation.attention_rollout().rows() != v1::ROWS_ALL;
    case v1::Explanation::kMambaAttribution:
      return IsPaper(explanation.mamba_attribution().variant());
    case v1::Explanation::kLatim:
      return LatimGivesScores(explanation.latim());
    case v1::Explanation::kMambaLrp:
      return explanation.mamba_lrp().rows() != v1::ROWS_ALL;
    case v1::Explanation::kGradientXInput:
      return explanation.gradient_x_input().rows() != v1::ROWS_ALL;
    case v1::Explanation::kIntegratedGradients:
    case v1::Explanation::kOcclusion:
      return true;
    default:
      return false;
  }
}

}  // namespace mambascope::cli
