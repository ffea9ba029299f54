#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/clock.h"
#include "server/base/timeline.h"
#include "server/observe/metrics.h"
#include "server/serving/call.h"

namespace mambascope::serving {

// The one place where calls end: stamps, metrics, log line, last event. Threads: any.
class Completion {
 public:
  Completion(observe::Metrics* metrics, const Clock* clock) : metrics_(metrics), clock_(clock) {}

  // Ends an admitted call: sends `finished`, closes its stream with `status`. A second End of the
  // same call does nothing. Executor's thread (or the one that owns the call).
  void End(Call& call, const absl::Status& status) const;

  // Ends a call that was refused or that is a single answer (Tokenize, GetModel): metrics and log
  // only. `model` is empty unless it was resolved.
  void EndUnqueued(absl::string_view rpc, absl::string_view request_id, absl::string_view model,
                   Timeline timeline, const absl::Status& status) const;

 private:
  observe::Metrics* metrics_;
  const Clock* clock_;
};

// As google.rpc.Status, with all payloads as details.
google::rpc::Status ToRpcStatus(const absl::Status& status);

}  // namespace mambascope::serving
