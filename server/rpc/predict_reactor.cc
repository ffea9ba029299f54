#include "server/rpc/predict_reactor.h"

#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/base/status.h"
#include "server/rpc/wire.h"

namespace mambascope::rpc {
namespace {

std::string MakeRequestId() {
  thread_local std::mt19937_64 random(std::random_device{}());
  return absl::StrFormat("%016x%016x", random(), random());
}

}  // namespace

PredictReactor::PredictReactor(const Backend& backend)
    : backend_(backend),
      results_(std::make_shared<serving::ResultStream>(
          backend.admission->limits().stream_bytes,
          [executor = backend.executor] { executor->Wake(); })) {
  backend_.open_streams->Enter();
}

PredictReactor* PredictReactor::Start(const Backend& backend,
                                      const grpc::CallbackServerContext& context,
                                      const grpc::ByteBuffer& request) {
  std::shared_ptr<PredictReactor> reactor(new PredictReactor(backend));
  reactor->self_ = reactor;
  Timeline timeline;
  timeline.arrival = backend.clock->Now();
  const absl::Status status = reactor->Admit(context, request, timeline);
  if (!status.ok()) {
    reactor->state_ = State::kFinishing;
    reactor->Finish(ToGrpcStatus(status));
    return reactor.get();
  }
  // The stream may outlive the reactor, so it holds it weakly; while a callback runs it is alive.
  reactor->results_->SetOnReadable([weak = std::weak_ptr<PredictReactor>(reactor)] {
    if (const auto alive = weak.lock()) alive->Pump();
  });
  return reactor.get();
}

absl::Status PredictReactor::Admit(const grpc::CallbackServerContext& context,
                                   const grpc::ByteBuffer& bytes, Timeline timeline) {
  std::string model_name, request_id;
  const auto admit = [&]() -> absl::Status {
    v1::PredictRequest request;
    RETURN_IF_ERROR(Parse(bytes, &request));
    request_id = request.request_id().empty() ? MakeRequestId() : request.request_id();
    ASSIGN_OR_RETURN(
        std::unique_ptr<serving::Call> call,
        backend_.admission->Admit(std::move(request), timeline.arrival, DeadlineOf(context),
                                  request_id, results_, &model_name));
    return backend_.executor->Submit(call);
  };
  const absl::Status status = admit();
  if (!status.ok()) {
    backend_.completion->EndUnqueued("Predict", request_id, model_name, timeline, status);
  }
  return status;
}

void PredictReactor::OnWriteDone(bool ok) {
  backend_.metrics->EventWritten(backend_.clock->Now() - write_begin_, message_.Length());
  {
    std::lock_guard lock(mu_);
    state_ = State::kWaiting;
  }
  if (!ok) results_->Cancel();
  Pump();
}

void PredictReactor::OnCancel() {
  results_->Cancel();
  Pump();
}

void PredictReactor::OnDone() {
  // gRPC may report the end of a call whose stream nobody reads any more.
  results_->Cancel();
  OpenStreams* const open_streams = backend_.open_streams;
  {
    const auto last = std::move(self_);
  }  // may delete *this: nothing of it may be touched any more
  open_streams->Leave();
}

// Decides under the lock, acts outside it.
void PredictReactor::Pump() {
  v1::PredictEvent event;
  serving::ResultStream::Next next;
  {
    std::lock_guard lock(mu_);
    if (state_ != State::kWaiting) return;
    next = results_->TryPop(&event);
    if (next == serving::ResultStream::Next::kEvent) state_ = State::kWriting;
    if (next == serving::ResultStream::Next::kClosed) state_ = State::kFinishing;
  }
  if (next == serving::ResultStream::Next::kEvent) {
    message_ = Serialize(event);
    write_begin_ = backend_.clock->Now();
    StartWrite(&message_);
  }
  if (next == serving::ResultStream::Next::kClosed) Finish(ToGrpcStatus(results_->final_status()));
}

}  // namespace mambascope::rpc
