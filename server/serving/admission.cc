#include "server/serving/admission.h"

#include <algorithm>
#include <cctype>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/status.h"
#include "server/explain/aggregation.h"
#include "server/explain/delivery.h"
#include "server/explain/faithfulness.h"
#include "server/explain/gradient_walk.h"
#include "server/explain/registry.h"
#include "server/explain/violations.h"
#include "server/model/stream_walk.h"
#include "server/serving/classification.h"
#include "server/serving/errors.h"
#include "server/serving/explanation_run.h"
#include "server/serving/input.h"
#include "server/serving/target.h"

namespace mambascope::serving {
namespace {

using explain::Violations;

constexpr int kMaxExplanations = 16;
constexpr int kMaxLabels = 16;
constexpr int64_t kMostSlices = 1 << 24;  // days of work
constexpr int kMaxStops = 8;
constexpr int kMaxTopLogprobs = 64;
constexpr int32_t kDefaultChunkBytes = 256 << 10;

bool IsPrintable(const std::string& text) {
  return std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return c >= 0x20 && c < 0x7f; });
}

void CheckSampling(const v1::Generation& generation, int32_t max_tokens, Violations& violations) {
  if (generation.has_max_tokens() &&
      (generation.max_tokens() < 1 || generation.max_tokens() > max_tokens)) {
    violations.Add("generation.max_tokens",
                   absl::StrCat(generation.max_tokens(), " is outside 1 to ", max_tokens));
  }
  // Written so that NaN fails too.
  if (!(generation.temperature() >= 0 && generation.temperature() <= 100)) {
    violations.Add("generation.temperature",
                   absl::StrCat(generation.temperature(), " is outside 0 to 100"));
  }
  if (generation.has_top_p() && !(generation.top_p() > 0 && generation.top_p() <= 1)) {
    violations.Add("generation.top_p", absl::StrCat(generation.top_p(), " is outside (0, 1]"));
  }
  if (generation.top_k() < 0) {
    violations.Add("generation.top_k",
                   absl::StrCat(generation.top_k(), " is negative; 0 means all"));
  }
  if (generation.top_logprobs() < 0 || generation.top_logprobs() > kMaxTopLogprobs) {
    violations.Add("generation.top_logprobs",
                   absl::StrCat(generation.top_logprobs(), " is outside 0 to ", kMaxTopLogprobs));
  }
}

// Options that would be ignored are refused: silence would look like consent.
void CheckTask(const v1::Generation& generation, const ServedModel& model, Violations& violations) {
  if (model.model->config().task == model::Task::kNextToken) return;
  v1::Generation others = generation;
  others.clear_top_logprobs();
  others.clear_return_logits();
  if (others.ByteSizeLong() > 0) {
    violations.Add("generation", absl::StrCat("model '", model.name,
                                              "' answers with classes: only top_logprobs and "
                                              "return_logits mean something"));
  }
}

void CheckStops(const v1::Generation& generation, const ServedModel& model,
                Violations& violations) {
  if (generation.stop_size() > kMaxStops) {
    violations.Add("generation.stop",
                   absl::StrCat(generation.stop_size(), " strings exceed the limit ", kMaxStops));
  }
  if (generation.stop_size() > 0 && model.tokenizer == nullptr) {
    violations.Add("generation.stop",
                   absl::StrCat("model '", model.name, "' has no text: ", model.tokenizer_note));
  }
  // Not beyond the limit: a request may hold millions of empty strings.
  for (int i = 0; i < std::min(generation.stop_size(), kMaxStops); ++i) {
    const size_t bytes = generation.stop(i).size();
    if (bytes < 1 || bytes > 256) {
      violations.Add(absl::StrCat("generation.stop[", i, "]"),
                     absl::StrCat(bytes, " bytes are outside 1 to 256"));
    }
  }
}

