#include "client/cli/info_commands.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/cli/connection.h"
#include "client/cli/interrupt.h"
#include "client/cli/json_line.h"
#include "client/cli/table.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "mambascope/v1/model.grpc.pb.h"
#include "mambascope/v1/prediction.grpc.pb.h"

namespace mambascope::cli {
namespace {

// Runs one unary call under the timeout and Ctrl-C.
template <typename Call>
ExitCode Run(double timeout, const Output& output, const Call& call) {
  grpc::ClientContext context;
  SetTimeout(timeout, &context);
  const InterruptibleCall interruptible(&context);
  const grpc::Status status = call(&context);
  if (status.ok()) return kDone;
  if (interruptible.interrupted()) return kInterrupted;
  PrintError(DetailedStatus(status), output.err_screen, output.err);
  return kRefused;
}

ExitCode PrintJson(const google::protobuf::Message& message, const Output& output) {
  const absl::Status status = WriteJsonLine(message, output.out);
  if (status.ok()) return kDone;
  PrintError(std::string(status.message()), output.err_screen, output.err);
  return kFailedHere;
}

std::string StateName(v1::ModelState state) {
  absl::string_view name = v1::ModelState_Name(state);
  absl::ConsumePrefix(&name, "MODEL_STATE_");
  return absl::AsciiStrToLower(name);
}

std::string Bytes(int64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double size = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  for (; size >= 1024 && unit < 3; ++unit) size /= 1024;
  return absl::StrFormat("%.1f %s", size, kUnits[unit]);
}

void PrintModel(const v1::GetModelResponse& response, const Output& output) {
  const auto safe = [&](absl::string_view text) { return Escaped(text, output.screen.utf8); };
  const v1::Model& model = response.model();
  const v1::ModelSizes& sizes = model.sizes();
  std::string state = StateName(model.state());
  if (!model.state_message().empty()) absl::StrAppend(&state, ": ", safe(model.state_message()));
  std::vector<TableRow> rows = {
      {"model", absl::StrCat(safe(model.name()), "@", safe(model.version()))},
      {"state", state},
      {"family", safe(model.family())},
      {"digest", safe(model.digest())},
      {"parameters", absl::StrCat(sizes.parameters())},
      {"weights", absl::StrCat(safe(sizes.weight_dtype()), ", ", Bytes(sizes.weight_bytes()))}};
  const auto size = [&](const char* name, int32_t value) {
    if (value != 0) rows.push_back({name, absl::StrCat(value)});
  };
  size("layers", sizes.layers());
  size("d_model", sizes.d_model());
  size("d_inner", sizes.d_inner());
  size("d_state", sizes.d_state());
  size("d_conv", sizes.d_conv());
  size("dt_rank", sizes.dt_rank());
  size("heads", sizes.heads());
  size("head_dim", sizes.head_dim());
  size("groups", sizes.groups());
  size("vocabulary", sizes.vocabulary());
  size("classes", sizes.classes());
  if (model.has_vision()) {
    const v1::Vision& vision = model.vision();
    rows.push_back(
        {"input", absl::StrFormat("images, %d x %d pixels, %d tokens", vision.image_size(),
                                  vision.image_size(), vision.tokens())});
  } else {
    rows.push_back({"max input", absl::StrCat(model.max_input_tokens(), " tokens")});
    rows.push_back({"tokenizer", model.has_tokenizer() ? "yes" : "no: token ids only"});
  }
  PrintTable(rows, 0, output.out);
  if (response.methods().empty()) return;
  std::vector<TableRow> methods = {{"method", "result", "memory", "seconds"}};
  for (const v1::MethodInfo& method : response.methods()) {
    methods.push_back({safe(method.name()), Bytes(method.result_bytes()),
                       Bytes(method.memory_bytes()), absl::StrFormat("%.3g", method.seconds())});
  }
  output.out << "\n";
  PrintTable(methods, 0, output.out);
}

void PrintModels(const v1::ListModelsResponse& response, const Output& output) {
  const auto safe = [&](absl::string_view text) { return Escaped(text, output.screen.utf8); };
  std::vector<TableRow> rows = {
      {"model", "state", "family", "parameters", "layers", "max input", "tokenizer", "digest"}};
  for (const v1::Model& model : response.models()) {
    rows.push_back({absl::StrCat(safe(model.name()), "@", safe(model.version())),
                    StateName(model.state()), safe(model.family()),
                    absl::StrCat(model.sizes().parameters()), absl::StrCat(model.sizes().layers()),
                    absl::StrCat(model.max_input_tokens()), model.has_tokenizer() ? "yes" : "no",
                    safe(model.digest().substr(0, 12))});
  }
  PrintTable(rows, 0, output.out);
}

}  // namespace

ExitCode Tokenize(const std::shared_ptr<grpc::Channel>& channel, const TokenizeFlags& flags,
                  const Output& output) {
  v1::TokenizeRequest request;
  request.set_model(flags.model);
  request.set_text(flags.text);
  v1::TokenizeResponse response;
  const auto stub = v1::PredictionService::NewStub(channel);
  const ExitCode code = Run(flags.timeout, output, [&](grpc::ClientContext* context) {
    return stub->Tokenize(context, request, &response);
  });
  if (code != kDone) return code;
  if (flags.json) return PrintJson(response, output);
  std::vector<TableRow> rows = {{"pos", "id", "bytes", "piece", "flags"}};
  for (const v1::Token& token : response.tokens()) {
    std::vector<std::string> marks;
    if (token.special()) marks.emplace_back("special");
    if (token.partial()) marks.emplace_back("partial");
    rows.push_back({absl::StrCat(rows.size() - 1), absl::StrCat(token.id()),
                    absl::StrCat(token.begin_byte(), "-", token.end_byte()),
                    Escaped(token.piece(), output.screen.utf8, Spaces::kVisible),
                    absl::StrJoin(marks, " ")});
  }
  PrintTable(rows, 0, output.out);
  return kDone;
}

ExitCode Models(const std::shared_ptr<grpc::Channel>& channel, const ModelsFlags& flags,
                const Output& output) {
  const auto stub = v1::ModelService::NewStub(channel);
  if (flags.models.empty()) {
    v1::ListModelsResponse response;
    const ExitCode code = Run(flags.timeout, output, [&](grpc::ClientContext* context) {
      return stub->ListModels(context, {}, &response);
    });
    if (code != kDone) return code;
    if (flags.json) return PrintJson(response, output);
    PrintModels(response, output);
    return kDone;
  }
  for (size_t i = 0; i < flags.models.size(); ++i) {
    v1::GetModelRequest request;
    request.set_model(flags.models[i]);
    request.set_length(flags.length);
    v1::GetModelResponse response;
    ExitCode code = Run(flags.timeout, output, [&](grpc::ClientContext* context) {
      return stub->GetModel(context, request, &response);
    });
    if (code == kDone && flags.json) code = PrintJson(response, output);
    if (code != kDone) return code;
    if (flags.json) continue;
    if (i > 0) output.out << "\n";
    PrintModel(response, output);
  }
  return kDone;
}

ExitCode Health(const std::shared_ptr<grpc::Channel>& channel, const HealthFlags& flags,
                const Output& output) {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(flags.service);
  grpc::health::v1::HealthCheckResponse response;
  const auto stub = grpc::health::v1::Health::NewStub(channel);
  const ExitCode code = Run(flags.timeout, output, [&](grpc::ClientContext* context) {
    return stub->Check(context, request, &response);
  });
  if (code != kDone) return code;
  output.out << grpc::health::v1::HealthCheckResponse::ServingStatus_Name(response.status())
             << "\n";
  return response.status() == grpc::health::v1::HealthCheckResponse::SERVING ? kDone : kRefused;
}

}  // namespace mambascope::cli
