// Loads a running server over gRPC: N callers, each sending its next request when the last one has
// ended. Prints one JSON line: throughput in generated tokens/s, and latencies of whole calls.
//
//   load_bench ADDRESS MODEL [--callers 64] [--calls 256] [--prompt 8] [--generate 16]
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "mambascope/v1/prediction.grpc.pb.h"

namespace mambascope {
namespace {

struct Load {
  std::string address, model;
  int callers = 64, calls = 256, prompt = 8, generate = 16;
};

v1::PredictRequest Request(const Load& load, int call) {
  std::mt19937 random(call);
  v1::PredictRequest request;
  request.set_model(load.model);
  for (int i = 0; i < load.prompt; ++i) {
    request.mutable_token_ids()->add_ids(static_cast<int32_t>(random() % 50000));
  }
  request.mutable_generation()->set_max_tokens(load.generate);
  request.mutable_generation()->set_ignore_eos(true);
  return request;
}

// Generated tokens; the program ends if the call fails, since its figures would be worthless.
int Call(v1::PredictionService::Stub& stub, const v1::PredictRequest& request) {
  grpc::ClientContext context;
  const auto reader = stub.Predict(&context, request);
  v1::PredictEvent event;
  int tokens = 0;
  while (reader->Read(&event)) tokens += event.has_token() ? 1 : 0;
  const grpc::Status status = reader->Finish();
  if (!status.ok()) {
    std::fprintf(stderr, "load_bench: %s\n", status.error_message().c_str());
    std::_Exit(1);
  }
  return tokens;
}

double Percentile(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<size_t>(share * static_cast<double>(sorted.size() - 1))];
}

int Run(const Load& load) {
  const auto channel = grpc::CreateChannel(load.address, grpc::InsecureChannelCredentials());
  const auto stub = v1::PredictionService::NewStub(channel);
  Call(*stub, Request(load, 0));  // connects and warms the caches up
  using Clock = std::chrono::steady_clock;
  std::atomic<int> next = 0, tokens = 0;
  std::mutex mu;
  std::vector<double> seconds;
  const Clock::time_point begin = Clock::now();
  std::vector<std::thread> callers;
  for (int i = 0; i < load.callers; ++i) {
    callers.emplace_back([&] {
      for (int call = next++; call < load.calls; call = next++) {
        const Clock::time_point start = Clock::now();
        tokens += Call(*stub, Request(load, call));
        const std::chrono::duration<double> taken = Clock::now() - start;
        std::lock_guard lock(mu);
        seconds.push_back(taken.count());
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  const std::chrono::duration<double> wall = Clock::now() - begin;
  std::sort(seconds.begin(), seconds.end());
  std::printf(
      "{\"callers\": %d, \"calls\": %d, \"tokens_per_s\": %.1f, \"p50_s\": %.4f, \"p99_s\": "
      "%.4f}\n",
      load.callers, load.calls, tokens / wall.count(), Percentile(seconds, 0.5),
      Percentile(seconds, 0.99));
  return 0;
}

int Main(int argc, char** argv) {
  if (argc < 3 || argc % 2 == 0) {
    std::fprintf(stderr,
                 "usage: load_bench ADDRESS MODEL [--callers N] [--calls N] [--prompt N] "
                 "[--generate N]\n");
    return 2;
  }
  Load load;
  load.address = argv[1];
  load.model = argv[2];
  for (int i = 3; i < argc; i += 2) {
    const std::string flag = argv[i];
    int* const value = flag == "--callers"    ? &load.callers
                       : flag == "--calls"    ? &load.calls
                       : flag == "--prompt"   ? &load.prompt
                       : flag == "--generate" ? &load.generate
                                              : nullptr;
    if (value == nullptr) return Main(0, nullptr);
    *value = std::atoi(argv[i + 1]);
  }
  return Run(load);
}

}  // namespace
}  // namespace mambascope

int main(int argc, char** argv) { return mambascope::Main(argc, argv); }
