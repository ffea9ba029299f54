#include "server/explain/faithfulness.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "server/base/check.h"
#include "server/base/status.h"
#include "server/explain/student_t.h"

namespace mambascope::explain {
namespace {

// The candidates by their scores, ties by position.
std::vector<int32_t> Sorted(const std::vector<int32_t>& candidates, std::span<const float> scores,
                            bool most_first) {
  std::vector<int32_t> order = candidates;
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return most_first ? scores[a] > scores[b] : scores[a] < scores[b];
  });
  return order;
}

// Fisher and Yates, spelled out: std::shuffle differs between libraries.
void Shuffle(std::vector<int32_t>& order, std::mt19937_64& random) {
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
}

// Mean of the draws with its 95 % confidence interval.
void SetRandom(const std::vector<double>& draws, v1::FaithfulnessReport::Against& against) {
  if (draws.empty()) return;
  const auto count = static_cast<double>(draws.size());
  double mean = 0, squares = 0;
  for (const double draw : draws) mean += draw / count;
  for (const double draw : draws) squares += (draw - mean) * (draw - mean);
  against.set_random_mean(mean);
  if (draws.size() < 2) return;
  const int degrees = static_cast<int>(draws.size()) - 1;
  const double half = StudentT95(degrees) * std::sqrt(squares / degrees / count);
  against.set_random_low(mean - half);
  against.set_random_high(mean + half);
}

}  // namespace

FaithfulnessRun::FaithfulnessRun(const v1::Explanation& explanation, const Subject& subject,
                                 std::span<const float> scores)
    : check_(explanation.faithfulness(), subject.model->config(), subject.position,
             subject.tokens) {
  MS_CHECK(static_cast<int64_t>(scores.size()) == subject.tokens && subject.outputs.size() == 1);
  slices_ =
      PlanFaithfulness(explanation, subject.model->config(), subject.tokens, v1::DATA_TYPE_FP32)
          .slices;
  finite_ = std::all_of(scores.begin(), scores.end(), [](float s) { return std::isfinite(s); });
  if (!finite_) return;
  Evaluation({});  // the first
  AddOrders(scores);
  std::vector<std::vector<int32_t>> removed(sets_.size());
  while (!sets_.empty()) {
    auto set = sets_.extract(sets_.begin());
    removed[set.mapped()] = std::move(set.key());
  }
  evaluations_ = static_cast<int32_t>(removed.size());
  variants_ = std::make_unique<VariantRunner>(subject, check_.removal, std::move(removed));
}

int32_t FaithfulnessRun::Evaluation(std::span<const int32_t> tokens) {
  std::vector<bool> is_removed(check_.candidates.empty() ? 0 : check_.candidates.back() + 1);
  for (const int32_t j : tokens) is_removed[j] = true;
  std::vector<int32_t> removed;
  removed.reserve(tokens.size());
  for (const int32_t j : check_.candidates) {
    if (is_removed[j]) removed.push_back(j);
  }
  return sets_.try_emplace(std::move(removed), static_cast<int32_t>(sets_.size())).first->second;
}

FaithfulnessRun::Order FaithfulnessRun::AddOrder(const std::vector<int32_t>& order) {
  const std::span<const int32_t> all(order);
  Order added;
  for (const int32_t k : check_.points) {
    added.deletion.push_back(Evaluation(all.first(k)));
    added.insertion.push_back(Evaluation(all.subspan(k)));
  }
  for (const int32_t k : check_.counts) {
    added.without.push_back(Evaluation(all.first(k)));
    added.only.push_back(Evaluation(all.subspan(k)));
  }
  return added;
}

// Backwards, its first k tokens are this order's last ones.
FaithfulnessRun::Order FaithfulnessRun::AddRandomOrder(const std::vector<int32_t>& order) {
  const std::span<const int32_t> all(order);
  Order added;
  for (const int32_t k : check_.points) {
    added.deletion.push_back(Evaluation(all.first(k)));
    added.insertion.push_back(Evaluation(all.first(all.size() - k)));
  }
  for (const int32_t k : check_.counts) {
    added.without.push_back(Evaluation(all.first(k)));
    added.only.push_back(Evaluation(all.first(all.size() - k)));
  }
  return added;
}

