#include "server/observe/metrics.h"

#include <array>
#include <map>
#include <utility>

#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"

namespace mambascope::observe {
namespace {

using Buckets = prometheus::Histogram::BucketBoundaries;

// 0.1 ms (one step of a small model) to 5 minutes (a long map), about three to a decade.
const Buckets kSeconds = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                          0.25,   0.5,     1,      2.5,   5,      10,    30,   60,    120,  300};
const Buckets kRatios = {0.1, 0.25, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 4, 10};
const Buckets kPowersOfTwo = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};

std::string Text(absl::string_view view) { return std::string(view.data(), view.size()); }

constexpr int kGauges = static_cast<int>(Metrics::Gauge::kCount);
constexpr std::array<std::pair<const char*, const char*>, kGauges> kGaugeNames = {{
    {"mambascope_calls_in_flight", "Calls that have arrived and not ended."},
    {"mambascope_queue_depth", "Calls waiting for their first forward pass."},
    {"mambascope_running_sequences", "Sequences in prefill or decoding."},
    {"mambascope_running_explanations", "Calls with explanations under way."},
}};

}  // namespace

struct Metrics::Families {
  prometheus::Registry registry;
  prometheus::Family<prometheus::Histogram>& request =
      prometheus::BuildHistogram()
          .Name("mambascope_request_duration_seconds")
          .Help("From the complete request to its end, by model, RPC and status code.")
          .Register(registry);
  prometheus::Family<prometheus::Histogram>& phase =
      prometheus::BuildHistogram()
          .Name("mambascope_phase_duration_seconds")
          .Help("Time of ended Predict calls in tokenize, queue, prefill, decode and explain.")
          .Register(registry);
  prometheus::Family<prometheus::Histogram>& explain =
      prometheus::BuildHistogram()
          .Name("mambascope_explain_duration_seconds")
          .Help("Computing time of one explanation, by model, method and status code.")
          .Register(registry);
  prometheus::Family<prometheus::Histogram>& estimate =
      prometheus::BuildHistogram()
          .Name("mambascope_explain_estimate_ratio")
          .Help("Computing time of one explanation by its estimate, by model and method.")
          .Register(registry);
  prometheus::Histogram& write = prometheus::BuildHistogram()
                                     .Name("mambascope_write_duration_seconds")
                                     .Help("From handing an event to gRPC until it was written.")
                                     .Register(registry)
                                     .Add({}, kSeconds);
  prometheus::Counter& written_bytes = prometheus::BuildCounter()
                                           .Name("mambascope_written_bytes_total")
                                           .Help("Bytes of events written.")
                                           .Register(registry)
                                           .Add({});
  prometheus::Family<prometheus::Histogram>& batch_sequences =
      prometheus::BuildHistogram()
          .Name("mambascope_batch_sequences")
          .Help("Sequences in one forward pass.")
          .Register(registry);
  prometheus::Family<prometheus::Histogram>& batch_tokens = prometheus::BuildHistogram()
                                                                .Name("mambascope_batch_tokens")
                                                                .Help("Tokens in one forward pass.")
                                                                .Register(registry);
  prometheus::Family<prometheus::Counter>& prompt_tokens =
      prometheus::BuildCounter()
          .Name("mambascope_prompt_tokens_total")
          .Help("Prompt tokens computed.")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& steps =
      prometheus::BuildCounter()
          .Name("mambascope_decode_steps_total")
          .Help("Decoding steps computed, one for each sequence in a pass.")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& generated =
      prometheus::BuildCounter()
          .Name("mambascope_generated_tokens_total")
          .Help("Tokens generated.")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& nonfinite =
      prometheus::BuildCounter()
          .Name("mambascope_nonfinite_results_total")
          .Help("Calls ended because a result was NaN or infinite.")
          .Register(registry);
  prometheus::Family<prometheus::Gauge>& build =
      prometheus::BuildGauge()
          .Name("mambascope_build_info")
          .Help("1; version, GEMM in use and computing threads as labels.")
          .Register(registry);
  prometheus::Family<prometheus::Gauge>& model = prometheus::BuildGauge()
                                                     .Name("mambascope_model_info")
                                                     .Help("1; version and digest as labels.")
                                                     .Register(registry);
  prometheus::Family<prometheus::Gauge>& load = prometheus::BuildGauge()
                                                    .Name("mambascope_model_load_seconds")
                                                    .Help("Time the model took to load.")
                                                    .Register(registry);
  prometheus::Family<prometheus::Gauge>& weights = prometheus::BuildGauge()
                                                       .Name("mambascope_model_weight_bytes")
                                                       .Help("Size of the model's stored weights.")
                                                       .Register(registry);
  prometheus::Family<prometheus::Gauge>& device_used =
      prometheus::BuildGauge()
          .Name("mambascope_device_memory_used_bytes")
          .Help("Memory of the device in use, by all processes.")
          .Register(registry);
  prometheus::Family<prometheus::Gauge>& device_total =
      prometheus::BuildGauge()
          .Name("mambascope_device_memory_total_bytes")
          .Help("Memory of the device.")
          .Register(registry);
  std::array<prometheus::Gauge*, kGauges> gauges{};

