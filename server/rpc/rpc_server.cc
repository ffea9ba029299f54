#include "server/rpc/rpc_server.h"

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpc/health/v1/health.pb.h"

namespace mambascope::rpc {
namespace {

void InitLibrariesOnce() {
  static const bool done = [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    // A client's bad UTF-8 is that client's error, not a line on our stderr.
    google::protobuf::SetLogHandler(nullptr);
    // Links the descriptor of the health protocol, so that reflection knows it.
    grpc::health::v1::HealthCheckRequest::descriptor();
    return true;
  }();
  (void)done;
}

constexpr const char* kServices[] = {"", "mambascope.v1.PredictionService",
                                     "mambascope.v1.ModelService"};

}  // namespace

RpcServer::RpcServer(Backend backend)
    : prediction_((backend.open_streams = &open_streams_, backend)), model_(backend) {}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const Backend& backend,
                                                            const std::string& address,
                                                            int max_request_bytes) {
  InitLibrariesOnce();
  std::unique_ptr<RpcServer> rpc(new RpcServer(backend));
  grpc::ServerBuilder builder;
  builder.RegisterService(&rpc->prediction_);
  builder.RegisterService(&rpc->model_);
  builder.SetMaxReceiveMessageSize(max_request_bytes);
  // Otherwise a second server on the same port would take half of the first one's calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &rpc->port_);
  rpc->server_ = builder.BuildAndStart();
  if (rpc->server_ == nullptr || rpc->port_ == 0) {
    return absl::UnavailableError(
        absl::StrCat("grpc_address: cannot listen on '", address, "': in use, or no such address"));
  }
  rpc->SetServing(false);
  return rpc;
}

RpcServer::~RpcServer() {
  if (server_ != nullptr) Shutdown(absl::InfinitePast());
}

void RpcServer::SetServing(bool serving) {
  for (const char* service : kServices) {
    server_->GetHealthCheckService()->SetServingStatus(service, serving);
  }
}

void RpcServer::Shutdown(absl::Time deadline) {
  open_streams_.WaitUntilNone(std::max(deadline, absl::UnixEpoch()));
  // A finished stream may still be on its way: closing a socket with unread frames of the peer's
  // resets the connection and takes its last events back. gRPC's graceful close waits for the
  // peer's answer, and returns as soon as all have given it; watchers of health never do.
  constexpr absl::Duration kCloseTimeout = absl::Seconds(5);
  server_->Shutdown(absl::ToChronoTime(absl::Now() + kCloseTimeout));
  server_->Wait();
}

std::shared_ptr<grpc::Channel> RpcServer::InProcessChannel() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(64 << 20);
  return server_->InProcessChannel(arguments);
}

}  // namespace mambascope::rpc
