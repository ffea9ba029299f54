// What a faithfulness check's options mean, how they can be wrong, and what they cost.
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/explain/aggregation.h"
#include "server/explain/faithfulness.h"
#include "server/explain/options.h"

namespace mambascope::explain {
namespace {

constexpr float kDefaultShares[] = {0.01f, 0.05f, 0.1f, 0.2f, 0.5f};
constexpr int kMostShares = 16;
constexpr int32_t kDefaultDraws = 10, kMostDraws = 64;
constexpr int32_t kDefaultPoints = 33, kMostPoints = 513;
constexpr int64_t kMostEntries = 1 << 26;

Removal RemovalOf(const v1::Faithfulness& options) {
  switch (options.removal()) {
    case v1::Faithfulness::REMOVAL_TOKEN:
      return {Removal::How::kToken, options.token_id()};
    case v1::Faithfulness::REMOVAL_DELETE:
      return {Removal::How::kDelete, -1};
    default:
      return {};
  }
}

// ceil(share x candidates), at least 1. A share is a float: 0.05f is a little more than 1/20, and
// of 20 candidates 1 is meant.
int32_t CountOf(float share, int64_t candidates) {
  const double exact = double{share} * static_cast<double>(candidates);
  const auto count =
      static_cast<int64_t>(std::ceil(exact * (1 - std::numeric_limits<float>::epsilon())));
  return static_cast<int32_t>(std::min(std::max<int64_t>(count, 1), candidates));
}

// Evenly spaced, and the same from either end, so that curves share evaluations.
std::vector<int32_t> PointsOf(int32_t asked, int64_t candidates) {
  const int64_t count = std::min<int64_t>(asked == 0 ? kDefaultPoints : asked, candidates + 1);
  std::vector<int32_t> points(count, 0);
  for (int64_t i = 1; i < count; ++i) {
    const int64_t mirror = count - 1 - i;
    const int64_t point =
        i <= mirror ? i * candidates / (count - 1) : candidates - mirror * candidates / (count - 1);
    points[i] = static_cast<int32_t>(point);
  }
  return points;
}

// How many tokens the sets of one order remove, 0 and all left out.
struct Sizes {
  explicit Sizes(const FaithfulnessCheck& check)
      : all(static_cast<int32_t>(check.candidates.size())) {}
  void Add(int32_t size) {
    if (size > 0 && size < all) sizes.insert(size);
  }
  int32_t all;
  std::set<int32_t> sizes;
};

}  // namespace

FaithfulnessCheck::FaithfulnessCheck(const v1::Faithfulness& options,
                                     const model::ModelConfig& config, int64_t position,
                                     int64_t tokens)
    : removal(RemovalOf(options)),
      draws(options.has_random_draws() ? options.random_draws() : kDefaultDraws),
      seed(options.seed()) {
  for (int32_t j = 0; j < ReadTokens(config, position, tokens); ++j) {
    if (config.mean_pooled() || j != position) candidates.push_back(j);
  }
  shares.assign(options.shares().begin(), options.shares().end());
  if (shares.empty()) shares.assign(std::begin(kDefaultShares), std::end(kDefaultShares));
  const auto all = static_cast<int64_t>(candidates.size());
  for (const float share : shares) counts.push_back(CountOf(share, all));
  points = PointsOf(options.points(), all);
}

void ValidateFaithfulness(const v1::Explanation& explanation, const model::ModelConfig& config,
                          const std::string& field, Violations& violations) {
  const v1::Faithfulness& options = explanation.faithfulness();
  if (SpanOf(explanation.target()) > 1) {
    violations.Add(field, "does not go with a span of generated tokens: name one token");
  }
  const bool known = CheckEnum(v1::Faithfulness::Removal_IsValid(options.removal()),
                               options.removal(), field + ".removal", violations);
  if (known && options.removal() == v1::Faithfulness::REMOVAL_TOKEN) {
    CheckTokenOfVocabulary(options.token_id(), config, field + ".token_id", violations);
  } else if (known && options.token_id() != 0) {
    violations.Add(field + ".token_id", "is for REMOVAL_TOKEN only");
  }
  if (options.shares_size() > kMostShares) {
    violations.Add(field + ".shares",
                   absl::StrCat(options.shares_size(), " are more than ", kMostShares));
  }
  for (int i = 0; i < std::min(options.shares_size(), kMostShares); ++i) {
    if (options.shares(i) > 0 && options.shares(i) <= 1) continue;  // NaN fails too
    violations.Add(absl::StrCat(field, ".shares[", i, "]"),
                   absl::StrCat(options.shares(i), " is outside (0, 1]"));
  }
  if (options.random_draws() < 0 || options.random_draws() > kMostDraws) {
    violations.Add(field + ".random_draws",
                   absl::StrCat(options.random_draws(), " is outside [0, ", kMostDraws, "]"));
  }
  if (options.points() != 0 && (options.points() < 2 || options.points() > kMostPoints)) {
    violations.Add(field + ".points",
                   absl::StrCat(options.points(), " is outside [2, ", kMostPoints, "]"));
  }
}

bool CheckOrders(const v1::Explanation& explanation, int64_t tokens, const std::string& field,
                 Violations& violations) {
  const v1::Faithfulness& options = explanation.faithfulness();
  const int64_t draws = options.has_random_draws() ? options.random_draws() : kDefaultDraws;
  const int64_t points = static_cast<int64_t>(PointsOf(options.points(), tokens).size());
  const int64_t entries = (2 + draws) * points * tokens;
  if (entries <= kMostEntries) return true;
  violations.Add(field, absl::StrCat(points, " points of ", 2 + draws, " orders of ", tokens,
                                     " tokens are ", entries, " removals, more than ", kMostEntries,
                                     "; ask for fewer points or random_draws"));
  return false;
}

void CheckIsScores(const v1::TensorInfo& main, int64_t tokens, const std::string& field,
                   Violations& violations) {
  if (OneScorePerToken(main, tokens)) return;
  std::string shape;
  for (const auto& axis : main.axes()) {
    absl::StrAppend(&shape, shape.empty() ? "" : ", ", axis.name(), " ", axis.size());
  }
  violations.Add(field, absl::StrCat("needs one score for each of the ", tokens, " tokens; '",
                                     main.name(), "' is [", shape, "] with these options"));
}

Plan PlanFaithfulness(const v1::Explanation& explanation, const model::ModelConfig& config,
                      int64_t tokens, v1::DataType dtype) {
  const int64_t position = PositionOf(explanation, config, tokens);
  const FaithfulnessCheck check(explanation.faithfulness(), config, position, tokens);
  const auto all = static_cast<int32_t>(check.candidates.size());
  Sizes most(check), least(check), random(check);
  for (const int32_t k : check.points) {
    for (Sizes* sizes : {&most, &least, &random}) sizes->Add(k);
  }
  for (const int32_t count : check.counts) {
    most.Add(count);
    least.Add(all - count);  // what is kept is the end of the other order
    random.Add(count);
    random.Add(all - count);
  }

  const int64_t rows = ReadTokens(config, position, tokens);
  std::vector<VariantExtent> extents;
  int64_t removed = 0;
  const auto add = [&](int32_t size) {
    const int64_t kept = rows - (check.removal.how == Removal::How::kDelete ? size : 0);
    if (kept > 0) extents.push_back({0, kept});
    constexpr int64_t kIntsOfList = 8;  // a list's own, as it lies in memory
    removed += size + kIntsOfList;
  };
  add(0);
  if (all > 0) add(all);
  for (const Sizes* sizes : {&most, &least}) {
    for (const int32_t size : sizes->sizes) add(size);
  }
  for (int32_t draw = 0; draw < check.draws; ++draw) {
    for (const int32_t size : random.sizes) add(size);
  }
  // With ties the two orders' sets differ: both are held then.
  for (const int32_t size : most.sizes) removed += 2 * size;

  const int64_t lists = (check.draws + 2) *
                        static_cast<int64_t>(2 * (check.points.size() + check.counts.size()) + 64);
  const VariantCost cost = VariantRunner::CostOf(config, std::move(extents), /*starts_known=*/false,
                                                 rows, /*outputs=*/1, removed);
  Plan plan;
  plan.slices = cost.slices;
  plan.work = cost.work;
  constexpr int64_t kListsOfTokens = 6;  // scores, candidates, orders
  plan.memory_bytes =
      cost.memory_bytes + static_cast<int64_t>(sizeof(int32_t)) * (kListsOfTokens * tokens + lists);
  const Axis axis = {"candidates", static_cast<int64_t>(check.points.size()), check.points};
  for (const char* curve :
       {"deletion_most", "deletion_least", "insertion_most", "insertion_least"}) {
    const std::string name = absl::StrCat("faithfulness/", curve);
    plan.tensors.push_back(MakeTensorInfo(name, {axis}, dtype));
    plan.tensors.back().set_nonnegative(true);
    plan.tensors.push_back(MakeTensorInfo(name + "_hit", {axis}, v1::DATA_TYPE_INT32));
    plan.tensors.back().set_nonnegative(true);
  }
  return plan;
}

}  // namespace mambascope::explain