void CheckLabels(const v1::PredictRequest& request, Violations& violations) {
  if (request.labels_size() > kMaxLabels) {
    violations.Add("labels", absl::StrCat(request.labels_size(), " exceed the limit ", kMaxLabels));
  }
  int looked_at = 0;
  for (const auto& [name, value] : request.labels()) {
    if (++looked_at > kMaxLabels) break;
    if (name.empty() || name.size() > 64 || value.size() > 256) {
      violations.Add("labels",
                     absl::StrCat("a name of ", name.size(), " and a value of ", value.size(),
                                  " bytes exceed the limits 1 to 64 and 256"));
    }
  }
}

void CheckEnvelope(const v1::PredictRequest& request, Violations& violations) {
  if (request.request_id().size() > 128 || !IsPrintable(request.request_id())) {
    violations.Add("request_id", "more than 128 characters, or not printable ASCII");
  }
  if (request.explanations_size() > kMaxExplanations) {
    violations.Add("explanations", absl::StrCat(request.explanations_size(), " exceed the limit ",
                                                kMaxExplanations));
  }
  CheckLabels(request, violations);
  explain::CheckDelivery(request.delivery(), violations);
}

// ---- explanations ----

void CheckId(const std::string& id, const std::string& field, std::set<std::string>& seen,
             Violations& violations) {
  const bool plain = std::all_of(id.begin(), id.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '_' || c == '.' || c == '-';
  });
  if (!plain || id.size() > 64) {
    violations.Add(field, "more than 64 characters, or others than letters, digits, '_', '.', '-'");
  } else if (!seen.insert(id).second) {
    violations.Add(field,
                   absl::StrCat("'", id, "' is the id of an earlier explanation; ids must differ"));
  }
}

// Of an explanation that is planned: its main tensor tells whether it can be aggregated.
void AddAggregation(const v1::PredictRequest& request, const ServedModel& model,
                    const std::string& field, PlannedExplanation& planned, Violations& violations) {
  if (!planned.options.has_aggregation()) return;
  if (!explain::OneScorePerToken(planned.plan, planned.tokens)) {
    violations.Add(field, absl::StrCat("is of one score for each token, which ",
                                       planned.method->name(), " with these options is not"));
    return;
  }
  if (!planned.options.aggregation().pixels()) return;
  const int64_t size = model.model->config().vision.image_size;
  planned.plan.tensors.push_back(
      explain::MakeTensorInfo("pixels", {{"rows", size, {}}, {"columns", size, {}}},
                              explain::FloatTypeOf(request.delivery())));
  planned.plan.memory_bytes += size * size * static_cast<int64_t>(sizeof(float));
}

// kUnimplemented for the first method that does not explain this kind of model.
absl::Status CheckSupport(const v1::PredictRequest& request, const ServedModel& model) {
  const model::ModelConfig& config = model.model->config();
  for (int i = 0; i < std::min(request.explanations_size(), kMaxExplanations); ++i) {
    const absl::string_view name = explain::MethodName(request.explanations(i));
    const explain::Method* method = explain::FindMethod(name);
    if (method == nullptr || method->Supports(config)) continue;
    std::vector<absl::string_view> supported;
    for (const explain::Method* other : explain::AllMethods()) {
      if (other->Supports(config)) supported.push_back(other->name());
    }
    return absl::UnimplementedError(absl::StrCat(
        "explanations[", i, "]: ", name, " does not explain model '", model.name, "' (",
        model::Name(config.family), config.mean_pooled() ? ", mean pooling" : "", ") yet; ",
        supported.empty() ? std::string("no method does")
                          : absl::StrCat("there are: ", absl::StrJoin(supported, ", "))));
  }
  return absl::OkStatus();
}

