#include "server/server.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/clock.h"
#include "server/base/status.h"
#include "server/base/thread_pool.h"
#include "server/gateway/http_server.h"
#include "server/kernels/gemm.h"
#include "server/model/device.h"
#include "server/observe/log.h"
#include "server/observe/metrics.h"
#include "server/rpc/rpc_server.h"
#include "server/serving/admission.h"
#include "server/serving/completion.h"
#include "server/serving/executor.h"
#include "server/serving/memory_budget.h"
#include "server/serving/model_repository.h"
#include "server/version.h"

namespace mambascope {
namespace {

constexpr absl::Duration kFlushTimeout = absl::Seconds(10);

// Bytes: the machine's, or the limit of the process's control group. A pod's limit is the latter.
int64_t UsableMemory() {
  int64_t usable = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
  for (const char* limit :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream file(limit);
    int64_t bytes = 0;  // stays 0 for "max"
    if (file >> bytes && bytes > 0) usable = std::min(usable, bytes);
  }
  return usable;
}

// The processors that this process may run on, which taskset and cgroups' cpusets narrow.
int UsableProcessors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return std::max(1u, std::thread::hardware_concurrency());
}

observe::LogLevel ToLogLevel(const std::string& name) {
  if (name == "warning") return observe::LogLevel::kWarning;
  if (name == "error") return observe::LogLevel::kError;
  if (name == "off") return observe::LogLevel::kOff;
  return observe::LogLevel::kInfo;
}

serving::AdmissionLimits ToAdmissionLimits(const Options& options) {
  serving::AdmissionLimits limits;
  limits.max_input_tokens = options.max_input_tokens;
  limits.max_tokens = options.max_tokens;
  limits.default_deadline = absl::Seconds(options.default_deadline_s);
  limits.max_deadline = absl::Seconds(options.max_deadline_s);
  return limits;
}

serving::ExecutorOptions ToExecutorOptions(const Options& options) {
  serving::ExecutorOptions executor;
  executor.batch.max_batch_tokens = options.max_batch_tokens;
  executor.batch.max_running = options.max_running;
  executor.batch.max_queue_delay = absl::Milliseconds(options.max_queue_delay_ms);
  executor.max_queue = options.max_queue;
  return executor;
}

// Under its final name only when complete, so that who waits for the file never reads half of it.
absl::Status WritePortFile(const std::string& path, int grpc_port, int http_port) {
  const std::string partial = path + ".partial";
  {
    std::ofstream out(partial, std::ios::trunc);
    out << "grpc=" << grpc_port << "\n";
    if (http_port != 0) out << "http=" << http_port << "\n";
    if (!out.flush())
      return absl::InvalidArgumentError(absl::StrCat("port_file: cannot write ", path));
  }
  if (std::rename(partial.c_str(), path.c_str()) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("port_file: cannot write ", path));
  }
  return absl::OkStatus();
}

class ServerImpl : public Server {
 public:
  explicit ServerImpl(const Options& options)
      : options_(options),
        pool_(options.threads > 0 ? options.threads : UsableProcessors()),
        budget_(options.explanation_memory_bytes >= 0
                    ? options.explanation_memory_bytes
                    : std::max(int64_t{2} << 30, UsableMemory() / 3)),
        completion_(&metrics_, &Clock::Real()) {}

  ~ServerImpl() override { Shutdown(); }

  absl::Status Start() {
    ASSIGN_OR_RETURN(device_, model::ParseDevice(options_.device));
    ASSIGN_OR_RETURN(repository_, serving::ModelRepository::Load(
                                      options_.models, options_.model_repository, device_, &pool_));
    Describe();
    admission_ = std::make_unique<serving::Admission>(repository_.get(), &budget_, &metrics_,
                                                      &Clock::Real(), ToAdmissionLimits(options_));
    executor_ = std::make_unique<serving::Executor>(&pool_, &metrics_, &completion_, &Clock::Real(),
                                                    ToExecutorOptions(options_));
    executor_->Start();
    if (!options_.http_address.empty()) {
      ASSIGN_OR_RETURN(http_,
                       gateway::HttpServer::Start(options_.http_address,
                                                  {.metrics = [this] { return MetricsPage(); },
                                                   .ready = [this] { return ready_.load(); }}));
    }
    ASSIGN_OR_RETURN(rpc_,
                     rpc::RpcServer::Start({.repository = repository_.get(),
                                            .admission = admission_.get(),
                                            .executor = executor_.get(),
                                            .completion = &completion_,
                                            .metrics = &metrics_,
                                            .clock = &Clock::Real()},
                                           options_.grpc_address, options_.max_request_bytes));
    rpc_->SetServing(true);
    ready_ = true;
    if (!options_.port_file.empty()) {
      RETURN_IF_ERROR(WritePortFile(options_.port_file, grpc_port(), http_port()));
    }
    observe::Log(
        observe::LogLevel::kInfo, "serving",
        {{"grpc_port", absl::StrCat(grpc_port())}, {"http_port", absl::StrCat(http_port())}});
    return absl::OkStatus();
  }

