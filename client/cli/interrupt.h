#pragma once

#include "grpcpp/client_context.h"

namespace mambascope::cli {

// Ctrl-C. Call it first in main, before any thread exists: SIGINT is blocked in all of them and
// waited for in one of its own, where anything may be called. Where SIGINT is ignored (nohup, jobs
// of a script in the background) it stays so.
void InstallInterrupt();

// While it lives, the first Ctrl-C cancels the call of `context` (borrowed). The second one, and
// any without such a call, ends the process with 130.
class InterruptibleCall {
 public:
  explicit InterruptibleCall(grpc::ClientContext* context);
  ~InterruptibleCall();
  InterruptibleCall(const InterruptibleCall&) = delete;
  InterruptibleCall& operator=(const InterruptibleCall&) = delete;

  bool interrupted() const;
};

}  // namespace mambascope::cli
