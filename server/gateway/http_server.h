#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace mambascope::gateway {

// The HTTP listener: GET /metrics (text exposition format), /livez (the process answers) and
// /readyz (it would take a request now: 200, else 503).
class HttpServer {
 public:
  struct Sources {
    std::function<std::string()> metrics;
    std::function<bool()> ready;
  };

  // `address` is host:port; port 0 takes a free one. kUnavailable if it cannot listen there.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           Sources sources);
  ~HttpServer();

  int port() const { return port_; }

 private:
  struct Listener;
  HttpServer() = default;

  std::shared_ptr<Listener> listener_;
  int port_ = 0;
};

}  // namespace mambascope::gateway
