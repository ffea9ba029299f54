// That a plan bounds what its explanation allocates, and not by much more: admission turns requests
// away on its word. Every allocation of this program is counted.
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>

#include "gtest/gtest.h"
#include "server/explain/faithfulness.h"
#include "tests/explain/explained.h"
#include "tests/explain/properties.h"

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

namespace {
std::atomic<int64_t> held{0}, peak{0};

void* Count(void* memory) {
  if (memory != nullptr) {
    const auto size = static_cast<int64_t>(malloc_usable_size(memory));
    const int64_t now = held.fetch_add(size) + size;
    int64_t highest = peak.load();
    while (now > highest && !peak.compare_exchange_weak(highest, now)) {
    }
  }
  return memory;
}
}  // namespace

extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* memory, size_t size);
void* __libc_memalign(size_t alignment, size_t size);
void __libc_free(void* memory);

void* malloc(size_t size) { return Count(__libc_malloc(size)); }
void* calloc(size_t count, size_t size) { return Count(__libc_calloc(count, size)); }
void* aligned_alloc(size_t alignment, size_t size) {
  return Count(__libc_memalign(alignment, size));
}
int posix_memalign(void** memory, size_t alignment, size_t size) {
  *memory = Count(__libc_memalign(alignment, size));
  return *memory == nullptr ? ENOMEM : 0;
}
void free(void* memory) {
  if (memory != nullptr) held.fetch_sub(static_cast<int64_t>(malloc_usable_size(memory)));
  __libc_free(memory);
}
void* realloc(void* memory, size_t size) {
  if (memory != nullptr) held.fetch_sub(static_cast<int64_t>(malloc_usable_size(memory)));
  return Count(__libc_realloc(memory, size));
}
}