// Plans the method and, after it, the faithfulness check of its scores.
void MakePlan(PlannedExplanation& explanation, const model::ModelConfig& config, v1::DataType dtype,
              const std::string& field, Violations& violations) {
  const int64_t tokens = explanation.tokens;
  explain::Plan& plan = explanation.plan;
  plan = explanation.method->MakePlan(explanation.options, config, tokens, dtype);
  explanation.method_slices = plan.slices;
  if (!explanation.options.has_faithfulness()) return;
  explain::CheckIsScores(plan.tensors.at(0), tokens, field + ".faithfulness", violations);
  if (!explain::CheckOrders(explanation.options, tokens, field + ".faithfulness", violations))
    return;
  explain::Plan check = explain::PlanFaithfulness(explanation.options, config, tokens, dtype);
  for (v1::TensorInfo& tensor : check.tensors) plan.tensors.push_back(std::move(tensor));
  plan.slices += check.slices;
  // The method's memory is free again when its check begins.
  plan.memory_bytes = std::max(plan.memory_bytes, check.memory_bytes) +
                      tokens * static_cast<int64_t>(sizeof(float));
  plan.work += check.work;
}

std::vector<PlannedExplanation> PlanExplanations(const v1::PredictRequest& request, int64_t tokens,
                                                 const ServedModel& model, Violations& violations) {
  std::vector<PlannedExplanation> planned;
  std::set<std::string> seen;
  const int count = std::min(request.explanations_size(), kMaxExplanations);
  for (int i = 0; i < count; ++i) {
    const std::string field = absl::StrCat("explanations[", i, "]");
    PlannedExplanation& explanation = planned.emplace_back();
    explanation.options = request.explanations(i);
    const absl::string_view name = explain::MethodName(explanation.options);
    explanation.method = explain::FindMethod(name);
    if (explanation.method == nullptr) {
      violations.Add(
          field + ".method",
          absl::StrCat("none given; there are: ",
                       absl::StrJoin(explain::AllMethods(), ", ",
                                     [](std::string* out, const explain::Method* method) {
                                       absl::StrAppend(out, method->name());
                                     })));
      continue;
    }
    if (explanation.options.id().empty()) explanation.options.set_id(std::string(name));
    CheckId(explanation.options.id(), field + ".id", seen, violations);
    if (tokens == 0) continue;  // the input's own violation says enough
    ResolveTarget(request, request.explanations(i).target(), tokens, model, field + ".target",
                  explanation, violations);
    explanation.method->Validate(explanation.options, model.model->config(), explanation.tokens,
                                 absl::StrCat(field, ".", name), violations);
    if (explanation.options.has_faithfulness()) {
      explain::ValidateFaithfulness(explanation.options, model.model->config(),
                                    field + ".faithfulness", violations);
    }
    explain::CheckAggregation(explanation.options.aggregation(),
                              request.has_text() ? &request.text() : nullptr, model.model->config(),
                              field + ".aggregation", violations);
  }
  if (!violations.empty()) return {};
  const v1::DataType dtype = explain::FloatTypeOf(request.delivery());
  for (size_t i = 0; i < planned.size(); ++i) {
    const std::string field = absl::StrCat("explanations[", i, "]");
    MakePlan(planned[i], model.model->config(), dtype, field, violations);
    AddAggregation(request, model, field + ".aggregation", planned[i], violations);
    explain::ApplyDelivery(request.delivery(), &planned[i].plan);
    if (planned[i].plan.slices > kMostSlices) {
      violations.Add(
          field, absl::StrCat("would take ", planned[i].plan.slices, " slices of work, more than ",
                              kMostSlices, "; ask for fewer rows, steps or tokens"));
    }
  }
  return planned;
}

