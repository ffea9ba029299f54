#include "client/cli/connection.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "client/cli/interrupt.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "mambascope/v1/model.grpc.pb.h"

namespace mambascope::cli {
namespace {

constexpr std::chrono::seconds kConnectWithin{5};
// Chunks are at most 1 MiB, but `started` names every token of the input.
constexpr int kLargestMessage = 64 << 20;

}  // namespace

std::shared_ptr<grpc::Channel> Connect(const std::string& address, const Screen& screen,
                                       std::ostream& err) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kLargestMessage);
  auto channel = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  const auto deadline = std::chrono::system_clock::now() + kConnectWithin;
  for (;;) {
    const grpc_connectivity_state state = channel->GetState(/*try_to_connect=*/true);
    if (state == GRPC_CHANNEL_READY) return channel;
    // Not waited out: every address was tried and refused.
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE || state == GRPC_CHANNEL_SHUTDOWN) break;
    if (!channel->WaitForStateChange(state, deadline)) break;
  }
  PrintError(absl::StrCat("no server can be reached at ", address), screen, err);
  return nullptr;
}

void SetTimeout(double seconds, grpc::ClientContext* context) {
  if (seconds <= 0) return;
  const auto wait = std::chrono::duration<double>(std::min(seconds, 1e8));
  context->set_deadline(std::chrono::system_clock::now() +
                        std::chrono::duration_cast<std::chrono::system_clock::duration>(wait));
}

grpc::Status ServedModels(const std::shared_ptr<grpc::Channel>& channel,
                          std::vector<std::string>* names) {
  grpc::ClientContext context;
  const InterruptibleCall call(&context);
  v1::ListModelsResponse response;
  grpc::Status status = v1::ModelService::NewStub(channel)->ListModels(&context, {}, &response);
  for (const v1::Model& model : response.models()) {
    names->push_back(absl::StrCat(model.name(), "@", model.version()));
  }
  return status;
}

}  // namespace mambascope::cli
