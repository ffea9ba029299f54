#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "client/cli/answer.h"
#include "client/cli/render_lens.h"
#include "client/cli/render_text.h"
#include "client/cli/terminal.h"
#include "mambascope/v1/prediction.pb.h"

namespace mambascope::cli {

// Shows an answer to a person: the model, the tokens and the text while they come, progress on the
// status line, the explanations at the end. Everything is borrowed.
class AnswerView {
 public:
  AnswerView(const v1::PredictRequest& request, const Screen& screen, StatusLine* status,
             std::ostream& out)
      : request_(request), screen_(screen), status_(status), out_(out) {}

  // After `answer` has taken the event.
  void OnEvent(const v1::PredictEvent& event, const Answer& answer);
  // When the call is over, however it ended: what had come of it.
  void OnEnd(const Answer& answer);

 private:
  void ShowStarted(const v1::Started& started);
  void ShowToken(const v1::TokenEvent& token);
  void ShowClasses(const v1::Classification& classification);
  void ShowPrediction(const Answer& answer);
  void Name(int32_t id, absl::string_view piece);
  void CollectNames(const Answer& answer);
  void CollectTokens(const Answer& answer);
  void ShowProgress(const v1::Progress& progress);
  std::string Safe(absl::string_view text) const;

  const v1::PredictRequest& request_;
  const Screen screen_;
  StatusLine* const status_;
  std::ostream& out_;
  std::vector<TokenLabel> tokens_;  // of the prompt, then those generated
  PieceNames pieces_;
  std::vector<v1::Progress> progress_;  // the latest of each explanation
  bool in_prediction_ = false;          // its line is not ended yet
  bool prediction_shown_ = false;
  bool text_shown_ = false;
};

}  // namespace mambascope::cli
