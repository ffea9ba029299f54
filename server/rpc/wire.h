#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "google/protobuf/message.h"

namespace grpc {
class CallbackServerContext;
}

namespace mambascope::rpc {

// Requests are taken as raw bytes and parsed here, because gRPC 1.51 answers UNIMPLEMENTED without
// a message when a string is not UTF-8.

// kInvalidArgument if the bytes are no such message or hold a string that is not UTF-8.
absl::Status Parse(const grpc::ByteBuffer& bytes, google::protobuf::Message* message);
grpc::ByteBuffer Serialize(const google::protobuf::Message& message);

// Code, message, and all payloads as google.rpc.Status in the status details.
grpc::Status ToGrpcStatus(const absl::Status& status);

// The caller's deadline, or InfiniteFuture.
absl::Time DeadlineOf(const grpc::CallbackServerContext& context);

}  // namespace mambascope::rpc
