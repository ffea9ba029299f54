#include "client/cli/answer_view.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/cli/errors.h"
#include "client/cli/heat_scale.h"
#include "client/cli/render_map.h"

namespace mambascope::cli {
namespace {

constexpr int kIndent = 12;       // of what follows "prediction  "
constexpr int kMostTopLists = 8;  // generated tokens whose alternatives are listed

std::string Probability(float log_probability) {
  return absl::StrFormat("probability %.4g (log %.4g)", std::exp(log_probability), log_probability);
}

std::string FinishName(v1::FinishReason reason) {
  absl::string_view name = v1::FinishReason_Name(reason);
  absl::ConsumePrefix(&name, "FINISH_REASON_");
  return absl::AsciiStrToLower(name);
}

std::string Shape(const v1::TensorInfo& info) {
  std::vector<std::string> axes;
  for (const auto& axis : info.axes()) axes.push_back(absl::StrCat(axis.size(), " ", axis.name()));
  return absl::StrCat("[", absl::StrJoin(axes, ", "), "]");
}

std::string TargetText(const v1::ResolvedTarget& target) {
  const auto token = [](absl::string_view piece, int32_t id) {
    return piece.empty() ? absl::StrCat("#", id)
                         : absl::StrCat("\"", ReadablePiece(piece, id), "\" (#", id, ")");
  };
  std::string text = absl::StrCat("why ", token(target.piece(), target.token_id()));
  const bool contrast = target.has_contrast_token_id();
  if (contrast) {
    absl::StrAppend(&text, " rather than ",
                    token(target.contrast_piece(), target.contrast_token_id()));
  }
  absl::StrAppend(&text, " after position ", target.position(), ": ",
                  contrast ? "difference of logits " : "logit ", Number(target.value()), ", ",
                  Probability(target.log_probability()));
  return text;
}

std::string QualityText(const v1::Quality& quality) {
  std::vector<std::string> parts;
  const v1::Quality::Reconstruction& reconstruction = quality.reconstruction();
  const auto& errors = reconstruction.relative_error_by_layer();
  if (!errors.empty()) {
    parts.push_back(absl::StrFormat("reconstruction error %.3g",
                                    *std::max_element(errors.begin(), errors.end())));
  }
  if (quality.has_smallest_row_sum()) {
    parts.push_back(absl::StrFormat("smallest row sum %.3g", quality.smallest_row_sum()));
  }
  if (parts.empty()) return "";
  if (quality.tolerance() > 0) {
    parts.push_back(absl::StrFormat("%s the tolerance of %.3g",
                                    quality.within_tolerance() ? "within" : "BEYOND",
                                    quality.tolerance()));
  }
  std::string text = absl::StrCat("quality: ", absl::StrJoin(parts, ", "));
  if (!errors.empty()) {
    absl::StrAppendFormat(&text, " (the worst of %d layers; %d channels, %d rows compared)",
                          errors.size(), reconstruction.channels_compared(),
                          reconstruction.rows_compared());
  }
  return text;
}

}  // namespace

std::string AnswerView::Safe(absl::string_view text) const { return Escaped(text, screen_.utf8); }

void AnswerView::OnEvent(const v1::PredictEvent& event, const Answer& answer) {
  switch (event.event_case()) {
    case v1::PredictEvent::kStarted:
      ShowStarted(event.started());
      break;
    case v1::PredictEvent::kToken:
      ShowToken(event.token());
      // Nothing follows the last token that may come, so the prediction need not wait for the
      // explanations.
      if (static_cast<int>(answer.generated().size()) >=
          (request_.generation().has_max_tokens() ? request_.generation().max_tokens() : 1)) {
        ShowPrediction(answer);
      }
      break;
    case v1::PredictEvent::kClassification:
      ShowClasses(event.classification());
      break;
    case v1::PredictEvent::kProgress:
      ShowProgress(event.progress());
      break;
    default:
      break;
  }
}

void AnswerView::OnEnd(const Answer& answer) {
  status_->Clear();
  if (!answer.generated().empty()) ShowPrediction(answer);
  for (const ExplanationAnswer& explanation : answer.explanations()) {
    if (explanation.finished) ShowExplanation(explanation);
  }
  out_ << std::flush;
}

void AnswerView::ShowStarted(const v1::Started& started) {
  tokens_ = LabelTokens(started.tokens(), request_.text());
  out_ << Dim(screen_) << "model       " << Reset(screen_) << Safe(started.model()) << "@"
       << Safe(started.version()) << "  " << Dim(screen_) << Safe(started.digest().substr(0, 12))
       << Reset(screen_) << "\n";
  if (tokens_.empty()) return;  // an image
  const std::string count =
      absl::StrCat(tokens_.size(), tokens_.size() == 1 ? " token" : " tokens");
  out_ << Dim(screen_) << Fitted(count, std::max(kIndent, DisplayWidth(count) + 2))
       << Reset(screen_);
  RenderTokens(screen_, tokens_, kIndent, out_);
  out_ << std::flush;
}

void AnswerView::ShowToken(const v1::TokenEvent& token) {
  status_->Clear();
  if (!in_prediction_) out_ << Dim(screen_) << "prediction  " << Reset(screen_);
  in_prediction_ = true;
  // Without a tokenizer there is no text; with one, a text may still wait for the next token.
  const std::string text = token.text().empty() && token.piece().empty()
                               ? absl::StrCat("#", token.token_id(), " ")
                               : token.text();
  if (!text.empty()) text_shown_ = true;
  out_ << Bold(screen_) << Safe(text) << Reset(screen_) << std::flush;
}

void AnswerView::ShowClasses(const v1::Classification& classification) {
  status_->Clear();
  std::string begin = "prediction";
  for (const v1::ClassProbability& candidate : classification.top()) {
    out_ << Dim(screen_) << Fitted(begin, kIndent) << Reset(screen_)
         << absl::StrFormat("%8.4f  ", std::exp(candidate.log_probability()))
         << absl::StrCat("class ", candidate.class_id());
    if (!candidate.label().empty()) out_ << "  " << Safe(candidate.label());
    out_ << "\n";
    begin.clear();
  }
  out_ << std::flush;
}

void AnswerView::ShowPrediction(const Answer& answer) {
  if (prediction_shown_) return;
  prediction_shown_ = true;
  in_prediction_ = false;
  const std::string indent(kIndent, ' ');
  const auto& generated = answer.generated();
  if (!text_shown_) {
    // An end-of-text token, or a part of a character: it has a name but no text.
    for (const v1::TokenEvent& token : generated) {
      out_ << Dim(screen_) << Safe(ReadablePiece(token.piece(), token.token_id()))
           << Reset(screen_);
    }
  }
  float together = 0;
  for (const v1::TokenEvent& token : generated) together += token.log_probability();
  out_ << "\n" << indent;
  if (generated.size() > 1) out_ << generated.size() << " tokens, together ";
  out_ << Probability(together);
  if (answer.is_finished() && answer.finished().finish_reason() != 0) {
    out_ << ", ended by " << FinishName(answer.finished().finish_reason());
  }
  out_ << "\n";
  int lists = 0;
  for (const v1::TokenEvent& token : generated) {
    if (token.top().empty() || ++lists > kMostTopLists) continue;
    if (generated.size() > 1) out_ << indent << "token " << token.index() << "\n";
    for (const v1::TokenProbability& candidate : token.top()) {
      const std::string piece = ReadablePiece(candidate.piece(), candidate.token_id());
      out_ << indent << absl::StrFormat("%8.4f  ", std::exp(candidate.log_probability()))
           << Escaped(piece, screen_.utf8, Spaces::kVisible) << "\n";
    }
  }
  out_ << std::flush;
}

void AnswerView::ShowExplanation(const ExplanationAnswer& explanation) {
  const v1::ExplanationStarted& started = explanation.started;
  out_ << "\n" << Bold(screen_) << Safe(started.explanation_id()) << Reset(screen_);
  if (started.method() != started.explanation_id() && !started.method().empty()) {
    out_ << " (" << Safe(started.method()) << ")";
  }
  out_ << "\n";
  if (started.has_target()) out_ << "  " << Safe(TargetText(started.target())) << "\n";
  if (!explanation.succeeded()) {
    out_ << "  failed: " << CodeName(explanation.end.status().code()) << ": "
         << Safe(explanation.end.status().message()) << "\n";
    return;
  }
  for (const Tensor& tensor : explanation.tensors.tensors()) {
    out_ << "  " << Dim(screen_) << Safe(tensor.info.name()) << " " << Safe(Shape(tensor.info))
         << Reset(screen_) << "\n";
    if (&tensor != &explanation.tensors.tensors().front()) continue;
    if (const auto values = Floats(tensor); values.ok()) {
      RenderTensor(screen_, tensor.info, *values, tokens_, started.target().position(), out_);
    }
  }
  if (const std::string quality = QualityText(explanation.end.quality()); !quality.empty()) {
    out_ << "  " << quality << "\n";
  }
}

void AnswerView::ShowProgress(const v1::Progress& progress) {
  const auto known = std::find_if(progress_.begin(), progress_.end(), [&](const auto& other) {
    return other.explanation_id() == progress.explanation_id();
  });
  if (known == progress_.end()) {
    progress_.push_back(progress);
  } else {
    *known = progress;
  }
  if (in_prediction_) return;  // the cursor stands in the text
  std::vector<std::string> parts;
  parts.reserve(progress_.size());
  for (const v1::Progress& latest : progress_) {
    parts.push_back(absl::StrCat(latest.explanation_id(), " ", latest.done(), "/", latest.total()));
  }
  status_->Show(absl::StrJoin(parts, "  "));
}

}  // namespace mambascope::cli
