#include "server/serving/generation.h"

#include <algorithm>

namespace mambascope::serving {
namespace {

model::SamplingOptions ToSampling(const v1::Generation& options) {
  return {options.temperature(), options.has_top_p() ? options.top_p() : 1.0f, options.top_k()};
}

// Length of the longest end of `text` that begins one of the stop strings.
size_t LongestBeginning(const std::string& text,
                        const google::protobuf::RepeatedPtrField<std::string>& stops) {
  size_t longest = 0;
  for (const std::string& stop : stops) {
    for (size_t length = std::min(text.size(), stop.size() - 1); length > longest; --length) {
      if (text.compare(text.size() - length, length, stop, 0, length) == 0) longest = length;
    }
  }
  return longest;
}

}  // namespace

Generation::Generation(const v1::Generation& options, const ServedModel& model)
    : options_(options),
      sampling_(ToSampling(options)),
      model_(model),
      max_tokens_(options.has_max_tokens() ? options.max_tokens() : 1),
      random_(options.seed()) {
  if (model.tokenizer != nullptr) {
    stream_ = std::make_unique<model::TextStream>(*model.tokenizer);
  }
}

v1::TokenEvent Generation::Next(std::span<const float> logits) {
  last_token_ = model::SampleToken(logits, sampling_, random_);
  v1::TokenEvent event;
  event.set_index(count_++);
  event.set_token_id(last_token_);
  event.set_log_probability(model::LogProbability(logits, last_token_));
  if (model_.tokenizer != nullptr) event.set_piece(model_.tokenizer->Piece(last_token_));
  for (const model::RankedToken& ranked : model::TopTokens(logits, options_.top_logprobs())) {
    v1::TokenProbability* top = event.add_top();
    top->set_token_id(ranked.id);
    top->set_log_probability(ranked.log_probability);
    if (model_.tokenizer != nullptr) top->set_piece(model_.tokenizer->Piece(ranked.id));
  }

  const std::vector<int32_t>& ends = model_.model->config().end_of_text;
  const bool ends_text =
      !options_.ignore_eos() && std::find(ends.begin(), ends.end(), last_token_) != ends.end();
  if (ends_text) {
    reason_ = v1::FINISH_REASON_END_OF_TEXT;
  } else {
    held_ += TextOf(last_token_);
    if (count_ >= max_tokens_) reason_ = v1::FINISH_REASON_LENGTH;
  }
  event.set_text(Release(/*at_end=*/is_over()));
  text_ += event.text();
  return event;
}

std::string Generation::TextOf(int32_t token) {
  if (stream_ == nullptr) return "";
  absl::StatusOr<std::string> text = stream_->Push(token);
  return text.ok() ? *std::move(text) : "";  // an id that the tokenizer does not know has no text
}

// Takes from held_ what is certain to belong to the answer.
std::string Generation::Release(bool at_end) {
  if (at_end && stream_ != nullptr) held_ += stream_->Flush();
  size_t first = std::string::npos;
  for (const std::string& stop : options_.stop()) first = std::min(first, held_.find(stop));
  if (first != std::string::npos) {
    reason_ = v1::FINISH_REASON_STOP;
    return held_.substr(0, first);
  }
  const size_t keep = at_end ? 0 : LongestBeginning(held_, options_.stop());
  std::string released = held_.substr(0, held_.size() - keep);
  held_.erase(0, released.size());
  return released;
}

}  // namespace mambascope::serving
