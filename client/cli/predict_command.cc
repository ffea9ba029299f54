#include "client/cli/predict_command.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/answer.h"
#include "client/cli/answer_view.h"
#include "client/cli/connection.h"
#include "client/cli/explain_option.h"
#include "client/cli/image_file.h"
#include "client/cli/interrupt.h"
#include "client/cli/json_line.h"
#include "client/cli/safetensors_writer.h"
#include "mambascope/v1/prediction.grpc.pb.h"
#include "server/base/status.h"

namespace mambascope::cli {
namespace {

absl::Status SetInput(const PredictFlags& flags, v1::PredictRequest* request) {
  const int given = (flags.text ? 1 : 0) + (flags.tokens ? 1 : 0) + (flags.image ? 1 : 0);
  if (given != 1) {
    return absl::InvalidArgumentError("exactly one of --text, --tokens and --image is needed");
  }
  if (flags.image) {
    ASSIGN_OR_RETURN(*request->mutable_image(), ReadImageFile(*flags.image));
    return absl::OkStatus();
  }
  if (flags.text) {
    request->set_text(*flags.text);
    return absl::OkStatus();
  }
  for (const absl::string_view token : absl::StrSplit(*flags.tokens, ',')) {
    int32_t id = 0;
    if (!absl::SimpleAtoi(token, &id)) {
      return absl::InvalidArgumentError(absl::StrCat("--tokens: '", token, "' is not a token id"));
    }
    request->mutable_token_ids()->add_ids(id);
  }
  return absl::OkStatus();
}

void SetGeneration(const PredictFlags& flags, v1::PredictRequest* request) {
  v1::Generation generation;
  if (flags.max_tokens) generation.set_max_tokens(*flags.max_tokens);
  if (flags.temperature) generation.set_temperature(*flags.temperature);
  if (flags.top_p) generation.set_top_p(*flags.top_p);
  if (flags.top_k) generation.set_top_k(*flags.top_k);
  if (flags.seed) generation.set_seed(*flags.seed);
  if (flags.top_logprobs) generation.set_top_logprobs(*flags.top_logprobs);
  for (const std::string& stop : flags.stop) generation.add_stop(stop);
  generation.set_ignore_eos(flags.ignore_eos);
  generation.set_return_logits(flags.logits);
  if (generation.ByteSizeLong() > 0) *request->mutable_generation() = std::move(generation);
}

absl::Status SetExplanations(const PredictFlags& flags, v1::PredictRequest* request) {
  if (flags.explain.empty() && (flags.target || flags.contrast)) {
    return absl::InvalidArgumentError("--target and --contrast need an --explain");
  }
  v1::Target target;
  if (flags.target) RETURN_IF_ERROR(ParseTarget(*flags.target, &target));
  if (flags.contrast) RETURN_IF_ERROR(ParseContrast(*flags.contrast, &target));
  for (const std::string& option : flags.explain) {
    ASSIGN_OR_RETURN(*request->add_explanations(), ParseExplain(option));
    if (flags.target || flags.contrast) {
      *request->mutable_explanations()->rbegin()->mutable_target() = target;
    }
  }
  return absl::OkStatus();
}

absl::Status SetLabels(const PredictFlags& flags, v1::PredictRequest* request) {
  for (const std::string& label : flags.labels) {
    const size_t equals = label.find('=');
    if (equals == std::string::npos || equals == 0) {
      return absl::InvalidArgumentError(absl::StrCat("--label: '", label, "' is not key=value"));
    }
    if (!request->mutable_labels()
             ->insert({label.substr(0, equals), label.substr(equals + 1)})
             .second) {
      return absl::InvalidArgumentError(
          absl::StrCat("--label: ", label.substr(0, equals), " is given twice"));
    }
  }
  return absl::OkStatus();
}

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

absl::StatusOr<v1::PredictRequest> BuildRequest(const PredictFlags& flags) {
  v1::PredictRequest request;
  request.set_request_id(flags.request_id);
  RETURN_IF_ERROR(SetInput(flags, &request));
  SetGeneration(flags, &request);
  RETURN_IF_ERROR(SetExplanations(flags, &request));
  RETURN_IF_ERROR(SetLabels(flags, &request));
  if (flags.dtype == "fp32") request.mutable_delivery()->set_dtype(v1::DATA_TYPE_FP32);
  if (flags.dtype == "fp16") request.mutable_delivery()->set_dtype(v1::DATA_TYPE_FP16);
  return request;
}

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
