// The whole server over loopback, through real gRPC and HTTP.
#include "server/server.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "mambascope/v1/model.grpc.pb.h"
#include "mambascope/v1/prediction.grpc.pb.h"

namespace mambascope {
namespace {

using testing::HasSubstr;

Options TestOptions() {
  const std::string root = MAMBASCOPE_SOURCE_DIR;
  Options options;
  options.models = {"tiny=" + root + "/tests/golden/mamba1-tiny",
                    "atlas=" + root + "/deploy/models/atlas-mamba/1"};
  options.log_level = "off";
  options.max_tokens = 1 << 20;
  options.drain_timeout_s = 0.2;
  return options;
}

struct Answer {
  grpc::Status status;
  std::vector<v1::PredictEvent> events;
};

class ServerTest : public testing::Test {
 protected:
  void SetUp() override {
    auto started = Server::Start(TestOptions());
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
    channel_ = grpc::CreateChannel("127.0.0.1:" + std::to_string(server_->grpc_port()),
                                   grpc::InsecureChannelCredentials());
    prediction_ = v1::PredictionService::NewStub(channel_);
    models_ = v1::ModelService::NewStub(channel_);
    health_ = grpc::health::v1::Health::NewStub(channel_);
  }

  Answer Predict(const v1::PredictRequest& request) {
    Answer answer;
    grpc::ClientContext context;
    auto reader = prediction_->Predict(&context, request);
    v1::PredictEvent event;
    while (reader->Read(&event)) answer.events.push_back(event);
    answer.status = reader->Finish();
    return answer;
  }

