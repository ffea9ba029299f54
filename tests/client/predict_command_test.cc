#include "client/cli/predict_command.h"

#include <unistd.h>

#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "google/protobuf/util/json_util.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "mambascope/v1/prediction.grpc.pb.h"

namespace mambascope::cli {
namespace {

PredictFlags TextFlags() {
  PredictFlags flags;
  flags.text = "The cat";
  return flags;
}

// Answers every request with `events`, then `status`.
class Scripted : public v1::PredictionService::Service {
 public:
  grpc::Status Predict(grpc::ServerContext*, const v1::PredictRequest*,
                       grpc::ServerWriter<v1::PredictEvent>* writer) override {
    for (const v1::PredictEvent& event : events) writer->Write(event);
    return status;
  }

  std::vector<v1::PredictEvent> events;
  grpc::Status status;
};

class PredictTest : public testing::Test {
 protected:
  PredictTest() {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    auto* started = Event()->mutable_started();
    started->set_model("m");
    started->set_version("2");
    for (const char* piece : {"The", " cat"}) started->add_tokens()->set_piece(piece);
    auto* token = Event()->mutable_token();
    token->set_piece(" sat");
    token->set_text(" sat");
    token->set_log_probability(-0.5f);
  }
  ~PredictTest() override { server_->Shutdown(); }

  v1::PredictEvent* Event() {
    v1::PredictEvent* event = &service_.events.emplace_back();
    event->set_request_id("r");
    return event;
  }
  void AddMap(const std::string& sha256) {
    auto* started = Event()->mutable_explanation_started();
    started->set_explanation_id("row");
    started->set_method("raw_attention");
    auto* info = started->add_tensors();
    info->set_name("raw_attention");
    info->set_dtype(v1::DATA_TYPE_FP16);
    info->set_total_bytes(4);
    auto* axis = info->add_axes();
    axis->set_name("input_tokens");
    axis->set_size(2);
    Event()->mutable_progress()->set_total(1);
    auto* chunk = Event()->mutable_tensor_chunk();
    chunk->set_explanation_id("row");
    chunk->set_tensor("raw_attention");
    chunk->set_data(std::string("\x00\x3c\x00\xc0", 4));  // 1, -2
    auto* finished = Event()->mutable_explanation_finished();
    finished->set_explanation_id("row");
    auto* digest = finished->add_digests();
    digest->set_tensor("raw_attention");
    digest->set_sha256(sha256);
  }
  ExitCode Run(const PredictFlags& flags) {
    return Predict(server_->InProcessChannel({}), *BuildRequest(flags), flags,
                   {out_, Screen(), err_, Screen(), /*progress=*/false});
  }

