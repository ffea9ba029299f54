#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "grpcpp/channel.h"

namespace mambascope::cli {

// A server inside this process, for calls without --server.
class Embedded {
 public:
  virtual ~Embedded() = default;  // ends the server; calls must have ended
  virtual std::shared_ptr<grpc::Channel> channel() = 0;
};

// Loads `models` ("DIR" or "name=DIR"); takes as long as that takes. The error is the loader's.
absl::StatusOr<std::unique_ptr<Embedded>> StartEmbedded(const std::vector<std::string>& models);

}  // namespace mambascope::cli
