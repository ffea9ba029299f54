// Faithfulness: the float64 oracle's curves and numbers, and what must hold of them for any model.
#include "server/explain/faithfulness.h"

#include <google/protobuf/text_format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "gtest/gtest.h"
#include "server/explain/student_t.h"
#include "tests/explain/explained.h"
#include "tests/explain/random_subject.h"

namespace mambascope {
namespace {

using explain::Subject;
using testing::DeliveredTensor;
using testing::RandomSubject;
using testing::Traced;
using Against = v1::FaithfulnessReport::Against;

struct Checked {
  absl::Status status;
  explain::Plan plan;
  std::vector<DeliveredTensor> tensors;
  v1::FaithfulnessReport report;

  const DeliveredTensor& tensor(const std::string& name) const {
    for (const DeliveredTensor& tensor : tensors) {
      if (tensor.info.name() == "faithfulness/" + name) return tensor;
    }
    throw std::runtime_error("no tensor " + name);
  }
  const std::vector<float>& curve(const std::string& name) const { return tensor(name).values; }
  const std::vector<int32_t>& hits(const std::string& name) const {
    return tensor(name + "_hit").indices;
  }
};

Checked Check(const Subject& subject, const std::vector<float>& scores,
              const v1::Faithfulness& options) {
  v1::Explanation explanation;
  if (subject.model->config().family != model::Family::kVim) {
    explanation.mutable_target()->set_position(subject.position);
  }
  *explanation.mutable_faithfulness() = options;
  const model::ModelConfig& config = subject.model->config();
  explain::Violations violations;
  explain::ValidateFaithfulness(explanation, config, "f", violations);
  EXPECT_TRUE(violations.empty()) << violations.ToStatus();

  Checked checked;
  checked.plan = explain::PlanFaithfulness(explanation, config, subject.tokens, v1::DATA_TYPE_FP32);
  testing::CollectingSink sink;
  explain::TensorWriter writer("id", checked.plan.tensors, 1024, &sink);
  explain::FaithfulnessRun run(explanation, subject, scores);
  for (int32_t slice = 0; slice < checked.plan.slices && checked.status.ok(); ++slice) {
    checked.status = run.Step(writer);
  }
  if (!checked.status.ok()) return checked;
  checked.report = run.report();
  checked.tensors = testing::Join(checked.plan.tensors, sink.events, 1024);
  writer.Finish();
  return checked;
}

v1::Faithfulness Options(const std::string& text) {
  v1::Faithfulness options;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &options));
  return options;
}

// ---- golden ----

std::vector<float> Values(const google::protobuf::RepeatedPtrField<Against>& list) {
  std::vector<float> values;
  for (const Against& against : list) values.push_back(static_cast<float>(against.value()));
  return values;
}

// Class P is absolute, P3 2e-4 of the largest value.
void ExpectAbsolute(std::span<const float> values, const std::vector<double>& expected) {
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(values[i], expected[i], 5e-5);
}

TEST(Faithfulness, IsTheOracles) {
  for (const std::string& name : testing::GoldenModels()) {
    testing::GoldenInputs golden(name);
    const auto tensors = golden.Tensors("faithfulness.safetensors");
    std::map<std::string, Checked> checks;  // by input and removal
    int compared = 0;
    for (const auto& [tensor, stored] : tensors) {
      if (tensor.find("/scores") != std::string::npos) continue;
      SCOPED_TRACE(name + " " + tensor);
      const std::string group = tensor.substr(0, tensor.rfind('/'));
      const std::string input = group.substr(0, group.find('/'));
      const std::string removal = group.substr(group.find('/') + 1);
      const std::string what = tensor.substr(group.size() + 1);
      if (checks.find(group) == checks.end()) {
        Traced& traced = golden.At(tensor);
        const auto& config = golden.model().config();
        const Subject subject =
            traced.SubjectAt(explain::PositionOf(v1::Explanation(), config, traced.trace.tokens));
        v1::Faithfulness options = Options("random_draws: 2 points: 513");
        if (removal == "token") options = Options("removal: REMOVAL_TOKEN token_id: 5 points: 513");
        if (removal == "delete") options = Options("removal: REMOVAL_DELETE points: 513");
        const std::vector<double> scores = testing::F64(tensors.at(input + "/scores"));
        checks[group] = Check(subject, {scores.begin(), scores.end()}, options);
      }
      const Checked& checked = checks[group];
      ASSERT_TRUE(checked.status.ok()) << checked.status;
      ++compared;
      const auto auc = [&](const Against& against) {
        EXPECT_NEAR(against.value(), testing::F64(stored).at(0), 5e-5);
      };
      if (what == "comprehensiveness") {
        ExpectAbsolute(Values(checked.report.comprehensiveness()), testing::F64(stored));
      } else if (what == "sufficiency") {
        ExpectAbsolute(Values(checked.report.sufficiency()), testing::F64(stored));
      } else if (what == "log_odds") {
        testing::ExpectWithin(Values(checked.report.log_odds()), testing::F64(stored), 2e-4);
      } else if (what == "deletion_most_auc") {
        auc(checked.report.deletion_most_auc());
      } else if (what == "deletion_least_auc") {
        auc(checked.report.deletion_least_auc());
      } else if (what == "insertion_most_auc") {
        auc(checked.report.insertion_most_auc());
      } else if (what == "insertion_least_auc") {
        auc(checked.report.insertion_least_auc());
      } else if (what.find("_hit") != std::string::npos) {
        EXPECT_EQ(checked.tensor(what).indices, testing::I32(stored));
      } else {
        ExpectAbsolute(checked.curve(what), testing::F64(stored));
      }
    }
    EXPECT_GE(compared, 2 * 15) << name;
  }
}

