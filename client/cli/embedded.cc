#include "client/cli/embedded.h"

#include <utility>

#include "server/base/status.h"
#include "server/options.h"
#include "server/server.h"

namespace mambascope::cli {
namespace {

class EmbeddedServer : public Embedded {
 public:
  explicit EmbeddedServer(std::unique_ptr<Server> server) : server_(std::move(server)) {}
  ~EmbeddedServer() override { server_->Shutdown(); }
  std::shared_ptr<grpc::Channel> channel() override { return server_->InProcessChannel(); }

 private:
  std::unique_ptr<Server> server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Embedded>> StartEmbedded(const std::vector<std::string>& models) {
  Options options;
  options.models = models;
  options.http_address = "";    // nobody else is to be served
  options.log_level = "error";  // stderr is for what the call itself has to say
  ASSIGN_OR_RETURN(std::unique_ptr<Server> server, Server::Start(options));
  return std::make_unique<EmbeddedServer>(std::move(server));
}

}  // namespace mambascope::cli
