#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "client/cli/errors.h"
#include "client/cli/terminal.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"

namespace mambascope::cli {

// A channel to a server that answered within a few seconds; nullptr after saying on `err` that it
// did not. So an UNAVAILABLE of a later call comes from a server that was reached.
std::shared_ptr<grpc::Channel> Connect(const std::string& address, const Screen& screen,
                                       std::ostream& err);

// Seconds from now until the call gives up; not positive: it does not.
void SetTimeout(double seconds, grpc::ClientContext* context);

// `name@version` of every model that is served, in the server's order.
grpc::Status ServedModels(const std::shared_ptr<grpc::Channel>& channel,
                          std::vector<std::string>* names);

}  // namespace mambascope::cli
