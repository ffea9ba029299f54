#include "server/gateway/http_server.h"

#include <sys/socket.h>

#include <chrono>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "httplib.h"

namespace mambascope::gateway {
namespace {

constexpr size_t kThreads = 16;             // scrapes and probes are short; some peers are slow
constexpr size_t kMostPayloadBytes = 4096;  // no route takes a body

bool SplitAddress(const std::string& address, std::string* host, int* port) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return false;
  *host = address.substr(0, colon);
  if (!host->empty() && host->front() == '[') {  // IPv6
    if (host->size() < 3 || host->back() != ']') return false;
    *host = host->substr(1, host->size() - 2);
  }
  return absl::SimpleAtoi(address.substr(colon + 1), port) && *port >= 0 && *port <= 65535;
}

// Without SO_REUSEPORT, which the library would set: a second server on a port must fail.
void SetSocketOptions(socket_t socket) {
  const int yes = 1;
  setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
}

}  // namespace

// What a worker needs, shared with the listening thread: a peer that sends a byte now and then can
// hold a worker for as long as it likes (the library's timeouts are for each read), and must not
// hold a shutdown.
struct HttpServer::Listener {
  httplib::Server server;
  Sources sources;
  std::mutex mu;
  bool open = true;  // guarded by mu; once false, the sources may be gone
  std::promise<void> ended;

  // Null once the server is shut down. `mu` is held by the caller for as long as it uses them.
  const Sources* OpenSources() const { return open ? &sources : nullptr; }
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              Sources sources) {
  std::string host;
  int port = 0;
  if (!SplitAddress(address, &host, &port)) {
    return absl::InvalidArgumentError(
        absl::StrCat("http_address: '", address, "' is not HOST:PORT"));
  }
  std::unique_ptr<HttpServer> http(new HttpServer);
  const auto listener = std::make_shared<Listener>();
  listener->sources = std::move(sources);
  httplib::Server& server = listener->server;
  server.new_task_queue = [] { return new httplib::ThreadPool(kThreads); };
  server.set_socket_options(SetSocketOptions);
  server.set_payload_max_length(kMostPayloadBytes);
  server.set_read_timeout(1);
  server.set_keep_alive_max_count(1);
  // Raw pointers: the handlers live in the server, which lives in the listener.
  Listener* const shared = listener.get();
  const auto get = [&](const char* path, auto answer) {
    server.Get(path, [shared, answer](const httplib::Request&, httplib::Response& reply) {
      std::lock_guard lock(shared->mu);
      reply.status = 503;
      if (const Sources* open = shared->OpenSources()) answer(*open, reply);
    });
  };
  get("/metrics", [](const Sources& open, httplib::Response& reply) {
    reply.status = 200;
    reply.set_content(open.metrics(), "text/plain; version=0.0.4; charset=utf-8");
  });
  get("/livez", [](const Sources&, httplib::Response& reply) {
    reply.status = 200;
    reply.set_content("ok\n", "text/plain");
  });
  get("/readyz", [](const Sources& open, httplib::Response& reply) {
    const bool is_ready = open.ready();
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
  // Holds its own share of the listener, so that it may outlive this object.
  std::thread([listener] {
    listener->server.listen_after_bind();
    listener->ended.set_value();
  }).detach();
  http->listener_ = listener;
  return http;
}

HttpServer::~HttpServer() {
  if (listener_ == nullptr) return;
  {
    std::lock_guard lock(listener_->mu);
    listener_->open = false;
  }
  std::future<void> ended = listener_->ended.get_future();
  constexpr auto kTick = std::chrono::milliseconds(10);
  // stop() before the thread listens would be forgotten.
  while (!listener_->server.is_running() && ended.wait_for(kTick) != std::future_status::ready) {
  }
  listener_->server.stop();
  ended.wait_for(std::chrono::seconds(2));  // slow peers keep their workers; nobody waits for them
}

}  // namespace mambascope::gateway
