#include "client/cli/target_text.h"

#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/heat_scale.h"
#include "client/cli/render_text.h"

namespace mambascope::cli {
namespace {

std::string Output(absl::string_view piece, int32_t id, bool classes) {
  const std::string number = absl::StrCat(classes ? "class " : "#", id);
  if (piece.empty()) return number;
  return absl::StrCat("\"", classes ? std::string(piece) : ReadablePiece(piece, id), "\" (", number,
                      ")");
}

bool IsSpan(const v1::ResolvedTarget& target) {
  return target.has_generated() && target.generated_end() > target.generated() + 1;
}

// "after position 4", "the generated token 2".
std::string Place(const v1::ResolvedTarget& target, bool classes) {
  if (target.has_generated()) return absl::StrCat(", generated token ", target.generated());
  return classes ? "" : absl::StrCat(" after position ", target.position());
}

}  // namespace

std::string TargetText(const v1::ResolvedTarget& target, v1::OutputValue value, bool classes) {
  std::string text = "why ";
  if (IsSpan(target)) {
    absl::StrAppend(&text, "the generated tokens ", target.generated(), " to ",
                    target.generated_end() - 1);
  } else {
    absl::StrAppend(&text, Output(target.piece(), target.token_id(), classes));
  }
  const bool contrast = target.has_contrast_token_id();
  if (contrast) {
    absl::StrAppend(&text, " rather than ",
                    Output(target.contrast_piece(), target.contrast_token_id(), classes));
  }
  if (!IsSpan(target)) absl::StrAppend(&text, Place(target, classes));
  const bool log_probability = value == v1::OUTPUT_VALUE_LOG_PROBABILITY;
  const char* what = log_probability ? "log-probability" : "logit";
  absl::StrAppend(&text, ": ");
  if (contrast || IsSpan(target)) {
    absl::StrAppend(&text, contrast ? "difference of " : "sum of ",
                    log_probability ? "log-probabilities " : "logits ");
  } else {
    absl::StrAppend(&text, what, " ");
  }
  absl::StrAppend(&text, Number(target.value()));
  absl::StrAppendFormat(&text, ", probability %.4g (log %.4g)", std::exp(target.log_probability()),
                        target.log_probability());
  return text;
}

}  // namespace mambascope::cli
