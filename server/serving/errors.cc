#include "server/serving/errors.h"

#include <string>

#include "absl/strings/cord.h"
#include "google/rpc/error_details.pb.h"

namespace mambascope::serving {

absl::Status WithRetryInfo(absl::Status status, absl::Duration delay) {
  google::rpc::RetryInfo info;
  const absl::Duration whole = absl::Floor(delay, absl::Seconds(1));
  info.mutable_retry_delay()->set_seconds(absl::ToInt64Seconds(whole));
  info.mutable_retry_delay()->set_nanos(
      static_cast<int32_t>(absl::ToInt64Nanoseconds(delay - whole)));
  status.SetPayload("type.googleapis.com/google.rpc.RetryInfo",
                    absl::Cord(info.SerializeAsString()));
  return status;
}

absl::string_view CodeName(absl::StatusCode code) {
  static const std::string* const names = [] {
    constexpr int kCodes = 17;
    auto* list = new std::string[kCodes];
    for (int i = 0; i < kCodes; ++i)
      list[i] = absl::StatusCodeToString(static_cast<absl::StatusCode>(i));
    return list;
  }();
  const int index = static_cast<int>(code);
  return index >= 0 && index < 17 ? absl::string_view(names[index]) : "UNKNOWN";
}

}  // namespace mambascope::serving