// Explanations of one call run one after the other, so the largest counts, on top of the trace and
// of what may wait for a slow reader: a full stream and the layer that overfilled it.
v1::CostEstimate Estimate(const std::vector<PlannedExplanation>& explanations, int64_t tokens,
                          const model::ModelConfig& config, int32_t stream_stride,
                          int64_t stream_bytes) {
  v1::CostEstimate estimate;
  if (explanations.empty()) return estimate;
  int64_t largest = 0, largest_slab = 0, kept = 0;
  for (const PlannedExplanation& explanation : explanations) {
    for (const v1::TensorInfo& tensor : explanation.plan.tensors) {
      estimate.set_result_bytes(estimate.result_bytes() + tensor.total_bytes());
      const bool by_layer = tensor.axes_size() > 0 && tensor.axes(0).name() == "layers";
      const int64_t slabs = by_layer ? std::max<int64_t>(tensor.axes(0).size(), 1) : 1;
      largest_slab = std::max(largest_slab, tensor.total_bytes() / slabs);
    }
    int64_t memory = explanation.plan.memory_bytes;
    // A neighbour's longer trace may have fewer streams than this plan counted on.
    if (explanation.plan.streams &&
        stream_stride > model::SequenceTrace::StreamStride(config, explanation.tokens)) {
      memory += model::StreamWalk::MemoryBytes(config, explanation.tokens, stream_stride);
    }
    largest = std::max(largest, memory);
    kept += ExplanationRun::KeptBytes(explanation.tokens);
  }
  largest += kept;
  if (stream_stride > 0) largest += explain::GradientResult::Bytes(config, tokens);  // kept on
  estimate.set_memory_bytes(largest + model::SequenceTrace::Bytes(config, tokens, stream_stride) +
                            std::min(estimate.result_bytes(), stream_bytes + largest_slab));
  return estimate;
}

