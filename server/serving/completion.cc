#include "server/serving/completion.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/observe/log.h"
#include "server/serving/errors.h"

namespace mambascope::serving {
namespace {

double Seconds(absl::Duration duration) { return absl::ToDoubleSeconds(duration); }

std::string Text(absl::string_view view) { return std::string(view.data(), view.size()); }

observe::LogLevel LevelOf(const absl::Status& status) {
  return absl::IsInternal(status) || absl::IsUnknown(status) ? observe::LogLevel::kError
                                                             : observe::LogLevel::kInfo;
}

v1::Finished MakeFinished(const Call& call, const absl::Status& status) {
  v1::Finished finished;
  *finished.mutable_status() = ToRpcStatus(status);
  finished.set_finish_reason(status.ok() ? call.finish_reason : v1::FINISH_REASON_ERROR);
  finished.set_text(call.text);
  finished.mutable_usage()->set_prompt_tokens(static_cast<int32_t>(call.length));
  finished.mutable_usage()->set_generated_tokens(call.generated_tokens);
  finished.mutable_usage()->set_tensor_bytes(call.tensor_bytes);
  *finished.mutable_agreements() = call.agreements;
  v1::Timings* timings = finished.mutable_timings();
  timings->set_tokenize(Seconds(call.timeline.tokenize));
  timings->set_queue(Seconds(call.timeline.queue()));
  timings->set_prefill(Seconds(call.timeline.prefill));
  timings->set_decode(Seconds(call.timeline.decode));
  timings->set_explain(Seconds(call.timeline.explain));
  timings->set_total(Seconds(call.timeline.total()));
  return finished;
}

void LogCall(const Call& call, const absl::Status& status) {
  observe::LogFields fields = {{"request_id", call.request_id},
                               {"rpc", "Predict"},
                               {"model", absl::StrCat(call.model->name, "@", call.model->version)},
                               {"code", Text(CodeName(status.code()))},
                               {"prompt_tokens", absl::StrCat(call.length)},
                               {"generated_tokens", absl::StrCat(call.generated_tokens)},
                               {"explanations", absl::StrCat(call.explanations.size())},
                               {"total_s", absl::StrCat(Seconds(call.timeline.total()))}};
  if (!status.ok()) fields.emplace_back("message", Text(status.message()));
  for (const auto& [name, value] : call.request.labels())
    fields.emplace_back("label." + name, value);
  observe::Log(LevelOf(status), "call", fields);
}

}  // namespace

google::rpc::Status ToRpcStatus(const absl::Status& status) {
  google::rpc::Status rpc;
  rpc.set_code(static_cast<int>(status.code()));
  rpc.set_message(Text(status.message()));
  status.ForEachPayload([&](absl::string_view type_url, const absl::Cord& payload) {
    google::protobuf::Any* detail = rpc.add_details();
    detail->set_type_url(Text(type_url));
    detail->set_value(std::string(payload));
  });
  return rpc;
}

void Completion::End(Call& call, const absl::Status& status) const {
  if (std::exchange(call.ended, true)) return;
  call.timeline.finished = clock_->Now();
  // Counted and released before the reader can learn of the end: who has seen the end of a call
  // finds it in the metrics.
  metrics_->CallEnded(call.model->name, "Predict", CodeName(status.code()), call.timeline);
  call.in_flight = {};
  call.queued = {};
  call.memory = {};
  LogCall(call, status);
  v1::PredictEvent event;
  event.set_request_id(call.request_id);
  *event.mutable_finished() = MakeFinished(call, status);
  call.results->Send(std::move(event));
  call.results->Close(status);
}

void Completion::EndUnqueued(absl::string_view rpc, absl::string_view request_id,
                             absl::string_view model, Timeline timeline,
                             const absl::Status& status) const {
  timeline.finished = clock_->Now();
  metrics_->CallEnded(model, rpc, CodeName(status.code()), timeline);
  if (status.ok()) return;
  observe::Log(LevelOf(status), "call",
               {{"request_id", Text(request_id.substr(0, 128))},
                {"rpc", Text(rpc)},
                {"model", Text(model)},
                {"code", Text(CodeName(status.code()))},
                // What is wrong with a request may quote it, and prompts are never logged.
                {"message", absl::IsInvalidArgument(status) ? "" : Text(status.message())}});
}

}  // namespace mambascope::serving
