#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "mambascope/v1/explanation.pb.h"
#include "server/explain/method.h"
#include "server/explain/subject.h"
#include "server/explain/tensor_writer.h"
#include "server/explain/variants.h"
#include "server/explain/violations.h"

namespace mambascope::explain {

// How far the model agrees with an explanation's scores (methods.md, section 8; ERASER, arXiv
// 1911.03429): tokens are removed in the order of their scores, and the target's probability says
// what they were worth. The message Faithfulness of explanation.proto names options and tensors.

// Adds everything that is wrong with explanation.faithfulness; `field` is its path.
void ValidateFaithfulness(const v1::Explanation& explanation, const model::ModelConfig& config,
                          const std::string& field, Violations& violations);
// Adds a violation and returns false if its orders are so long and many that drawing them up would
// itself take seconds; before PlanFaithfulness.
bool CheckOrders(const v1::Explanation& explanation, int64_t tokens, const std::string& field,
                 Violations& violations);
// A method's main tensor has to be one score a token, of all `tokens`.
void CheckIsScores(const v1::TensorInfo& main, int64_t tokens, const std::string& field,
                   Violations& violations);

// Of a check that was found right: its tensors, cost and slices, beyond the method's own. The work
// is that without ties of scores; `memory_bytes` is a bound.
Plan PlanFaithfulness(const v1::Explanation& explanation, const model::ModelConfig& config,
                      int64_t tokens, v1::DataType dtype);

// A check, with the defaults in it.
struct FaithfulnessCheck {
  FaithfulnessCheck(const v1::Faithfulness& options, const model::ModelConfig& config,
                    int64_t position, int64_t tokens);

  Removal removal;
  std::vector<float> shares;        // as reported
  std::vector<int32_t> counts;      // of the first tokens, for each share
  std::vector<int32_t> points;      // ascending numbers of tokens, 0 and all candidates
  std::vector<int32_t> candidates;  // ascending: every position that is read, but the target's
  int32_t draws = 0;
  uint64_t seed = 0;
};

// One check under way, in slices as an Explaining. Every set of tokens is evaluated once, whichever
// curves it is on. A random order is read forwards for what removes its first tokens and backwards,
// which is as random, for what keeps them: one chain of sets gives both.
//
// Owned and stepped by one thread at a time; borrows what the subject borrows.
class FaithfulnessRun {
 public:
  // `scores` [subject.tokens]: the method's main tensor, copied.
  FaithfulnessRun(const v1::Explanation& explanation, const Subject& subject,
                  std::span<const float> scores);

  // Runs the next slice, Plan::slices times; the last writes the tensors. kInternal when a score or
  // a result is not finite.
  absl::Status Step(TensorWriter& writer);
  // After the last Step.
  v1::FaithfulnessReport report() const;

 private:
  // Places in the outcomes of an order's evaluations.
  struct Order {
    std::vector<int32_t> deletion, insertion;  // of the points
    std::vector<int32_t> without, only;        // the first tokens of each share removed, or kept
  };

  // Of the set that has these tokens removed.
  int32_t Evaluation(std::span<const int32_t> tokens);
  Order AddOrder(const std::vector<int32_t>& order);
  Order AddRandomOrder(const std::vector<int32_t>& order);
  void AddOrders(std::span<const float> scores);
  double Probability(int32_t evaluation) const;
  double Area(const std::vector<int32_t>& curve) const;
  void Write(TensorWriter& writer) const;

  const FaithfulnessCheck check_;
  bool finite_ = true;  // the scores
  Order most_, least_;
  std::vector<Order> random_;
  int32_t evaluations_ = 0;
  std::map<std::vector<int32_t>, int32_t> sets_;  // until the runner has them
  std::unique_ptr<VariantRunner> variants_;
  int64_t slices_ = 0, next_ = 0, done_ = 0;
};

}  // namespace mambascope::explain
