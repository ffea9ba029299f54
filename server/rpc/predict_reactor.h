#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <mutex>
#include <string>

#include "server/rpc/services.h"
#include "server/serving/result_stream.h"

namespace mambascope::rpc {

// One Predict on the wire: writes the events of its ResultStream, one at a time.
//
//   kWaiting --event--> kWriting --written--> kWaiting        gRPC may run OnCancel and OnWriteDone
//   at kWaiting --closed--> kFinishing --> OnDone                once, and the executor calls Pump:
//   mu_
//                                                             guards state_.
// A caller that leaves cancels the stream; the executor then ends the call, which closes the
// stream: cancelled calls finish like all others. Owns itself until OnDone.
class PredictReactor final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                             public std::enable_shared_from_this<PredictReactor> {
 public:
  // Parses and admits; a refusal finishes at once.
  static PredictReactor* Start(const Backend& backend, const grpc::CallbackServerContext& context,
                               const grpc::ByteBuffer& request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  enum class State { kWaiting, kWriting, kFinishing };

  explicit PredictReactor(const Backend& backend);
  // Ends an unaccepted call; OK if the executor has taken it.
  absl::Status Admit(const grpc::CallbackServerContext& context, const grpc::ByteBuffer& bytes,
                     Timeline timeline);
  void Pump();

  const Backend backend_;
  const std::shared_ptr<serving::ResultStream> results_;
  std::shared_ptr<PredictReactor> self_;

  std::mutex mu_;
  State state_ = State::kWaiting;

  // While a write is out, state_ keeps everyone else off these.
  grpc::ByteBuffer message_;
  absl::Time write_begin_;
};

}  // namespace mambascope::rpc
