#include "client/cli/answer_view.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/cli/explanation_view.h"
#include "client/cli/heat_scale.h"
#include "client/cli/render_agreement.h"

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
  CollectNames(answer);
  const ExplanationContext context = {request_, tokens_,
                                      static_cast<size_t>(answer.started().tokens_size()), pieces_,
                                      !answer.classification().top().empty()};
  for (const ExplanationAnswer& explanation : answer.explanations()) {
    if (explanation.finished) RenderExplanation(screen_, explanation, context, out_);
  }
  RenderAgreements(screen_, answer.finished().agreements(), out_);
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
  // Targets among the generated tokens have them as input.
  TokenLabel& label = tokens_.emplace_back();
  label.text = token.text().empty() ? ReadablePiece(token.piece(), token.token_id()) : token.text();
  label.position = static_cast<int64_t>(tokens_.size()) - 1;
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

void AnswerView::Name(int32_t id, absl::string_view piece) {
  if (!piece.empty()) pieces_.known.emplace(id, ReadablePiece(piece, id));
}

void AnswerView::CollectNames(const Answer& answer) {
  for (const v1::ClassProbability& candidate : answer.classification().top()) {
    pieces_.prefix = "class ";
    Name(candidate.class_id(), candidate.label());
  }
  if (pieces_.prefix == "#") CollectTokens(answer);
  for (const ExplanationAnswer& explanation : answer.explanations()) {
    const v1::ResolvedTarget& target = explanation.started.target();
    Name(target.token_id(), target.piece());
    Name(target.contrast_token_id(), target.contrast_piece());
  }
}

void AnswerView::CollectTokens(const Answer& answer) {
  for (const v1::Token& token : answer.started().tokens()) Name(token.id(), token.piece());
  for (const v1::TokenEvent& token : answer.generated()) {
    Name(token.token_id(), token.piece());
    for (const v1::TokenProbability& other : token.top()) Name(other.token_id(), other.piece());
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
