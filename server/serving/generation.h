#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>

#include "mambascope/v1/prediction.pb.h"
#include "server/model/sampling.h"
#include "server/model/text_stream.h"
#include "server/serving/model_repository.h"

namespace mambascope::serving {

// The tokens of one answer, one after the other, from the logits that the model gives: sampling,
// text as it becomes complete, stop strings, end of text. Owned by the executor's thread.
class Generation {
 public:
  // Borrows the model. `options` are valid.
  Generation(const v1::Generation& options, const ServedModel& model);

  // The next token from logits [vocabulary], finite. Not after is_over().
  v1::TokenEvent Next(std::span<const float> logits);

  // Where the answer is no text: nothing follows.
  void EndWith(v1::FinishReason reason) { reason_ = reason; }

  bool is_over() const { return reason_ != v1::FINISH_REASON_UNSPECIFIED; }
  v1::FinishReason finish_reason() const { return reason_; }
  int32_t last_token() const { return last_token_; }
  int32_t count() const { return count_; }
  const std::string& text() const { return text_; }  // delivered so far

 private:
  std::string TextOf(int32_t token);
  std::string Release(bool at_end);

  const v1::Generation options_;
  const model::SamplingOptions sampling_;
  const ServedModel& model_;
  const int32_t max_tokens_;
  std::unique_ptr<model::TextStream> stream_;  // null without a tokenizer
  std::mt19937_64 random_;
  std::string held_;  // text that may be the beginning of a stop string
  std::string text_;
  int32_t last_token_ = 0;
  int32_t count_ = 0;
  v1::FinishReason reason_ = v1::FINISH_REASON_UNSPECIFIED;
};

}  // namespace mambascope::serving
