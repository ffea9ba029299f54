#include "client/cli/target_option.h"

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/cli/field_option.h"
#include "server/base/status.h"

namespace mambascope::cli {
namespace {

constexpr absl::string_view kClass = "class:";  // of a classifier
constexpr absl::string_view kGenerated = "gen:";

absl::StatusOr<int32_t> ParseClass(absl::string_view text) {
  int32_t id = 0;
  if (absl::SimpleAtoi(text, &id)) return id;
  return absl::InvalidArgumentError(
      absl::StrCat("'class:", text, "' is not class:NUMBER, as class:3"));
}

absl::Status SetOutput(absl::string_view token, v1::Target* target) {
  if (token.empty()) return absl::InvalidArgumentError("nothing follows the colon");
  if (int32_t id = 0; absl::SimpleAtoi(token, &id)) {
    target->set_token_id(id);
  } else {
    target->set_text(std::string(token));
  }
  return absl::OkStatus();
}

bool NamesPlace(const v1::Target& target) {
  return target.has_position() || target.has_generated() ||
         target.output_case() != v1::Target::OUTPUT_NOT_SET;
}

}  // namespace

absl::Status ParseGenerated(absl::string_view option, v1::Target* target) {
  std::pair<int64_t, int64_t> interval;
  const absl::Status status = ParseInterval(option, &interval);
  if (!status.ok() || interval.first < 0 ||
      interval.second >= std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", option, "' names no generated tokens, as 0 for the first or 0-4 for the first five"));
  }
  target->set_generated(static_cast<int32_t>(interval.first));
  if (interval.first != interval.second) {
    target->set_generated_end(static_cast<int32_t>(interval.second + 1));
  }
  return absl::OkStatus();
}

absl::Status ParseTarget(absl::string_view option, v1::Target* target) {
  if (absl::ConsumePrefix(&option, kClass)) {
    ASSIGN_OR_RETURN(const int32_t id, ParseClass(option));
    target->set_class_id(id);
    return absl::OkStatus();
  }
  const bool generated = absl::ConsumePrefix(&option, kGenerated);
  const size_t colon = option.find(':');
  const absl::string_view place = option.substr(0, colon);
  if (generated) {
    RETURN_IF_ERROR(ParseGenerated(place, target));
  } else if (int32_t position = 0; absl::SimpleAtoi(place, &position)) {
    target->set_position(position);
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("'", option,
                     "' is not POS[:TOKEN], as -1 or 4:1127 or \"-1: Paris\"; nor gen:K, gen:A-B, "
                     "class:NUMBER"));
  }
  return colon == absl::string_view::npos ? absl::OkStatus()
                                          : SetOutput(option.substr(colon + 1), target);
}

absl::Status ParseContrast(absl::string_view option, v1::Target* target) {
  if (absl::ConsumePrefix(&option, kClass)) {
    ASSIGN_OR_RETURN(const int32_t id, ParseClass(option));
    target->set_contrast_class_id(id);
    return absl::OkStatus();
  }
  if (option.empty()) return absl::InvalidArgumentError("no token");
  if (int32_t id = 0; absl::SimpleAtoi(option, &id)) {
    target->set_contrast_token_id(id);
  } else {
    target->set_contrast_text(std::string(option));
  }
  return absl::OkStatus();
}

absl::Status ParseTargetValue(absl::string_view option, v1::Target* target) {
  v1::Target parsed;
  const absl::Status status = SetField("value", option, &parsed);
  if (status.ok()) target->set_value(parsed.value());
  return status;
}

void FillTarget(const v1::Target& common, v1::Target* target) {
  v1::Target filled = common;
  if (NamesPlace(*target)) {
    filled.clear_position();
    filled.clear_generated();
    filled.clear_generated_end();
    filled.clear_output();
  }
  if (target->contrast_case() != v1::Target::CONTRAST_NOT_SET) filled.clear_contrast();
  filled.MergeFrom(*target);
  *target = std::move(filled);
}

}  // namespace mambascope::cli
