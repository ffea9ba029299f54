#pragma once

#include <grpcpp/grpcpp.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/rpc/services.h"
#include "server/rpc/wire.h"

namespace mambascope::rpc {

// A call with one answer: parses, runs `answer(request, response, &model_name)`, replies, and
// counts it once. `model_name` is set by `answer` when it has resolved a model.
template <typename Request, typename Response, typename Answer>
grpc::ServerUnaryReactor* ReplyOnce(const Backend& backend, absl::string_view rpc,
                                    grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer& request_bytes,
                                    grpc::ByteBuffer* response_bytes, Answer answer) {
  Timeline timeline;
  timeline.arrival = backend.clock->Now();
  Request request;
  Response response;
  std::string model_name;
  absl::Status status = Parse(request_bytes, &request);
  if (status.ok()) status = answer(request, &response, &model_name);
  if (status.ok()) *response_bytes = Serialize(response);
  backend.completion->EndUnqueued(rpc, /*request_id=*/"", model_name, timeline, status);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

}  // namespace mambascope::rpc
