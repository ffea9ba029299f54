#pragma once

#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/base/timeline.h"

namespace mambascope::observe {

// All metrics of the process, named mambascope_*. Labels are bounded: `model` is a resolved name or
// empty, `method` an RPC or an explanation method of ours, `code` a gRPC status code's name.
// Threads: every call from any thread.
class Metrics {
 public:
  Metrics();
  ~Metrics();

  // Exactly one for each call that arrived, whatever its end. `model` is empty if it was not found.
  void CallEnded(absl::string_view model, absl::string_view rpc, absl::string_view code,
                 const Timeline& timeline);
  // `estimated_seconds`: what its time was thought to be; 0 if it was not.
  void ExplanationEnded(absl::string_view model, absl::string_view method, absl::string_view code,
                        absl::Duration compute, double estimated_seconds);
  // One forward pass of `sequences` pieces with `prompt_tokens` + `steps` tokens.
  void ForwardPass(absl::string_view model, int sequences, int prompt_tokens, int steps);
  void TokenGenerated(absl::string_view model);
  void NonFiniteResult(absl::string_view model);
  void EventWritten(absl::Duration waited, size_t bytes);

  // Gauges count by what they hold, so that they cannot drift from it.
  enum class Gauge { kCallsInFlight, kQueueDepth, kRunningSequences, kRunningExplanations, kCount };
  class Held {
   public:
    Held() = default;
    Held(Held&& other) noexcept;
    Held& operator=(Held&& other) noexcept;
    ~Held();

   private:
    friend class Metrics;
    Held(Metrics* metrics, Gauge gauge) : metrics_(metrics), gauge_(gauge) {}
    Metrics* metrics_ = nullptr;
    Gauge gauge_ = Gauge::kCount;
  };
  // Raises the gauge for the life of what it returns. The Metrics must outlive it.
  Held Hold(Gauge gauge);

  // Facts that do not change: build, GEMM in use, threads.
  void SetBuildInfo(const std::string& version, const std::string& gemm, int threads);
  void SetModelInfo(const std::string& model, const std::string& version, const std::string& digest,
                    double load_seconds, double weight_bytes);
  // Of the device that models run on, if it has memory of its own; `device` is ours ("cuda:0").
  void SetDeviceMemory(const std::string& device, double used_bytes, double total_bytes);

  // The text exposition format.
  std::string Serialize() const;

 private:
  struct Families;
  void Move(Gauge gauge, double by);

  std::unique_ptr<Families> families_;
};

}  // namespace mambascope::observe
