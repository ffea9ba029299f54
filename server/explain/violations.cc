#include "server/explain/violations.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"

namespace mambascope::explain {
namespace {

constexpr size_t kListed = 10;

// Details travel base64-coded in an HTTP/2 trailer beside the message, and gRPC refuses trailers of
// more than 8 KiB: the whole answer would be lost for the sake of its tail.
constexpr size_t kPayloadBytes = 3 * 1024;

}  // namespace

absl::Status Violations::ToStatus() const {
  if (list_.empty()) return absl::OkStatus();
  std::string message;
  for (size_t i = 0; i < std::min(kListed, list_.size()); ++i) {
    absl::StrAppend(&message, i == 0 ? "" : "; ", list_[i].first, ": ", list_[i].second);
  }
  if (list_.size() > kListed) absl::StrAppend(&message, " and ", list_.size() - kListed, " more");

  google::rpc::BadRequest details;
  size_t bytes = 0;
  for (const auto& [field, description] : list_) {
    bytes += field.size() + description.size() + 8;  // and the tags and lengths
    if (details.field_violations_size() > 0 && bytes > kPayloadBytes) break;
    auto* violation = details.add_field_violations();
    violation->set_field(field);
    violation->set_description(description);
  }
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload("type.googleapis.com/google.rpc.BadRequest",
                    absl::Cord(details.SerializeAsString()));
  return status;
}

}  // namespace mambascope::explain