void FaithfulnessRun::AddOrders(std::span<const float> scores) {
  most_ = AddOrder(Sorted(check_.candidates, scores, true));
  least_ = AddOrder(Sorted(check_.candidates, scores, false));
  std::mt19937_64 random(check_.seed);
  for (int32_t draw = 0; draw < check_.draws; ++draw) {
    std::vector<int32_t> order = check_.candidates;
    Shuffle(order, random);
    random_.push_back(AddRandomOrder(order));
  }
}

absl::Status FaithfulnessRun::Step(TensorWriter& writer) {
  if (!finite_) return absl::InternalError("faithfulness: the scores are not finite");
  MS_CHECK(next_ < slices_);
  ++next_;
  // The plan's slices are for as many sets as there can be; fewer take their time.
  for (; done_ < variants_->slices() * next_ / slices_; ++done_) {
    RETURN_IF_ERROR(variants_->Step());
  }
  if (next_ == slices_) Write(writer);
  return absl::OkStatus();
}

double FaithfulnessRun::Probability(int32_t evaluation) const {
  return std::exp(variants_->outcomes()[evaluation].log_probability);
}

void FaithfulnessRun::Write(TensorWriter& writer) const {
  const auto write = [&](const std::string& name, const std::vector<int32_t>& curve) {
    std::vector<float> values;
    std::vector<int32_t> hits;
    for (const int32_t evaluation : curve) {
      values.push_back(static_cast<float>(Probability(evaluation)));
      hits.push_back(variants_->outcomes()[evaluation].hit ? 1 : 0);
    }
    writer.Write("faithfulness/" + name, values);
    writer.Write("faithfulness/" + name + "_hit", hits);
  };
  write("deletion_most", most_.deletion);
  write("deletion_least", least_.deletion);
  write("insertion_most", most_.insertion);
  write("insertion_least", least_.insertion);
}

// Over [0, 1] by trapezoids between the points, which need not be evenly spaced.
double FaithfulnessRun::Area(const std::vector<int32_t>& curve) const {
  if (curve.size() == 1) return Probability(curve[0]);
  double area = 0;
  for (size_t i = 1; i < curve.size(); ++i) {
    area += (Probability(curve[i - 1]) + Probability(curve[i])) / 2 *
            (check_.points[i] - check_.points[i - 1]);
  }
  return area / check_.points.back();
}

v1::FaithfulnessReport FaithfulnessRun::report() const {
  v1::FaithfulnessReport report;
  const auto set = [&](const Order& order, absl::FunctionRef<double(const Order&)> value,
                       v1::FaithfulnessReport::Against* against) {
    against->set_value(value(order));
    std::vector<double> draws;
    for (const Order& random : random_) draws.push_back(value(random));
    SetRandom(draws, *against);
  };
  const auto deletion = [&](const Order& order) { return Area(order.deletion); };
  const auto insertion = [&](const Order& order) { return Area(order.insertion); };
  set(most_, deletion, report.mutable_deletion_most_auc());
  set(least_, deletion, report.mutable_deletion_least_auc());
  set(most_, insertion, report.mutable_insertion_most_auc());
  set(least_, insertion, report.mutable_insertion_least_auc());
  const double p = Probability(0), log_p = variants_->outcomes()[0].log_probability;
  for (size_t s = 0; s < check_.shares.size(); ++s) {
    report.add_shares(check_.shares[s]);
    set(
        most_, [&](const Order& order) { return p - Probability(order.without[s]); },
        report.add_comprehensiveness());
    set(
        most_, [&](const Order& order) { return p - Probability(order.only[s]); },
        report.add_sufficiency());
    set(
        most_,
        [&](const Order& order) {
          return variants_->outcomes()[order.without[s]].log_probability - log_p;
        },
        report.add_log_odds());
  }
  report.set_random_draws(check_.draws);
  report.set_candidates(static_cast<int32_t>(check_.candidates.size()));
  report.set_evaluations(evaluations_);
  report.set_probability(p);
  return report;
}

}  // namespace mambascope::explain