// ---- any model ----

class RandomChecks : public ::testing::TestWithParam<int> {
 protected:
  RandomChecks() : random_(GetParam()), subject_(random_.subject()) {
    for (int64_t j = 0; j < subject_.tokens; ++j) {
      scores_.push_back(static_cast<float>(random_.Draw() % 7));  // with ties
    }
  }
  std::vector<std::string> Removals() const {
    std::vector<std::string> removals = {"", "removal: REMOVAL_DELETE "};
    if (!random_.vision()) removals.push_back("removal: REMOVAL_TOKEN token_id: 2 ");
    return removals;
  }

  RandomSubject random_;
  Subject subject_;
  std::vector<float> scores_;
};

TEST_P(RandomChecks, CurvesBeginAndEndWithAllOrNothing) {
  const auto candidates = static_cast<int32_t>(random_.candidates().size());
  for (const std::string& removal : Removals()) {
    SCOPED_TRACE(removal);
    const Checked checked = Check(subject_, scores_, Options(removal + "random_draws: 3 seed: 5"));
    ASSERT_TRUE(checked.status.ok()) << checked.status;
    const v1::FaithfulnessReport& report = checked.report;
    EXPECT_EQ(report.candidates(), candidates);
    EXPECT_EQ(report.random_draws(), 3);
    const auto p = static_cast<float>(report.probability());
    for (const char* which : {"most", "least"}) {
      const auto& deletion = checked.curve(std::string("deletion_") + which);
      const auto& insertion = checked.curve(std::string("insertion_") + which);
      EXPECT_EQ(deletion.size(), static_cast<size_t>(std::min(candidates + 1, 33)));
      EXPECT_EQ(deletion.front(), p);
      EXPECT_EQ(insertion.back(), p);
      EXPECT_EQ(deletion.back(), insertion.front());
      EXPECT_EQ(deletion.back(), checked.curve("deletion_most").back());
      for (const auto* curve : {&deletion, &insertion}) {
        for (const float value : *curve) EXPECT_TRUE(value >= 0 && value <= 1);
      }
    }
    ASSERT_EQ(report.shares_size(), 5);
    ASSERT_EQ(report.log_odds_size(), 5);
    for (int s = 0; s < 5; ++s) {
      EXPECT_NEAR(report.log_odds(s).value(),
                  std::log1p(-report.comprehensiveness(s).value() / report.probability()), 1e-4);
    }
    for (const Against* against : {&report.deletion_most_auc(), &report.insertion_least_auc()}) {
      EXPECT_TRUE(against->value() >= 0 && against->value() <= 1);
      EXPECT_LE(against->random_low(), against->random_mean());
      EXPECT_GE(against->random_high(), against->random_mean());
    }
  }
}