  Families() {
    for (int i = 0; i < kGauges; ++i) {
      gauges[i] = &prometheus::BuildGauge()
                       .Name(kGaugeNames[i].first)
                       .Help(kGaugeNames[i].second)
                       .Register(registry)
                       .Add({});
    }
  }
};

Metrics::Metrics() : families_(std::make_unique<Families>()) {}
Metrics::~Metrics() = default;

void Metrics::CallEnded(absl::string_view model, absl::string_view rpc, absl::string_view code,
                        const Timeline& timeline) {
  families_->request
      .Add({{"model", Text(model)}, {"method", Text(rpc)}, {"code", Text(code)}}, kSeconds)
      .Observe(absl::ToDoubleSeconds(timeline.total()));
  const std::pair<const char*, absl::Duration> phases[] = {{"tokenize", timeline.tokenize},
                                                           {"queue", timeline.queue()},
                                                           {"prefill", timeline.prefill},
                                                           {"decode", timeline.decode},
                                                           {"explain", timeline.explain}};
  for (const auto& [phase, spent] : phases) {
    if (spent == absl::ZeroDuration()) continue;  // the call never came there
    families_->phase.Add({{"model", Text(model)}, {"phase", phase}}, kSeconds)
        .Observe(absl::ToDoubleSeconds(spent));
  }
}

void Metrics::ExplanationEnded(absl::string_view model, absl::string_view method,
                               absl::string_view code, absl::Duration compute,
                               double estimated_seconds) {
  families_->explain
      .Add({{"model", Text(model)}, {"method", Text(method)}, {"code", Text(code)}}, kSeconds)
      .Observe(absl::ToDoubleSeconds(compute));
  if (estimated_seconds <= 0 || code != "OK") return;
  families_->estimate.Add({{"model", Text(model)}, {"method", Text(method)}}, kRatios)
      .Observe(absl::ToDoubleSeconds(compute) / estimated_seconds);
}

void Metrics::ForwardPass(absl::string_view model, int sequences, int prompt_tokens, int steps) {
  const prometheus::Labels labels = {{"model", Text(model)}};
  families_->batch_sequences.Add(labels, kPowersOfTwo).Observe(sequences);
  families_->batch_tokens.Add(labels, kPowersOfTwo).Observe(prompt_tokens + steps);
  families_->prompt_tokens.Add(labels).Increment(prompt_tokens);
  families_->steps.Add(labels).Increment(steps);
}

void Metrics::TokenGenerated(absl::string_view model) {
  families_->generated.Add({{"model", Text(model)}}).Increment();
}

void Metrics::NonFiniteResult(absl::string_view model) {
  families_->nonfinite.Add({{"model", Text(model)}}).Increment();
}

void Metrics::EventWritten(absl::Duration waited, size_t bytes) {
  families_->write.Observe(absl::ToDoubleSeconds(waited));
  families_->written_bytes.Increment(static_cast<double>(bytes));
}

void Metrics::Move(Gauge gauge, double by) {
  families_->gauges[static_cast<int>(gauge)]->Increment(by);
}

Metrics::Held Metrics::Hold(Gauge gauge) {
  Move(gauge, 1);
  return Held(this, gauge);
}

Metrics::Held::Held(Held&& other) noexcept
    : metrics_(std::exchange(other.metrics_, nullptr)), gauge_(other.gauge_) {}

Metrics::Held& Metrics::Held::operator=(Held&& other) noexcept {
  std::swap(metrics_, other.metrics_);
  std::swap(gauge_, other.gauge_);
  Held released(std::move(other));
  return *this;
}

Metrics::Held::~Held() {
  if (metrics_ != nullptr) metrics_->Move(gauge_, -1);
}

void Metrics::SetBuildInfo(const std::string& version, const std::string& gemm, int threads) {
  families_->build.Add({{"version", version}, {"gemm", gemm}, {"threads", std::to_string(threads)}})
      .Set(1);
}

void Metrics::SetModelInfo(const std::string& model, const std::string& version,
                           const std::string& digest, double load_seconds, double weight_bytes) {
  families_->model.Add({{"model", model}, {"version", version}, {"digest", digest}}).Set(1);
  const prometheus::Labels labels = {{"model", model}, {"version", version}};
  families_->load.Add(labels).Set(load_seconds);
  families_->weights.Add(labels).Set(weight_bytes);
}

void Metrics::SetDeviceMemory(const std::string& device, double used_bytes, double total_bytes) {
  families_->device_used.Add({{"device", device}}).Set(used_bytes);
  families_->device_total.Add({{"device", device}}).Set(total_bytes);
}

std::string Metrics::Serialize() const {
  return prometheus::TextSerializer().Serialize(families_->registry.Collect());
}

}  // namespace mambascope::observe
