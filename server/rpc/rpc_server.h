#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/rpc/services.h"

namespace mambascope::rpc {

// The gRPC listener: our services, health and reflection. Serves from Start on; health says SERVING
// only after SetServing(true).
class RpcServer {
 public:
  // `address` is host:port; port 0 takes a free one. kUnavailable if it cannot listen there.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const Backend& backend,
                                                          const std::string& address,
                                                          int max_request_bytes);
  ~RpcServer();

  int port() const { return port_; }
  // Of every service name, and of "" for the server as a whole.
  void SetServing(bool serving);
  // Waits until the Predict streams have delivered what they have, at most until `deadline`; then
  // stops listening and closes the connections, giving each 5 seconds to take leave.
  void Shutdown(absl::Time deadline);
  std::shared_ptr<grpc::Channel> InProcessChannel();

 private:
  explicit RpcServer(Backend backend);

  OpenStreams open_streams_;
  PredictionService prediction_;
  ModelService model_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

}  // namespace mambascope::rpc
