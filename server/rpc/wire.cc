#include "server/rpc/wire.h"

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/proto_buffer_writer.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "server/serving/completion.h"

namespace mambascope::rpc {

absl::Status Parse(const grpc::ByteBuffer& bytes, google::protobuf::Message* message) {
  grpc::ByteBuffer borrowed = bytes;  // shares the slices: reading consumes the buffer
  grpc::ProtoBufferReader reader(&borrowed);
  if (reader.status().ok() && message->ParseFromZeroCopyStream(&reader)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("request: ", bytes.Length(), " bytes are no ",
                                                 message->GetTypeName(),
                                                 ", or a string in it is not UTF-8"));
}

grpc::ByteBuffer Serialize(const google::protobuf::Message& message) {
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::Message>(message, &bytes,
                                                                             &own_buffer);
  return bytes;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const google::rpc::Status rpc = serving::ToRpcStatus(status);
  // gRPC drops a status whose trailers exceed the client's limit (8 KiB), so long texts are cut.
  constexpr size_t kLongest = 2048;
  const std::string message = rpc.message().substr(0, kLongest);
  const std::string details = rpc.details_size() > 0 ? rpc.SerializeAsString() : "";
  constexpr size_t kMostDetails = 4096;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message,
                      details.size() <= kMostDetails ? details : "");
}

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const absl::Time deadline = absl::FromChrono(context.deadline());
  // gRPC says "none" by the largest time that its clock can hold.
  return deadline > absl::FromUnixSeconds(1LL << 33) ? absl::InfiniteFuture() : deadline;
}

}  // namespace mambascope::rpc
