#include "server/explain/violations.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"

namespace mambascope::explain {
namespace {

constexpr char kTypeUrl[] = "type.googleapis.com/google.rpc.BadRequest";

google::rpc::BadRequest Details(const absl::Status& status) {
  google::rpc::BadRequest details;
  const auto payload = status.GetPayload(kTypeUrl);
  EXPECT_TRUE(payload.has_value());
  EXPECT_TRUE(details.ParseFromString(std::string(*payload)));
  return details;
}

TEST(Violations, NoneIsOk) { EXPECT_TRUE(Violations().ToStatus().ok()); }

TEST(Violations, AllAreInTheMessageAndInTheDetails) {
  Violations violations;
  violations.Add("model", "is empty");
  violations.Add("explanations[1].raw_attention.top_k", "9 is outside [1, 4]");
  const absl::Status status = violations.ToStatus();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "model: is empty; explanations[1].raw_attention.top_k: 9 is outside [1, 4]");
  const google::rpc::BadRequest details = Details(status);
  ASSERT_EQ(details.field_violations_size(), 2);
  EXPECT_EQ(details.field_violations(0).field(), "model");
  EXPECT_EQ(details.field_violations(1).field(), "explanations[1].raw_attention.top_k");
  EXPECT_EQ(details.field_violations(1).description(), "9 is outside [1, 4]");
}

TEST(Violations, TheMessageListsTenAndCountsTheRest) {
  Violations violations;
  for (int i = 0; i < 10; ++i) violations.Add(absl::StrCat("f", i), "bad");
  EXPECT_EQ(violations.ToStatus().message().find("more"), absl::string_view::npos);
  violations.Add("f10", "bad");
  violations.Add("f11", "bad");
  const std::string message(violations.ToStatus().message());
  EXPECT_NE(message.find("f9: bad and 2 more"), std::string::npos) << message;
  EXPECT_EQ(message.find("f10"), std::string::npos);
  EXPECT_EQ(Details(violations.ToStatus()).field_violations_size(), 12);
}

// gRPC refuses trailers of more than 8 KiB; the details travel base64-coded with the message.
TEST(Violations, TheDetailsStayWithinATrailer) {
  Violations violations;
  for (int i = 0; i < 100000; ++i) violations.Add("field", std::string(100, 'x'));
  const absl::Status status = violations.ToStatus();
  const size_t payload = std::string(*status.GetPayload(kTypeUrl)).size();
  EXPECT_GT(payload, 2000u);
  EXPECT_LE(2 * status.message().size() + payload * 4 / 3, 7500u);
}

}  // namespace
}  // namespace mambascope::explain