// The other order of other scores is this one, and what the one removes the other keeps.
TEST_P(RandomChecks, OppositeScoresSwapTheCurves) {
  for (int64_t j = 0; j < subject_.tokens; ++j) scores_[j] += static_cast<float>(j) / 1000;
  std::vector<float> opposite;
  for (const float score : scores_) opposite.push_back(-score);
  const v1::Faithfulness options = Options("points: 513 random_draws: 0");
  const Checked one = Check(subject_, scores_, options), other = Check(subject_, opposite, options);
  EXPECT_EQ(one.curve("deletion_most"), other.curve("deletion_least"));
  EXPECT_EQ(one.curve("insertion_most"), other.curve("insertion_least"));
  std::vector<float> backwards = one.curve("insertion_least");
  std::reverse(backwards.begin(), backwards.end());
  EXPECT_EQ(one.curve("deletion_most"), backwards);
  const auto candidates = static_cast<int32_t>(random_.candidates().size());
  EXPECT_LE(one.report.evaluations(), 2 * candidates + 2);  // each set once
  EXPECT_FALSE(one.report.deletion_most_auc().has_random_mean());
}

TEST_P(RandomChecks, TiesGoToTheLowerIndex) {
  std::vector<float> descending(subject_.tokens), ascending(subject_.tokens);
  for (int64_t j = 0; j < subject_.tokens; ++j) {
    descending[j] = -static_cast<float>(j);
    ascending[j] = static_cast<float>(j);
  }
  const v1::Faithfulness options = Options("random_draws: 0");
  const Checked equal = Check(subject_, std::vector<float>(subject_.tokens, 0.5f), options);
  EXPECT_EQ(equal.curve("deletion_most"),
            Check(subject_, descending, options).curve("deletion_most"));
  EXPECT_EQ(equal.curve("deletion_least"),
            Check(subject_, ascending, options).curve("deletion_least"));
  EXPECT_EQ(equal.report.deletion_most_auc().value(), equal.report.deletion_least_auc().value());
}

// Fewer points are points of the whole curve, at their places.
TEST_P(RandomChecks, PointsAreOfTheWholeCurve) {
  const Checked whole = Check(subject_, scores_, Options("points: 513 random_draws: 0"));
  const Checked some = Check(subject_, scores_, Options("points: 5 random_draws: 0"));
  for (const char* name : {"deletion_most", "insertion_least"}) {
    const DeliveredTensor& tensor = some.tensor(name);
    double area = 0;
    std::vector<int32_t> points(tensor.info.axes(0).labels().begin(),
                                tensor.info.axes(0).labels().end());
    if (points.empty()) points = explain::Indices(tensor.info.axes(0).size());
    EXPECT_EQ(points.front(), 0);
    EXPECT_EQ(points.back(), some.report.candidates());
    for (size_t i = 0; i < points.size(); ++i) {
      EXPECT_EQ(tensor.values[i], whole.curve(name).at(points[i]));
      EXPECT_EQ(some.hits(name)[i], whole.hits(name).at(points[i]));
      if (i > 0) {
        area += (double{tensor.values[i]} + tensor.values[i - 1]) / 2 *
                (points[i] - points[i - 1]) / points.back();
      }
    }
    if (points.size() == 1) area = tensor.values[0];
    const Against& auc = std::string(name) == "deletion_most" ? some.report.deletion_most_auc()
                                                              : some.report.insertion_least_auc();
    EXPECT_NEAR(auc.value(), area, 1e-6);
  }
}

TEST_P(RandomChecks, TheSameSeedGivesTheSameReport) {
  const v1::Faithfulness options = Options("random_draws: 4 seed: 9");
  const Checked one = Check(subject_, scores_, options), two = Check(subject_, scores_, options);
  EXPECT_EQ(one.report.SerializeAsString(), two.report.SerializeAsString());
  const Checked other = Check(subject_, scores_, Options("random_draws: 4 seed: 10"));
  EXPECT_EQ(one.report.deletion_most_auc().value(), other.report.deletion_most_auc().value());
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomChecks, ::testing::Range(0, RandomSubject::kSeeds));

TEST(FaithfulnessRun, RefusesScoresThatAreNotFinite) {
  RandomSubject random(6);
  const Subject subject = random.subject();
  std::vector<float> scores(subject.tokens, 1);
  scores.back() = NAN;
  EXPECT_EQ(Check(subject, scores, {}).status.code(), absl::StatusCode::kInternal);
}

// ---- options ----

