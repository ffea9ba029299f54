#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "absl/status/statusor.h"
#include "server/options.h"

namespace mambascope {

// The whole server in one object: loads the models, listens, serves until Shutdown. main() runs
// one; the command line embeds one when it is given no address; tests run many.
class Server {
 public:
  // Names the option and what is wrong with it: kInvalidArgument, kNotFound, kUnavailable (a port).
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Options& options);
  virtual ~Server() = default;  // Shutdown, if it was not called

  virtual int grpc_port() const = 0;
  virtual int http_port() const = 0;  // 0 without an HTTP listener
  virtual std::shared_ptr<grpc::Channel> InProcessChannel() = 0;
  // Health turns NOT_SERVING, new calls are refused, running ones get drain_timeout_s and are then
  // ended with UNAVAILABLE. Returns when all is still.
  virtual void Shutdown() = 0;
};

}  // namespace mambascope
