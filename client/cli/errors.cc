#include "client/cli/errors.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "google/rpc/error_details.pb.h"

namespace mambascope::cli {

std::string CodeName(int code) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  if (code < 0 || code >= static_cast<int>(std::size(kNames))) return absl::StrCat("CODE_", code);
  return kNames[code];
}

google::rpc::Status DetailedStatus(const grpc::Status& status) {
  google::rpc::Status detailed;
  if (!status.error_details().empty() && detailed.ParseFromString(status.error_details()) &&
      detailed.code() == status.error_code()) {
    return detailed;
  }
  detailed.Clear();
  detailed.set_code(status.error_code());
  detailed.set_message(status.error_message());
  return detailed;
}

namespace {

// The message lists wrong fields for those who read no details; here they follow, one a line.
std::string Headline(const google::rpc::Status& status) {
  for (const google::protobuf::Any& detail : status.details()) {
    google::rpc::BadRequest bad;
    if (!detail.UnpackTo(&bad)) continue;
    const int count = bad.field_violations_size();
    return absl::StrCat(count, count == 1 ? " field is wrong" : " fields are wrong");
  }
  return status.message();
}

}  // namespace

void PrintError(const google::rpc::Status& status, const Screen& screen, std::ostream& err) {
  const auto safe = [&](absl::string_view text) { return Escaped(text, screen.utf8); };
  err << "error: " << CodeName(status.code()) << ": " << safe(Headline(status)) << "\n";
  for (const google::protobuf::Any& detail : status.details()) {
    google::rpc::BadRequest bad_request;
    google::rpc::QuotaFailure quota;
    google::rpc::RetryInfo retry;
    google::rpc::RequestInfo request;
    if (detail.UnpackTo(&bad_request)) {
      for (const auto& violation : bad_request.field_violations()) {
        err << "  " << safe(violation.field()) << ": " << safe(violation.description()) << "\n";
      }
    } else if (detail.UnpackTo(&quota)) {
      for (const auto& violation : quota.violations()) {
        err << "  " << safe(violation.subject()) << ": " << safe(violation.description()) << "\n";
      }
    } else if (detail.UnpackTo(&retry)) {
      const double seconds =
          static_cast<double>(retry.retry_delay().seconds()) + retry.retry_delay().nanos() * 1e-9;
      err << "  try again in " << absl::StrFormat("%.3g", seconds) << " s\n";
    } else if (detail.UnpackTo(&request)) {
      err << "  in the server's log: " << safe(request.request_id()) << "\n";
    }
  }
}

void PrintError(absl::string_view message, const Screen& screen, std::ostream& err) {
  err << "error: " << Escaped(message, screen.utf8) << "\n";
}

}  // namespace mambascope::cli
