#include "server/serving/target.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/explain/options.h"

namespace mambascope::serving {
namespace {

using explain::Violations;

// Each log-probability reads the whole head once more.
constexpr int32_t kMostLogSpan = 64;

std::optional<int32_t> CheckTokenId(int32_t id, const ServedModel& model, const std::string& field,
                                    Violations& violations) {
  const int32_t vocabulary = model.model->config().vocabulary;
  if (id >= 0 && id < vocabulary) return id;
  violations.Add(field, absl::StrCat(id, " is outside 0 to ", vocabulary - 1));
  return std::nullopt;
}

std::optional<int32_t> CheckTokenText(const std::string& text, const ServedModel& model,
                                      const std::string& field, Violations& violations) {
  if (model.tokenizer == nullptr) {
    violations.Add(field,
                   absl::StrCat("model '", model.name, "' has no text: ", model.tokenizer_note));
    return std::nullopt;
  }
  if (text.empty() || text.size() > 1024) {
    violations.Add(field, absl::StrCat(text.size(), " bytes are outside 1 to 1024"));
    return std::nullopt;
  }
  const auto encoded = model.tokenizer->Encode(text, /*add_special_tokens=*/false);
  if (encoded.ok() && encoded->size() == 1) return encoded->front().id;
  violations.Add(field,
                 encoded.ok()
                     ? absl::StrCat("is ", encoded->size(), " tokens (",
                                    absl::StrJoin(*encoded, " ",
                                                  [](std::string* out, const model::Token& token) {
                                                    absl::StrAppend(out, "'", token.piece, "'");
                                                  })
                                        .substr(0, 200),
                                    "); a target is exactly one. A leading space often matters")
                     : std::string(encoded.status().message()));
  return std::nullopt;
}

std::optional<int32_t> CheckClass(int32_t id, const ServedModel& model, const std::string& field,
                                  Violations& violations) {
  const int32_t classes = model.model->config().classes;
  if (id >= 0 && id < classes) return id;
  violations.Add(field, absl::StrCat(id, " is outside 0 to ", classes - 1));
  return std::nullopt;
}

// Classifiers have classes at their one position, language models tokens at each.
void CheckKind(const v1::Target& target, const ServedModel& model, const std::string& field,
               Violations& violations) {
  const bool classes = model.model->config().task != model::Task::kNextToken;
  const bool names_token = target.output_case() == v1::Target::kTokenId ||
                           target.output_case() == v1::Target::kText ||
                           target.contrast_case() == v1::Target::kContrastTokenId ||
                           target.contrast_case() == v1::Target::kContrastText;
  const bool names_class = target.output_case() == v1::Target::kClassId ||
                           target.contrast_case() == v1::Target::kContrastClassId;
  if (classes && names_token) {
    violations.Add(field,
                   absl::StrCat("model '", model.name, "' answers with classes: give class_id"));
  }
  if (!classes && names_class) {
    violations.Add(
        field, absl::StrCat("model '", model.name, "' answers with tokens: give token_id or text"));
  }
}

void ResolvePosition(const v1::Target& target, int64_t tokens, const ServedModel& model,
                     const std::string& field, PlannedExplanation& planned,
                     Violations& violations) {
  const model::ModelConfig& config = model.model->config();
  planned.tokens = tokens;
  const int64_t predicting =
      config.task == model::Task::kImageClass ? config.vision.class_position() : tokens - 1;
  if (!target.has_position()) {
    planned.position = static_cast<int32_t>(predicting);
    return;
  }
  const int64_t position = target.position();
  const int64_t from_start = position < 0 ? position + tokens : position;
  planned.position = static_cast<int32_t>(std::clamp<int64_t>(from_start, 0, tokens - 1));
  if (from_start < 0 || from_start >= tokens) {
    violations.Add(field + ".position",
                   absl::StrCat(position, " is outside the ", tokens, " tokens of the input"));
  } else if (config.task != model::Task::kNextToken && from_start != predicting) {
    violations.Add(field + ".position",
                   absl::StrCat(position, " is not ", predicting, ", where model '", model.name,
                                "' reads its answer"));
  }
}

// Generated tokens [begin, end): the input is the prompt and what was generated before end - 1.
void ResolveGenerated(const v1::PredictRequest& request, const v1::Target& target, int64_t tokens,
                      const ServedModel& model, const std::string& field,
                      PlannedExplanation& planned, Violations& violations) {
  const int32_t most =
      request.generation().has_max_tokens() ? request.generation().max_tokens() : 1;
  const int32_t begin = target.generated();
  const int32_t end = target.has_generated_end() ? target.generated_end() : begin + 1;
  if (model.model->config().task != model::Task::kNextToken) {
    violations.Add(field + ".generated", absl::StrCat("model '", model.name,
                                                      "' answers with classes and generates none"));
  } else if (target.has_position()) {
    violations.Add(field + ".generated", "does not go with position; give one of them");
  } else if (begin < 0 || begin >= most) {
    violations.Add(field + ".generated",
                   absl::StrCat(begin, " is outside the ", most,
                                " tokens of generation.max_tokens, counted from 0"));
  } else if (end <= begin || end > most) {
    violations.Add(field + ".generated_end", absl::StrCat(end, " is outside ", begin + 1, " to ",
                                                          most, ", generation.max_tokens"));
  } else if (end > begin + 1 && (target.output_case() != v1::Target::OUTPUT_NOT_SET ||
                                 target.contrast_case() != v1::Target::CONTRAST_NOT_SET)) {
    violations.Add(field,
                   "a span of generated tokens explains them as they are: neither an "
                   "output nor a contrast may be given");
  } else if (target.value() == v1::OUTPUT_VALUE_LOG_PROBABILITY && end - begin > kMostLogSpan) {
    violations.Add(field + ".generated_end",
                   absl::StrCat("a span of ", end - begin, " log-probabilities is longer than ",
                                kMostLogSpan, "; ask for OUTPUT_VALUE_LOGIT or a shorter one"));
  } else {
    planned.generated_begin = begin;
    planned.generated_end = end;
    planned.tokens = tokens + end - 1;
    planned.position = static_cast<int32_t>(planned.tokens - 1);
    planned.options.mutable_target()->clear_position();  // the last of `planned.tokens`
  }
}

std::optional<int32_t> ResolveOutput(const v1::Target& target, const ServedModel& model,
                                     const std::string& field, Violations& violations) {
  const bool classes = model.model->config().task != model::Task::kNextToken;
  switch (target.output_case()) {
    case v1::Target::kClassId:
      if (!classes) return std::nullopt;
      return CheckClass(target.class_id(), model, field + ".class_id", violations);
    case v1::Target::kTokenId:
      if (classes) return std::nullopt;
      return CheckTokenId(target.token_id(), model, field + ".token_id", violations);
    case v1::Target::kText:
      if (classes) return std::nullopt;
      return CheckTokenText(target.text(), model, field + ".text", violations);
    case v1::Target::OUTPUT_NOT_SET:
      break;
  }
  return std::nullopt;
}

std::optional<int32_t> ResolveContrast(const v1::Target& target, const ServedModel& model,
                                       const std::string& field, Violations& violations) {
  const bool classes = model.model->config().task != model::Task::kNextToken;
  switch (target.contrast_case()) {
    case v1::Target::kContrastClassId:
      if (!classes) return std::nullopt;
      return CheckClass(target.contrast_class_id(), model, field + ".contrast_class_id",
                        violations);
    case v1::Target::kContrastTokenId:
      if (classes) return std::nullopt;
      return CheckTokenId(target.contrast_token_id(), model, field + ".contrast_token_id",
                          violations);
    case v1::Target::kContrastText:
      if (classes) return std::nullopt;
      return CheckTokenText(target.contrast_text(), model, field + ".contrast_text", violations);
    case v1::Target::CONTRAST_NOT_SET:
      break;
  }
  return std::nullopt;
}

}  // namespace

void ResolveTarget(const v1::PredictRequest& request, const v1::Target& target, int64_t tokens,
                   const ServedModel& model, const std::string& field, PlannedExplanation& planned,
                   Violations& violations) {
  planned.tokens = tokens;
  if (target.has_generated()) {
    ResolveGenerated(request, target, tokens, model, field, planned, violations);
  } else {
    if (target.has_generated_end()) {
      violations.Add(field + ".generated_end", "needs generated, the first of the span");
    }
    ResolvePosition(target, tokens, model, field, planned, violations);
  }
  explain::CheckEnum(v1::OutputValue_IsValid(target.value()), target.value(), field + ".value",
                     violations);
  CheckKind(target, model, field, violations);
  planned.token = ResolveOutput(target, model, field, violations);
  planned.contrast_token = ResolveContrast(target, model, field, violations);
  if (planned.token.has_value() && planned.token == planned.contrast_token) {
    const bool classes = model.model->config().task != model::Task::kNextToken;
    violations.Add(field, absl::StrCat("target and contrast are the same ",
                                       classes ? "class " : "token ", *planned.token));
  }
}

}  // namespace mambascope::serving