  static constexpr char kSha256[] =
      "0c82e2008d4b1c37a2604f1dee0db584daf39b6ab140aaa834d3eac1df0b9458";
  Scripted service_;
  std::unique_ptr<grpc::Server> server_;
  std::ostringstream out_, err_;
};

TEST_F(PredictTest, APersonSeesModelTokensPredictionAndRow) {
  AddMap(kSha256);
  Event()->mutable_finished();
  EXPECT_EQ(Run(TextFlags()), kDone) << err_.str();
  for (const char* part : {"m@2", "The\u2502 cat\u2502", "prediction   sat", "probability 0.6065",
                           "row (raw_attention)", "1  \u2423cat           -2"}) {
    EXPECT_TRUE(absl::StrContains(out_.str(), part)) << part << "\n" << out_.str();
  }
  EXPECT_EQ(err_.str(), "");
}

TEST_F(PredictTest, JsonIsOneEventALineAndNothingElse) {
  AddMap(kSha256);
  Event()->mutable_finished()->set_finish_reason(v1::FINISH_REASON_LENGTH);
  // A detail of a type that this program was not built with must not hide the event.
  auto* detail = service_.events.back().mutable_finished()->mutable_status()->add_details();
  detail->set_type_url("type.googleapis.com/not.known");
  detail->set_value("x");
  PredictFlags flags = TextFlags();
  flags.json = true;
  EXPECT_EQ(Run(flags), kDone) << err_.str();
  const std::vector<std::string> lines = absl::StrSplit(out_.str(), '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), service_.events.size());
  for (const std::string& line : lines) {
    v1::PredictEvent event;
    EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(line, &event).ok()) << line;
  }
  EXPECT_TRUE(absl::StrContains(lines[2], "\"explanation_started\"")) << lines[2];
  EXPECT_TRUE(absl::StrContains(lines.back(), "\"FINISH_REASON_LENGTH\"")) << lines.back();
}

TEST_F(PredictTest, BytesThatDoNotMatchTheirDigestAreRefusedAndNotSaved) {
  AddMap(std::string(64, '0'));
  Event()->mutable_finished();
  PredictFlags flags = TextFlags();
  flags.output = absl::StrCat(testing::TempDir(), "predict_command_test_", getpid());
  EXPECT_EQ(Run(flags), kRefused);
  EXPECT_TRUE(absl::StrContains(err_.str(), "SHA-256")) << err_.str();
  EXPECT_FALSE(std::filesystem::exists(flags.output));
}

TEST_F(PredictTest, OutputIsSavedBesideTheView) {
  AddMap(kSha256);
  Event()->mutable_finished();
  PredictFlags flags = TextFlags();
  flags.output = absl::StrCat(testing::TempDir(), "predict_command_test_", getpid());
  EXPECT_EQ(Run(flags), kDone) << err_.str();
  EXPECT_TRUE(std::filesystem::remove(flags.output));
  EXPECT_TRUE(absl::StrContains(out_.str(), "1 tensor in "));
}

TEST_F(PredictTest, AnOutputThatCannotBeWrittenIsAUsageErrorBeforeTheCall) {
  PredictFlags flags = TextFlags();
  flags.output = "/nonexistent/folder/x.safetensors";
  EXPECT_EQ(Run(flags), kUsage);
  EXPECT_EQ(out_.str(), "");
}

TEST_F(PredictTest, ARefusalIsPrintedWithItsCode) {
  service_.events.clear();
  service_.status = grpc::Status(grpc::StatusCode::NOT_FOUND, "no model 'x'; there is m");
  EXPECT_EQ(Run(TextFlags()), kRefused);
  EXPECT_EQ(err_.str(), "error: NOT_FOUND: no model 'x'; there is m\n");
  EXPECT_EQ(out_.str(), "");
}

TEST_F(PredictTest, AFailedExplanationLeavesThePredictionAndIsARefusal) {
  auto* finished = Event()->mutable_explanation_finished();
  finished->set_explanation_id("row");
  finished->mutable_status()->set_code(12);
  finished->mutable_status()->set_message("not for this family");
  Event()->mutable_finished();
  EXPECT_EQ(Run(TextFlags()), kRefused);
  EXPECT_TRUE(absl::StrContains(out_.str(), "prediction   sat"));
  EXPECT_EQ(err_.str(), "error: UNIMPLEMENTED: row: not for this family\n");
}

TEST_F(PredictTest, AnAnswerWithoutItsEndIsNotBelieved) {
  EXPECT_EQ(Run(TextFlags()), kRefused);
  EXPECT_TRUE(absl::StrContains(err_.str(), "without `finished`")) << err_.str();
}

TEST_F(PredictTest, NothingFromTheModelReachesTheTerminalUnescaped) {
  service_.events[0].mutable_started()->mutable_tokens(0)->set_piece("\x1b[2J");
  service_.events[1].mutable_token()->set_text("\x1b]0;x\x07");
  service_.events[0].mutable_started()->set_model("\x1b[1m");
  AddMap(kSha256);
  service_.events[2].mutable_explanation_started()->mutable_target()->set_piece("\x1b[3m");
  Event()->mutable_finished();
  EXPECT_EQ(Run(TextFlags()), kDone);
  EXPECT_EQ(out_.str().find('\x1b'), std::string::npos);
  EXPECT_EQ(out_.str().find('\x07'), std::string::npos);
}

}  // namespace
}  // namespace mambascope::cli