  // Sends bytes that are no message to a method and returns how the call ends.
  grpc::Status SendBytes(const std::string& method, const std::string& bytes) {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
    call->StartCall();
    grpc::ByteBuffer reply;
    grpc::Status status;
    call->Finish(&reply, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return status;
  }

  std::string Get(const std::string& path, int expected = 200) {
    httplib::Client client("127.0.0.1", server_->http_port());
    const auto reply = client.Get(path.c_str());
    if (!reply) {
      ADD_FAILURE() << path << " gave no answer";
      return "";
    }
    EXPECT_EQ(reply->status, expected);
    return reply->body;
  }

  double Metric(const std::string& name) {
    const std::string page = Get("/metrics");
    const size_t at = page.find("\n" + name);
    return at == std::string::npos ? 0 : std::stod(page.substr(page.find(' ', at + 1)));
  }

  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::PredictionService::Stub> prediction_;
  std::unique_ptr<v1::ModelService::Stub> models_;
  std::unique_ptr<grpc::health::v1::Health::Stub> health_;
};

v1::PredictRequest Capital() {
  v1::PredictRequest request;
  request.set_model("atlas");
  request.set_text("The capital of France is");
  return request;
}

v1::PredictRequest EndlessGeneration() {
  v1::PredictRequest request;
  request.set_model("tiny");
  request.mutable_token_ids()->add_ids(1);
  request.mutable_generation()->set_max_tokens(1 << 20);
  request.mutable_generation()->set_ignore_eos(true);
  return request;
}

TEST_F(ServerTest, AnswersAPromptWithItsExplanation) {
  v1::PredictRequest request = Capital();
  request.set_request_id("paris-1");
  request.add_explanations()->mutable_raw_attention();
  request.add_explanations()->mutable_attention_rollout();
  const Answer answer = Predict(request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.events[1].token().text(), " Paris");
  int rows = 0;
  for (const v1::PredictEvent& event : answer.events) {
    EXPECT_EQ(event.request_id(), "paris-1");
    if (event.has_tensor_chunk()) {
      ++rows;
      EXPECT_EQ(event.tensor_chunk().data().size(), answer.events[0].started().tokens_size() * 4u);
    }
  }
  EXPECT_EQ(rows, 2);
  EXPECT_TRUE(answer.events.back().has_finished());
}

TEST_F(ServerTest, ListsItsModelsAndTheirMethods) {
  grpc::ClientContext list_context, get_context;
  v1::ListModelsResponse list;
  ASSERT_TRUE(models_->ListModels(&list_context, {}, &list).ok());
  ASSERT_EQ(list.models_size(), 2);
  EXPECT_EQ(list.models(0).name(), "atlas");
  EXPECT_EQ(list.models(0).digest().size(), 64u);
  v1::GetModelRequest request;
  request.set_model("atlas@1");
  request.set_length(100);
  v1::GetModelResponse model;
  ASSERT_TRUE(models_->GetModel(&get_context, request, &model).ok());
  // All that the contract names.
  ASSERT_EQ(model.methods_size(),
            v1::Explanation::descriptor()->FindOneofByName("method")->field_count());
  for (const v1::MethodInfo& method : model.methods()) {
    EXPECT_GT(method.memory_bytes(), 0) << method.name();
    EXPECT_GT(method.seconds(), 0) << method.name();
  }
  EXPECT_EQ(model.methods(0).name(), "hidden_attention");
  EXPECT_EQ(model.methods(0).result_bytes(), 6 * 100 * 100 * 4);
}

TEST_F(ServerTest, ARefusalCarriesEveryViolationInItsDetails) {
  v1::PredictRequest request = Capital();
  request.mutable_generation()->set_max_tokens(0);
  request.mutable_generation()->set_top_k(-1);
  const Answer answer = Predict(request);
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(answer.events.empty());
  google::rpc::Status status;
  ASSERT_TRUE(status.ParseFromString(answer.status.error_details()));
  ASSERT_EQ(status.details_size(), 1);
  google::rpc::BadRequest bad;
  ASSERT_TRUE(status.details(0).UnpackTo(&bad));
  EXPECT_EQ(bad.field_violations_size(), 2);
}

TEST_F(ServerTest, BytesThatAreNoMessageAndBadUtf8AreInvalidArguments) {
  const std::string bad_utf8 =
      std::string("\x0a\x02\xff\xfe", 4);  // model = two bytes that are no UTF-8
  for (const char* method :
       {"/mambascope.v1.PredictionService/Predict", "/mambascope.v1.PredictionService/Tokenize",
        "/mambascope.v1.ModelService/GetModel"}) {
    for (const std::string& bytes : {std::string("\xff\xff\xff"), bad_utf8}) {
      const grpc::Status status = SendBytes(method, bytes);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method;
      EXPECT_THAT(status.error_message(), HasSubstr("mambascope.v1."));
    }
  }
  EXPECT_TRUE(Predict(Capital()).status.ok()) << "nothing else stopped working";
}

TEST_F(ServerTest, UnknownModelsMethodsAndOversizedRequestsHaveTheirCodes) {
  v1::PredictRequest request = Capital();
  request.set_model("gpt");
  EXPECT_EQ(Predict(request).status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(SendBytes("/mambascope.v1.PredictionService/PredictMany", "").error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  request = Capital();
  request.set_text(std::string(17 << 20, 'a'));
  EXPECT_EQ(Predict(request).status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  request.set_text(std::string(10 << 20, 'a'));
  EXPECT_EQ(Predict(request).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ServerTest, HealthAnswersByServiceName) {
  for (const char* service :
       {"", "mambascope.v1.PredictionService", "mambascope.v1.ModelService"}) {
    grpc::ClientContext context;
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(service);
    grpc::health::v1::HealthCheckResponse response;
    ASSERT_TRUE(health_->Check(&context, request, &response).ok());
    EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::SERVING);
  }
  grpc::ClientContext context;
  grpc::health::v1::HealthCheckRequest request;
  request.set_service("nope");
  grpc::health::v1::HealthCheckResponse response;
  EXPECT_EQ(health_->Check(&context, request, &response).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServerTest, AWatcherOfHealthSeesTheShutdown) {
  grpc::ClientContext context;
  auto watch = health_->Watch(&context, {});
  grpc::health::v1::HealthCheckResponse response;
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::SERVING);
  std::thread shutdown([&] { server_->Shutdown(); });
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::NOT_SERVING);
  context.TryCancel();
  while (watch->Read(&response)) {
  }
  watch->Finish();
  shutdown.join();
}

TEST_F(ServerTest, AClientThatLeavesStopsTheGeneration) {
  grpc::ClientContext context;
  auto reader = prediction_->Predict(&context, EndlessGeneration());
  v1::PredictEvent event;
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(reader->Read(&event));
  EXPECT_EQ(Metric("mambascope_running_sequences"), 1);
  context.TryCancel();
  while (reader->Read(&event)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  for (int i = 0; i < 1000 && Metric("mambascope_calls_in_flight") > 0; ++i)
    std::this_thread::yield();
  EXPECT_EQ(Metric("mambascope_running_sequences"), 0);
  const double steps = Metric("mambascope_decode_steps_total{model=\"tiny\"}");
  EXPECT_TRUE(Predict(Capital()).status.ok());
  EXPECT_EQ(Metric("mambascope_decode_steps_total{model=\"tiny\"}"), steps)
      << "nobody decodes any more";
}

TEST_F(ServerTest, ADeadlineEndsACallAndItsWork) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  auto reader = prediction_->Predict(&context, EndlessGeneration());
  v1::PredictEvent event;
  while (reader->Read(&event)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  for (int i = 0; i < 1000 && Metric("mambascope_calls_in_flight") > 0; ++i)
    std::this_thread::yield();
  EXPECT_EQ(Metric("mambascope_running_sequences"), 0);
}

TEST_F(ServerTest, ShutdownEndsRunningCallsWithUnavailable) {
  grpc::ClientContext context;
  auto reader = prediction_->Predict(&context, EndlessGeneration());
  v1::PredictEvent event, last;
  ASSERT_TRUE(reader->Read(&event));
  std::thread shutdown([&] { server_->Shutdown(); });
  while (reader->Read(&event)) last = event;
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(last.has_finished());
  shutdown.join();
}

TEST_F(ServerTest, ProbesAndMetricsAnswer) {
  EXPECT_EQ(Get("/livez"), "ok\n");
  EXPECT_EQ(Get("/readyz"), "ready\n");
  ASSERT_TRUE(Predict(Capital()).status.ok());
  const std::string page = Get("/metrics");
  EXPECT_THAT(page, HasSubstr("mambascope_request_duration_seconds_count{code=\"OK\",method="
                              "\"Predict\",model=\"atlas\"} 1"));
  EXPECT_THAT(page, HasSubstr("mambascope_build_info"));
  v1::PredictRequest request = Capital();
  request.set_model("client-chosen");
  Predict(request);
  EXPECT_THAT(Get("/metrics"), testing::Not(HasSubstr("client-chosen")))
      << "only resolved names become labels";
}

TEST_F(ServerTest, SlowHttpPeersHoldNeitherProbesNorTheShutdown) {
  std::vector<int> peers;
  for (int i = 0; i < 8; ++i) {
    const int peer = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(server_->http_port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(peer, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    peers.push_back(peer);
  }
  std::atomic<bool> over{false};
  std::thread drip([&] {
    while (!over) {
      for (const int peer : peers) send(peer, "x", 1, MSG_NOSIGNAL);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  });
  EXPECT_EQ(Get("/livez"), "ok\n");
  server_->Shutdown();  // would hang here
  over = true;
  drip.join();
  for (const int peer : peers) close(peer);
}

TEST_F(ServerTest, AThousandMutatedRequestsCostNobodyElseAnything) {
  v1::PredictRequest request = Capital();
  request.add_explanations()->mutable_hidden_attention()->add_layers()->set_end(2);
  request.add_explanations()->mutable_attention_rollout();
  const std::string good = request.SerializeAsString();
  std::minstd_rand random(5);
  for (int i = 0; i < 1000; ++i) {
    std::string bytes = good;
    for (unsigned flips = 1 + random() % 4; flips > 0; --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    if (random() % 8 == 0) bytes.resize(random() % bytes.size());
    v1::PredictRequest parsed;
    if (parsed.ParseFromString(bytes))
      Predict(parsed);  // any end is fine; none may hang or crash
    else
      SendBytes("/mambascope.v1.PredictionService/Predict", bytes);
  }
  EXPECT_TRUE(Predict(Capital()).status.ok());
  EXPECT_EQ(Metric("mambascope_calls_in_flight"), 0);
}

TEST(Server, SaysWhyItCannotStart) {
  Options options = TestOptions();
  options.grpc_address = "nonsense";
  EXPECT_THAT(std::string(Server::Start(options).status().message()), HasSubstr("grpc_address"));
  options = TestOptions();
  options.http_address = "nonsense";
  EXPECT_THAT(std::string(Server::Start(options).status().message()), HasSubstr("http_address"));
  const auto first = Server::Start(TestOptions());
  ASSERT_TRUE(first.ok());
  options = TestOptions();
  options.grpc_address = "127.0.0.1:" + std::to_string((*first)->grpc_port());
  EXPECT_THAT(std::string(Server::Start(options).status().message()), HasSubstr("in use"));
  options = TestOptions();
  options.http_address = "127.0.0.1:" + std::to_string((*first)->http_port());
  EXPECT_THAT(std::string(Server::Start(options).status().message()), HasSubstr("in use"));
}

}  // namespace
}  // namespace mambascope
