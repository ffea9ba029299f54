#pragma once

#include <ostream>
#include <string>

#include "absl/strings/string_view.h"
#include "client/cli/terminal.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"

namespace mambascope::cli {

// A contract with scripts.
enum ExitCode : int {
  kDone = 0,
  kFailedHere = 1,  // on this side of the wire: a full disk, a closed pipe
  kUsage = 2,
  kRefused = 3,  // by a server that was reached, or its answer does not hold together
  kNotReachable = 4,
  kInterrupted = 130,  // 128 + SIGINT, as shells count
};

// "INVALID_ARGUMENT"; "CODE_77" for numbers that are no code of gRPC.
std::string CodeName(int code);

// The google.rpc.Status in a failed call's grpc-status-details-bin, else its code and message
// alone.
google::rpc::Status DetailedStatus(const grpc::Status& status);

// `error: CODE: message`, then a line for every wrong field, exhausted quota, the time to wait and
// the id in the server's log, as far as the status tells. Details of unknown types are left out.
void PrintError(const google::rpc::Status& status, const Screen& screen, std::ostream& err);
// The same for one of our own messages.
void PrintError(absl::string_view message, const Screen& screen, std::ostream& err);

}  // namespace mambascope::cli