double EstimateSeconds(const v1::Generation& generation, int64_t tokens, const ServedModel& model,
                       const std::vector<PlannedExplanation>& explanations) {
  const int32_t steps = generation.has_max_tokens() ? generation.max_tokens() : 1;
  double seconds =
      static_cast<double>(tokens) * model.speed.forward_token + steps * model.speed.step;
  for (const PlannedExplanation& explanation : explanations) {
    seconds += model.speed.Seconds(explanation.plan.work);
  }
  return seconds;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Call>> Admission::Admit(v1::PredictRequest request,
                                                       absl::Time arrival, absl::Time deadline,
                                                       std::string request_id,
                                                       std::shared_ptr<ResultStream> results,
                                                       std::string* model_name) const {
  ASSIGN_OR_RETURN(std::shared_ptr<const ServedModel> model, repository_->Find(request.model()));
  *model_name = model->name;

  Violations violations;
  CheckEnvelope(request, violations);
  CheckSampling(request.generation(), limits_.max_tokens, violations);
  CheckTask(request.generation(), *model, violations);
  CheckStops(request.generation(), *model, violations);
  const InputLimits limits{limits_.max_input_tokens, limits_.max_text_bytes};
  RETURN_IF_ERROR(CheckSupport(request, *model));
  ASSIGN_OR_RETURN(MemoryBudget::Reservation room,
                   ReserveInput(ReadingBytes(request, *model, limits)));
  const absl::Time begin = clock_->Now();
  Input input = ReadInput(request, *model, limits, violations);
  const absl::Duration tokenize = clock_->Now() - begin;
  room = {};

  auto call = std::make_unique<Call>();
  call->explanations = PlanExplanations(request, input.length, *model, violations);
  RETURN_IF_ERROR(violations.ToStatus());

  const model::ModelConfig& config = model->model->config();
  for (const PlannedExplanation& explanation : call->explanations) {
    call->traced_tokens = std::max(call->traced_tokens, explanation.tokens);
  }
  for (const PlannedExplanation& explanation : call->explanations) {
    if (!explanation.plan.streams) continue;
    call->stream_stride = model::SequenceTrace::StreamStride(config, call->traced_tokens);
  }
  v1::CostEstimate estimate = Estimate(call->explanations, call->traced_tokens, config,
                                       call->stream_stride, limits_.stream_bytes);
  estimate.set_seconds(
      EstimateSeconds(request.generation(), input.length, *model, call->explanations));
  if (estimate.memory_bytes() > budget_->total()) {
    return absl::InvalidArgumentError(
        absl::StrCat("explanations: an estimate of ", estimate.memory_bytes(),
                     " bytes exceeds the server's budget of ", budget_->total(),
                     "; ask for rows TARGET, fewer layers or channels, or a shorter input"));
  }
  std::optional<MemoryBudget::Reservation> memory = budget_->Reserve(estimate.memory_bytes());
  if (!memory.has_value()) {
    return WithRetryInfo(absl::ResourceExhaustedError(absl::StrCat(
                             "explanations: ", estimate.memory_bytes(), " bytes are needed and ",
                             budget_->free(), " of ", budget_->total(), " are free")),
                         absl::Seconds(1));
  }
  // An image waits in the queue at its full size, which a few encoded bytes can ask for.
  ASSIGN_OR_RETURN(call->input_memory, ReserveInput(input.image.size() * sizeof(float)));

  call->request_id = std::move(request_id);
  call->model = std::move(model);
  call->memory = *std::move(memory);
  call->in_flight = metrics_->Hold(observe::Metrics::Gauge::kCallsInFlight);
  call->results = std::move(results);
  call->timeline.arrival = arrival;
  call->timeline.tokenize = tokenize;
  call->deadline =
      std::min(deadline == absl::InfiniteFuture() ? arrival + limits_.default_deadline : deadline,
               arrival + limits_.max_deadline);
  call->max_chunk_bytes = request.delivery().max_chunk_bytes() == 0
                              ? kDefaultChunkBytes
                              : request.delivery().max_chunk_bytes();
  v1::Started& started = call->started;
  started.set_model(call->model->name);
  started.set_version(call->model->version);
  started.set_digest(call->model->model->weights().digest());
  call->length = input.length;
  call->image = std::move(input.image);
  for (v1::Token& token : input.tokens) {
    call->tokens.push_back(token.id());
    call->spans.push_back(explain::SpanOf(token));
    *started.add_tokens() = std::move(token);
  }
  if (request.generation().return_logits()) {
    *started.add_tensors() = LogitsInfo(call->model->model->config());
  }
  request.clear_image();  // it was read
  *started.mutable_estimate() = estimate;
  call->request = std::move(request);
  return call;
}

// Tokenising and decoding run on gRPC's threads and take memory for every byte of text and every
// pixel: their budget bounds both.
absl::StatusOr<MemoryBudget::Reservation> Admission::ReserveInput(int64_t bytes) const {
  if (bytes > inputs_.total()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "input: it takes ", bytes, " bytes of memory, more than the limit ", inputs_.total()));
  }
  std::optional<MemoryBudget::Reservation> room = inputs_.Reserve(bytes);
  if (room.has_value()) return *std::move(room);
  return WithRetryInfo(
      absl::ResourceExhaustedError("input: other large inputs hold the memory at the moment"),
      absl::Seconds(1));
}

absl::StatusOr<v1::TokenizeResponse> Admission::Tokenize(const v1::TokenizeRequest& request,
                                                         std::string* model_name) const {
  ASSIGN_OR_RETURN(std::shared_ptr<const ServedModel> model, repository_->Find(request.model()));
  *model_name = model->name;
  Violations violations;
  const InputLimits limits{std::numeric_limits<int32_t>::max(),  // bounded by its bytes
                           limits_.max_text_bytes};
  v1::TokenizeResponse response;
  if (request.text().empty() && model->tokenizer != nullptr) return response;
  ASSIGN_OR_RETURN(const MemoryBudget::Reservation room,
                   ReserveInput(TokenizingBytes(request.text().size(), limits)));
  for (v1::Token& token : ReadText(request.text(), *model, limits, violations)) {
    *response.add_tokens() = std::move(token);
  }
  RETURN_IF_ERROR(violations.ToStatus());
  return response;
}

}  // namespace mambascope::serving