namespace mambascope {
namespace {

class NullSink : public explain::EventSink {
 public:
  void Send(v1::PredictEvent) override {}
};

// Bytes at the highest point, beyond what was there before.
int64_t PeakOf(testing::Traced& traced, const v1::Explanation& explanation) {
  const auto* method = explain::FindMethod(explain::MethodName(explanation));
  const auto plan = method->MakePlan(explanation, traced.model().config(), traced.trace.tokens,
                                     v1::DATA_TYPE_FP32);
  NullSink sink;
  explain::TensorWriter writer("id", plan.tensors, 1024, &sink);
  const int64_t before = held.load();
  peak.store(before);
  const int64_t position =
      explain::PositionOf(explanation, traced.model().config(), traced.trace.tokens);
  const auto explaining = method->Start(explanation, traced.SubjectAt(position));
  for (int32_t slice = 0; slice < plan.slices; ++slice) {
    EXPECT_TRUE(explaining->Step(writer).ok());
  }
  return peak.load() - before;
}

void AddContributions(std::vector<v1::Explanation>& all) {
  for (const auto norm :
       {v1::Latim::NORM_L2, v1::Latim::NORM_ALTI_LOGIT, v1::Latim::NORM_ALTI_ROLLOUT}) {
    for (const auto rows : {v1::ROWS_ALL, v1::ROWS_TARGET}) {
      auto* latim = all.emplace_back().mutable_latim();
      latim->set_norm(norm);
      latim->set_rows(norm == v1::Latim::NORM_ALTI_LOGIT ? v1::ROWS_UNSPECIFIED : rows);
    }
  }
  all.emplace_back().mutable_logit_lens();
  all.emplace_back().mutable_edge_lens()->set_top(50);
}

// The same of a faithfulness check alone.
int64_t PeakOfCheck(testing::Traced& traced, const v1::Explanation& explanation) {
  const auto plan = explain::PlanFaithfulness(explanation, traced.model().config(),
                                              traced.trace.tokens, v1::DATA_TYPE_FP32);
  std::vector<float> scores(traced.trace.tokens);
  for (size_t j = 0; j < scores.size(); ++j) scores[j] = static_cast<float>(j * 7 % 11);
  NullSink sink;
  explain::TensorWriter writer("id", plan.tensors, 1024, &sink);
  const int64_t before = held.load();
  peak.store(before);
  explain::FaithfulnessRun run(explanation, traced.SubjectAt(traced.trace.tokens - 1), scores);
  for (int32_t slice = 0; slice < plan.slices; ++slice) EXPECT_TRUE(run.Step(writer).ok());
  run.report();
  return peak.load() - before;
}

// Of all methods here; those of CODE are for models that read one row, and the inner parts name one
// of two scans.
std::vector<v1::Explanation> Explanations(const model::ModelConfig& config) {
  const bool two = config.directions() == 2;
  std::vector<v1::Explanation> all;
  for (const auto how :
       {v1::REDUCTION_MEAN, v1::REDUCTION_ABS_MEAN, v1::REDUCTION_TOP_K, v1::REDUCTION_CHANNELS}) {
    const auto add_channels = [&](auto* options) {
      options->set_reduction(how);
      for (int c = 0; how == v1::REDUCTION_CHANNELS && c < 20; ++c) options->add_channels(4 * c);
    };
    for (const auto rows : {v1::ROWS_ALL, v1::ROWS_TARGET}) {
      auto* hidden = all.emplace_back().mutable_hidden_attention();
      add_channels(hidden);
      hidden->set_rows(rows);
      auto* mixer = all.emplace_back().mutable_hidden_attention();
      *mixer = all[all.size() - 2].hidden_attention();
      mixer->set_scope(v1::HiddenAttention::SCOPE_MIXER);
      for (const auto normalization : {v1::AttentionRollout::NORMALIZATION_PAPER,
                                       v1::AttentionRollout::NORMALIZATION_ROW_SUM}) {
        auto* rollout = all.emplace_back().mutable_attention_rollout();
        add_channels(rollout);
        rollout->set_rows(rows);
        rollout->set_normalization(normalization);
      }
    }
    add_channels(all.emplace_back().mutable_raw_attention());
  }
  if (!config.mean_pooled()) {
    all.emplace_back().mutable_raw_attention()->set_variant(v1::VARIANT_CODE);
    all.emplace_back().mutable_attention_rollout()->set_variant(v1::VARIANT_CODE_QUIRKS);
  }
  for (int kind = v1::Parameters::KIND_DELTA; kind <= v1::Parameters::KIND_STATE; ++kind) {
    auto* parameters = all.emplace_back().mutable_parameters();
    parameters->add_kinds(static_cast<v1::Parameters::Kind>(kind));
    if (two) parameters->set_direction(v1::HiddenAttention::DIRECTION_BACKWARD);
  }
  for (const auto part : {v1::PART_STATE, v1::PART_H, v1::PART_Q, v1::PART_K}) {
    auto* hidden = all.emplace_back().mutable_hidden_attention();
    hidden->set_part(part);
    if (two) hidden->set_direction(v1::HiddenAttention::DIRECTION_BACKWARD);
    for (int c = 0; c < 20; ++c) hidden->add_channels(4 * c);
  }
  if (config.task == model::Task::kNextToken) AddContributions(all);
  all.emplace_back().mutable_occlusion();
  return all;
}

// Because each thread keeps the packing buffers of its first large product for good, and on a busy
// machine a thread may come to its first one late.
template <class Measure>
int64_t LeastOfThree(const Measure& measure) {
  const int64_t first = measure(), second = measure();
  return std::min({first, second, measure()});
}

void ExpectChecksBound(testing::Traced& traced) {
  for (const auto removal : {v1::Faithfulness::REMOVAL_ZERO, v1::Faithfulness::REMOVAL_DELETE}) {
    for (const int draws : {0, 10}) {
      v1::Explanation explanation;
      explanation.mutable_faithfulness()->set_removal(removal);
      explanation.mutable_faithfulness()->set_random_draws(draws);
      SCOPED_TRACE(explanation.ShortDebugString());
      const int64_t planned = explain::PlanFaithfulness(explanation, traced.model().config(),
                                                        traced.trace.tokens, v1::DATA_TYPE_FP32)
                                  .memory_bytes;
      const int64_t allocated = LeastOfThree([&] { return PeakOfCheck(traced, explanation); });
      EXPECT_LE(allocated, planned);
      EXPECT_LE(planned, 2 * allocated + (2 << 20));
      if (std::getenv("PRINT_MEMORY") != nullptr) {
        std::printf("%4ld tokens: %9ld planned %9ld  %s\n", static_cast<long>(traced.trace.tokens),
                    static_cast<long>(allocated), static_cast<long>(planned),
                    explanation.ShortDebugString().c_str());
      }
    }
  }
}

void ExpectPlansBound(const testing::RandomModel& random) {
  const auto model = testing::LoadRandomModel(random);
  const bool image = model->config().directions() == 2;
  for (const int64_t tokens : image ? std::vector<int64_t>{model->config().vision.tokens()}
                                    : std::vector<int64_t>{1, 400}) {
    testing::Traced traced =
        image ? testing::Traced(*model, testing::RandomImage(*model, 1))
              : testing::Traced(*model, testing::RandomTokens(*model, tokens, 1));
    if (model->config().task == model::Task::kNextToken) ExpectChecksBound(traced);
    for (const v1::Explanation& explanation : Explanations(model->config())) {
      SCOPED_TRACE(std::to_string(tokens) + " tokens, " + explanation.ShortDebugString());
      const auto* method = explain::FindMethod(explain::MethodName(explanation));
      const int64_t planned =
          method->MakePlan(explanation, model->config(), tokens, v1::DATA_TYPE_FP32).memory_bytes;
      const int64_t allocated = LeastOfThree([&] { return PeakOf(traced, explanation); });
      EXPECT_LE(allocated, planned);
      // Twice, and what scratch of threads that are not there would take.
      EXPECT_LE(planned, 2 * allocated + (2 << 20));
      if (std::getenv("PRINT_MEMORY") != nullptr) {
        std::printf("%4ld tokens: %9ld planned %9ld  %s\n", static_cast<long>(tokens),
                    static_cast<long>(allocated), static_cast<long>(planned),
                    explanation.ShortDebugString().c_str());
      }
    }
  }
}

TEST(Memory, PlansBoundWhatIsAllocated) {
  testing::RandomModel random;
  random.d_model = 64;
  random.d_inner = 384;
  random.d_state = 16;
  random.layers = 2;
  ExpectPlansBound(random);
}

TEST(Memory, PlansBoundWhatHeadsAllocate) {
  testing::RandomModel random;
  random.family = "mamba2";
  random.heads = 96;
  random.head_dim = 4;
  random.d_model = 64;
  random.d_inner = 384;
  random.d_state = 16;
  random.layers = 2;
  random.groups = 3;
  ExpectPlansBound(random);
}

TEST(Memory, PlansBoundWhatBothScansAllocate) {
  testing::RandomModel random;
  random.family = "vim";
  random.d_model = 64;
  random.d_inner = 384;
  random.d_state = 16;
  random.layers = 1;
  random.classes = 10;
  random.image_size = 76;  // 362 tokens
  ExpectPlansBound(random);
}

TEST(Memory, PlansBoundWhatAMeanOfRowsAllocates) {
  testing::RandomModel random;
  random.d_model = 64;
  random.d_inner = 384;
  random.d_state = 16;
  random.layers = 1;
  random.classes = 10;
  random.pooling = "mean";
  ExpectPlansBound(random);
}

}  // namespace
}  // namespace mambascope

#endif