  int grpc_port() const override { return rpc_->port(); }
  int http_port() const override { return http_ == nullptr ? 0 : http_->port(); }
  std::shared_ptr<grpc::Channel> InProcessChannel() override { return rpc_->InProcessChannel(); }

  void Shutdown() override {
    if (std::exchange(shut_down_, true)) return;
    ready_ = false;
    if (rpc_ != nullptr) {
      rpc_->SetServing(false);
      observe::Log(observe::LogLevel::kInfo, "draining", {});
      executor_->Drain(absl::Now() + absl::Seconds(options_.drain_timeout_s));
      // All calls have ended; what remains is to hand out their last events to slow readers.
      rpc_->Shutdown(absl::Now() + kFlushTimeout);
      observe::Log(observe::LogLevel::kInfo, "stopped", {});
    }
    rpc_ = nullptr;
    http_ = nullptr;
    executor_ = nullptr;
  }

 private:
  std::string MetricsPage() {
    if (const auto memory = model::MemoryOf(device_); memory.ok()) {
      metrics_.SetDeviceMemory(model::Name(device_), static_cast<double>(memory->used_bytes),
                               static_cast<double>(memory->total_bytes));
    }
    return metrics_.Serialize();
  }

  // Tells metrics and log what runs.
  void Describe() {
    const kernels::GemmReport gemm = kernels::CheckGemm(pool_);
    metrics_.SetBuildInfo(kVersion, gemm.implementation, pool_.threads());
    observe::Log(gemm.row_invariant ? observe::LogLevel::kInfo : observe::LogLevel::kWarning,
                 "compute",
                 {{"version", kVersion},
                  {"gemm", gemm.implementation},
                  {"gflops", absl::StrCat(gemm.gflops)},
                  {"row_invariant", gemm.row_invariant ? "true" : "false"},
                  {"threads", absl::StrCat(pool_.threads())}});
    observe::LogFields device = {{"device", model::Name(device_)}};
    if (const auto memory = model::MemoryOf(device_); memory.ok()) {
      device.emplace_back("name", model::Describe(device_));
      device.emplace_back("used_bytes", absl::StrCat(memory->used_bytes));
      device.emplace_back("total_bytes", absl::StrCat(memory->total_bytes));
    }
    observe::Log(observe::LogLevel::kInfo, "device", device);
    for (const auto& served : repository_->models()) {
      const model::Weights& weights = served->model->weights();
      metrics_.SetModelInfo(served->name, served->version, weights.digest(), served->load_seconds,
                            static_cast<double>(weights.stored_bytes()));
      observe::LogFields fields = {
          {"model", absl::StrCat(served->name, "@", served->version)},
          {"family", std::string(model::Name(served->model->config().family))},
          {"parameters", absl::StrCat(weights.parameters())},
          {"dtype", weights.stored_dtype()},
          {"digest", weights.digest()},
          {"device", model::Name(served->model->device())},
          {"load_s", absl::StrCat(served->load_seconds)}};
      if (served->tokenizer == nullptr)
        fields.emplace_back("token_ids_only", served->tokenizer_note);
      observe::Log(observe::LogLevel::kInfo, "model", fields);
    }
  }

  const Options options_;
  model::Device device_;
  ThreadPool pool_;
  observe::Metrics metrics_;
  serving::MemoryBudget budget_;
  const serving::Completion completion_;
  std::atomic<bool> ready_{false};
  bool shut_down_ = false;
  std::unique_ptr<const serving::ModelRepository> repository_;
  std::unique_ptr<serving::Admission> admission_;
  std::unique_ptr<serving::Executor> executor_;
  std::unique_ptr<gateway::HttpServer> http_;
  std::unique_ptr<rpc::RpcServer> rpc_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Options& options) {
  observe::SetLogLevel(ToLogLevel(options.log_level));
  auto server = std::make_unique<ServerImpl>(options);
  RETURN_IF_ERROR(server->Start());
  return server;
}

}  // namespace mambascope