std::string Fault(const std::string& faithfulness, const std::string& target = "") {
  v1::Explanation explanation;
  *explanation.mutable_faithfulness() = Options(faithfulness);
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(target, explanation.mutable_target()));
  model::ModelConfig config;
  config.vocabulary = 100;
  explain::Violations violations;
  explain::ValidateFaithfulness(explanation, config, "f", violations);
  std::string faults;
  for (const auto& [field, description] : violations.list()) faults += field + ": " + description;
  return faults;
}

TEST(FaithfulnessOptions, FaultsAreNamed) {
  EXPECT_EQ(Fault(""), "");
  EXPECT_EQ(Fault("removal: REMOVAL_TOKEN token_id: 99 random_draws: 0 points: 2 shares: [1]"), "");
  EXPECT_EQ(Fault("removal: REMOVAL_TOKEN token_id: 100"), "f.token_id: 100 is outside [0, 100)");
  EXPECT_EQ(Fault("removal: REMOVAL_TOKEN token_id: -1"), "f.token_id: -1 is outside [0, 100)");
  EXPECT_EQ(Fault("token_id: 1"), "f.token_id: is for REMOVAL_TOKEN only");
  EXPECT_EQ(Fault("shares: [0.5, 0]"), "f.shares[1]: 0 is outside (0, 1]");
  EXPECT_EQ(Fault("shares: [nan]"), "f.shares[0]: nan is outside (0, 1]");
  EXPECT_EQ(Fault("shares: [1.5]"), "f.shares[0]: 1.5 is outside (0, 1]");
  EXPECT_EQ(Fault("random_draws: 65"), "f.random_draws: 65 is outside [0, 64]");
  EXPECT_EQ(Fault("random_draws: -1"), "f.random_draws: -1 is outside [0, 64]");
  EXPECT_EQ(Fault("points: 1"), "f.points: 1 is outside [2, 513]");
  EXPECT_EQ(Fault("points: 514"), "f.points: 514 is outside [2, 513]");
  EXPECT_EQ(Fault("", "generated: 0 generated_end: 3"),
            "f: does not go with a span of generated tokens: name one token");
  std::string many;
  for (int i = 0; i < 17; ++i) many += "shares: 0.5 ";
  EXPECT_EQ(Fault(many), "f.shares: 17 are more than 16");
}

TEST(FaithfulnessOptions, UnknownRemovalsAndImageTokensAreRefused) {
  v1::Explanation explanation;
  explanation.mutable_faithfulness()->set_removal(static_cast<v1::Faithfulness::Removal>(9));
  explain::Violations unknown;
  explain::ValidateFaithfulness(explanation, {}, "f", unknown);
  ASSERT_EQ(unknown.list().size(), 1u);
  EXPECT_EQ(unknown.list()[0].first, "f.removal");

  model::ModelConfig image;
  image.family = model::Family::kVim;
  explanation.mutable_faithfulness()->set_removal(v1::Faithfulness::REMOVAL_TOKEN);
  explain::Violations token;
  explain::ValidateFaithfulness(explanation, image, "f", token);
  ASSERT_EQ(token.list().size(), 1u);
  EXPECT_EQ(token.list()[0].first, "f.token_id");
}

TEST(FaithfulnessOptions, OnlyOneScoreATokenWillDo) {
  const auto refused = [](std::vector<explain::Axis> axes) {
    explain::Violations violations;
    explain::CheckIsScores(explain::MakeTensorInfo("m", std::move(axes), v1::DATA_TYPE_FP32), 4,
                           "f", violations);
    return !violations.empty();
  };
  EXPECT_FALSE(refused({{"input_tokens", 4, {}}}));
  EXPECT_TRUE(refused({{"input_tokens", 3, {0, 1, 3}}}));
  EXPECT_TRUE(refused({{"layers", 4, {}}}));
  EXPECT_TRUE(refused({{"output_tokens", 4, {}}, {"input_tokens", 4, {}}}));
}

TEST(StudentT, QuantilesAreThoseOfTheTables) {
  EXPECT_NEAR(explain::StudentT95(1), 12.7062, 1e-4);
  EXPECT_NEAR(explain::StudentT95(2), 4.30265, 1e-5);
  EXPECT_NEAR(explain::StudentT95(3), 3.18245, 1e-5);
  EXPECT_NEAR(explain::StudentT95(9), 2.26216, 1e-5);
  EXPECT_NEAR(explain::StudentT95(10), 2.22814, 1e-5);
  EXPECT_NEAR(explain::StudentT95(63), 1.99834, 1e-5);
}

}  // namespace
}  // namespace mambascope
