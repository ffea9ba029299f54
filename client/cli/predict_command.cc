#include "client/cli/predict_command.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/answer.h"
#include "client/cli/answer_view.h"
#include "client/cli/connection.h"
#include "client/cli/interrupt.h"
#include "client/cli/json_line.h"
#include "client/cli/safetensors_writer.h"
#include "mambascope/v1/prediction.grpc.pb.h"

namespace mambascope::cli {
namespace {

// Both ends of a call: what came of it, and how it ended.
struct Ended {
  absl::Status answer;  // whether the answer holds together and could be shown
  grpc::Status call;
  bool interrupted = false;
};

Ended Call(const std::shared_ptr<grpc::Channel>& channel, const v1::PredictRequest& request,
           const PredictFlags& flags, const Output& output, AnswerView* view, Answer* answer) {
  grpc::ClientContext context;
  SetTimeout(flags.timeout, &context);
  const InterruptibleCall call(&context);
  const auto reader = v1::PredictionService::NewStub(channel)->Predict(&context, request);
  Ended ended;
  v1::PredictEvent event;
  while (reader->Read(&event)) {
    if (!ended.answer.ok()) continue;  // cancelled; what was under way is thrown away
    ended.answer = answer->Add(event);
    if (ended.answer.ok() && flags.json) ended.answer = WriteJsonLine(event, output.out);
    if (ended.answer.ok() && !flags.json) view->OnEvent(event, *answer);
    if (!ended.answer.ok()) context.TryCancel();
  }
  ended.call = reader->Finish();
  ended.interrupted = call.interrupted();
  if (ended.answer.ok() && ended.call.ok() && !answer->is_finished()) {
    ended.answer = absl::DataLossError("the answer ended without `finished`");
  }
  return ended;
}

ExitCode Save(const Answer& answer, const PredictFlags& flags, const Output& output,
              SafetensorsFile* file) {
  const std::map<std::string, std::string> metadata = {{"model", answer.started().model()},
                                                       {"version", answer.started().version()},
                                                       {"digest", answer.started().digest()},
                                                       {"request_id", answer.request_id()}};
  const absl::StatusOr<NamedTensors> tensors = TensorsForFile(answer);
  const absl::Status written = tensors.ok() ? file->Write(metadata, *tensors) : tensors.status();
  if (!written.ok()) {
    PrintError(std::string(written.message()), output.err_screen, output.err);
    return kFailedHere;
  }
  if (!flags.json) {
    output.out << "\n"
               << tensors->size() << (tensors->size() == 1 ? " tensor" : " tensors") << " in "
               << Escaped(flags.output, output.screen.utf8) << "\n";
  }
  return kDone;
}

// Says on stderr what went wrong, and returns the code for it; kDone if nothing did.
ExitCode Report(const Ended& ended, const Answer& answer, const Output& output) {
  if (ended.interrupted && !answer.is_finished()) return kInterrupted;
  if (!ended.answer.ok()) {
    PrintError(
        absl::StrCat(absl::StatusCodeToString(ended.answer.code()), ": ", ended.answer.message()),
        output.err_screen, output.err);
    return ended.answer.code() == absl::StatusCode::kUnavailable ? kFailedHere : kRefused;
  }
  if (!ended.call.ok()) {
    PrintError(DetailedStatus(ended.call), output.err_screen, output.err);
    return kRefused;
  }
  if (answer.finished().status().code() != 0) {
    PrintError(answer.finished().status(), output.err_screen, output.err);
    return kRefused;
  }
  ExitCode code = kDone;
  for (const ExplanationAnswer& explanation : answer.explanations()) {
    if (explanation.succeeded()) continue;
    google::rpc::Status status = explanation.end.status();
    status.set_message(absl::StrCat(explanation.started.explanation_id(), ": ", status.message()));
    PrintError(status, output.err_screen, output.err);
    code = kRefused;
  }
  return code;
}

}  // namespace

ExitCode Predict(const std::shared_ptr<grpc::Channel>& channel, const v1::PredictRequest& request,
                 const PredictFlags& flags, const Output& output) {
  std::optional<SafetensorsFile> file;
  if (!flags.output.empty()) {
    absl::StatusOr<SafetensorsFile> created = SafetensorsFile::Create(flags.output);
    if (!created.ok()) {
      PrintError(absl::StrCat("--output: ", created.status().message()), output.err_screen,
                 output.err);
      return kUsage;
    }
    file.emplace(*std::move(created));
  }
  StatusLine status(output.progress && !flags.json ? &output.err : nullptr, output.err_screen);
  AnswerView view(request, output.screen, &status, output.out);
  Answer answer(/*keep_tensors=*/!flags.json || file.has_value());
  const Ended ended = Call(channel, request, flags, output, &view, &answer);
  if (!flags.json) view.OnEnd(answer);
  status.Clear();
  ExitCode code = Report(ended, answer, output);
  const bool complete = ended.answer.ok() && ended.call.ok() && answer.is_finished() &&
                        answer.finished().status().code() == 0;
  if (complete && file) code = std::max(code, Save(answer, flags, output, &*file));
  if (!output.out.flush() && code == kDone) {
    PrintError("the output could not be written", output.err_screen, output.err);
    return kFailedHere;
  }
  return code;
}

}  // namespace mambascope::cli
