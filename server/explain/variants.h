#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "server/base/array.h"
#include "server/explain/method.h"
#include "server/explain/subject.h"
#include "server/explain/variant_schedule.h"
#include "server/model/mamba_model.h"

namespace mambascope::explain {

// How a token is taken out of an input (methods.md, section 8).
struct Removal {
  enum class How {
    kZero,    // its embedding becomes zero; of Vim the token's, position included
    kToken,   // it becomes `token`'s
    kDelete,  // it leaves the sequence; the model's class token never does
  };
  How how = How::kZero;
  int32_t token = -1;
};

// What a model makes of one variant; of several outputs the sums, and whether all are hits.
struct VariantOutcome {
  double value = 0;  // f: logits, less the contrasts'
  double log_probability = 0;
  bool hit = true;  // the target is the most probable still
};

// What is allocated, and what it costs.
struct VariantCost {
  int64_t memory_bytes = 0;
  int64_t slices = 0;
  Work work;
};

// Evaluates a subject's targets for many variants of its input, each given by the positions that
// are removed from it: several variants in one packed forward pass, which of causal models computes
// nothing before a variant's first change (VariantSchedule), slice by slice. Outcomes are, bit for
// bit, those of a pass over the whole variant alone.
//
// Owned and stepped by one thread at a time; borrows the subject's model, input and pool.
class VariantRunner {
 public:
  // Positions ascending and unique, below ReadTokens; where tokens are deleted not the target's,
  // and then the subject has one output. `share`: tests compare with what happens without.
  VariantRunner(const Subject& subject, const Removal& removal,
                std::vector<std::vector<int32_t>> removed, bool share = true);

  int64_t slices() const { return passes_ * slices_of_pass_; }
  // Runs the next slice. kInternal when a variant's numbers are not finite.
  absl::Status Step();
  // Of all variants in the order given, after `slices` steps.
  const std::vector<VariantOutcome>& outcomes() const { return outcomes_; }

  // What variants of these extents cost on the host: `rows` of the input are read, and the logits
  // of `outputs` of its last rows. `starts_known`: else the extents' starts are 0 and may be later
  // ones. `removed`: positions in all.
  static VariantCost CostOf(const model::ModelConfig& config, std::vector<VariantExtent> extents,
                            bool starts_known, int64_t rows, int64_t outputs, int64_t removed);

 private:
  // A variant that has started, or the unchanged input.
  struct Running {
    explicit Running(model::RecurrentState before) : state(std::move(before)) {}
    model::RecurrentState state;
    VariantOutcome sum;      // over the outputs so far
    size_t next_output = 0;  // of the subject's
  };
  // A part of the pass in progress.
  struct Part {
    Running* running = nullptr;
    std::vector<int32_t> logit_rows;
    std::vector<float> logits;
  };

  VariantExtent ExtentOf(const std::vector<int32_t>& removed) const;
  absl::Status Prepare();
  absl::Status BeginPass();
  absl::Status Start(int32_t variant);
  float* WriteRows(const VariantSchedule::Part& part, float* out);
  void WantLogits(const VariantSchedule::Part& part, Part& wanted) const;
  absl::Status EndPass();
  void Add(std::span<const float> logits, Running& running) const;
  void SetOutcomeOfNothing(int32_t variant);

  const Subject subject_;
  const Removal removal_;
  const std::vector<std::vector<int32_t>> removed_;
  const int64_t rows_;  // of the unchanged input
  std::vector<int64_t> length_;
  std::vector<int32_t> variants_;  // of the schedule's: their places in removed_
  std::unique_ptr<VariantSchedule> schedule_;
  PassLimits limits_;
  int64_t passes_ = 0, most_rows_ = 0, slices_of_pass_ = 1;
  std::vector<VariantOutcome> outcomes_;

  Array<float> image_rows_;   // of an image, [rows, d_model]
  Array<float> replacement_;  // [d_model]
  std::unique_ptr<Running> unchanged_;
  std::vector<std::unique_ptr<Running>> running_;  // by variant of the schedule

  model::Workspace workspace_;
  VariantSchedule::Pass pass_;
  Array<float> embeddings_;  // of the pass
  std::vector<Part> parts_;
  std::vector<model::Piece> pieces_;
  int32_t layer_ = 0;
};

}  // namespace mambascope::explain
