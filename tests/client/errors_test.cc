#include "client/cli/errors.h"

#include <sstream>
#include <string>

#include <gtest/gtest.h>

#include "google/rpc/error_details.pb.h"

namespace mambascope::cli {
namespace {

std::string Printed(const google::rpc::Status& status) {
  std::ostringstream err;
  PrintError(status, Screen(), err);
  return err.str();
}

google::rpc::Status Detailed() {
  google::rpc::Status status;
  status.set_code(3);
  status.set_message("2 fields are wrong");
  google::rpc::BadRequest bad;
  for (const char* field : {"generation.top_k", "explanations[1].id"}) {
    bad.add_field_violations()->set_field(field);
    bad.mutable_field_violations()->rbegin()->set_description("why");
  }
  status.add_details()->PackFrom(bad);
  return status;
}

TEST(PrintError, NamesTheCodeAndEveryWrongField) {
  EXPECT_EQ(Printed(Detailed()),
            "error: INVALID_ARGUMENT: 2 fields are wrong\n"
            "  generation.top_k: why\n"
            "  explanations[1].id: why\n");
}

TEST(PrintError, SaysWhenToTryAgainWhichQuotaAndWhereToLook) {
  google::rpc::Status status;
  status.set_code(8);
  status.set_message("full");
  google::rpc::QuotaFailure quota;
  quota.add_violations()->set_subject("caller:me");
  quota.mutable_violations(0)->set_description("10 a minute");
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(1);
  retry.mutable_retry_delay()->set_nanos(500000000);
  google::rpc::RequestInfo request;
  request.set_request_id("r-1");
  status.add_details()->PackFrom(quota);
  status.add_details()->PackFrom(retry);
  status.add_details()->PackFrom(request);
  EXPECT_EQ(Printed(status),
            "error: RESOURCE_EXHAUSTED: full\n"
            "  caller:me: 10 a minute\n"
            "  try again in 1.5 s\n"
            "  in the server's log: r-1\n");
}

TEST(PrintError, EscapesWhatTheServerSends) {
  google::rpc::Status status;
  status.set_code(5);
  status.set_message("no model '\x1b[2J'");
  EXPECT_EQ(Printed(status), "error: NOT_FOUND: no model '\\x1b[2J'\n");
}

TEST(PrintError, PassesOverUnknownCodesAndDetails) {
  google::rpc::Status status;
  status.set_code(77);
  status.add_details()->set_type_url("type.googleapis.com/not.known");
  EXPECT_EQ(Printed(status), "error: CODE_77: \n");
}

TEST(DetailedStatus, IsReadFromTheCallsDetails) {
  const grpc::Status call(grpc::StatusCode::INVALID_ARGUMENT, "2 fields are wrong",
                          Detailed().SerializeAsString());
  EXPECT_EQ(DetailedStatus(call).details_size(), 1);
}

TEST(DetailedStatus, FallsBackToCodeAndMessage) {
  for (const std::string details : {"", "\xff\xff", "\x08\x05"}) {  // none, garbage, another code
    const grpc::Status call(grpc::StatusCode::UNAVAILABLE, "gone", details);
    EXPECT_EQ(DetailedStatus(call).code(), 14);
    EXPECT_EQ(DetailedStatus(call).message(), "gone");
  }
}

}  // namespace
}  // namespace mambascope::cli
