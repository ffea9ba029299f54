#include "server/gateway/http_server.h"

#include <sys/socket.h>

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "httplib.h"

namespace mambascope::gateway {
namespace {

constexpr size_t kThreads = 4;              // scrapes and probes are short
constexpr size_t kMostPayloadBytes = 4096;  // no route takes a body

bool SplitAddress(const std::string& address, std::string* host, int* port) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return false;
  *host = address.substr(0, colon);
  if (host->size() > 2 && host->front() == '[') *host = host->substr(1, host->size() - 2);  // IPv6
  return absl::SimpleAtoi(address.substr(colon + 1), port) && *port >= 0 && *port <= 65535;
}

// Without SO_REUSEPORT, which the library would set: a second server on a port must fail.
void SetSocketOptions(socket_t socket) {
  const int yes = 1;
  setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
}

}  // namespace

HttpServer::HttpServer() : server_(std::make_unique<httplib::Server>()) {}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              Sources sources) {
  std::string host;
  int port = 0;
  if (!SplitAddress(address, &host, &port)) {
    return absl::InvalidArgumentError(
        absl::StrCat("http_address: '", address, "' is not HOST:PORT"));
  }
  std::unique_ptr<HttpServer> http(new HttpServer);
  httplib::Server& server = *http->server_;
  server.new_task_queue = [] { return new httplib::ThreadPool(kThreads); };
  server.set_socket_options(SetSocketOptions);
  server.set_payload_max_length(kMostPayloadBytes);
  server.set_read_timeout(5);
  server.set_keep_alive_timeout(5);
  server.Get("/metrics",
             [metrics = sources.metrics](const httplib::Request&, httplib::Response& reply) {
               reply.set_content(metrics(), "text/plain; version=0.0.4; charset=utf-8");
             });
  server.Get("/livez", [](const httplib::Request&, httplib::Response& reply) {
    reply.set_content("ok\n", "text/plain");
  });
  server.Get("/readyz", [ready = sources.ready](const httplib::Request&, httplib::Response& reply) {
    const bool is_ready = ready();
    reply.status = is_ready ? 200 : 503;
    reply.set_content(is_ready ? "ready\n" : "not ready\n", "text/plain");
  });
  if (port == 0) {
    http->port_ = server.bind_to_any_port(host.c_str());
  } else if (server.bind_to_port(host.c_str(), port)) {
    http->port_ = port;
  }
  if (http->port_ <= 0) {
    return absl::UnavailableError(
        absl::StrCat("http_address: cannot listen on '", address, "': in use, or no such address"));
  }
  http->thread_ = std::thread([&server] { server.listen_after_bind(); });
  return http;
}

HttpServer::~HttpServer() {
  if (!thread_.joinable()) return;
  // stop() before the thread listens would be forgotten.
  while (!server_->is_running()) std::this_thread::yield();
  server_->stop();
  thread_.join();
}

}  // namespace mambascope::gateway
