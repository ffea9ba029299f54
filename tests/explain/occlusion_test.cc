// Occlusion and the passes behind it: the float64 oracle's numbers, and that packing variants into
// passes, cutting them and sharing their prefix change no bit.
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "server/explain/variants.h"
#include "server/model/sampling.h"
#include "tests/explain/explained.h"
#include "tests/explain/random_subject.h"

namespace mambascope {
namespace {

using explain::Removal;
using explain::Subject;
using explain::VariantOutcome;
using explain::VariantRunner;
using explain::VariantSchedule;
using testing::Explained;
using testing::RandomSubject;
using testing::Traced;

using Sets = std::vector<std::vector<int32_t>>;

std::vector<VariantOutcome> Evaluate(const Subject& subject, const Removal& removal, Sets removed,
                                     bool share = true) {
  VariantRunner runner(subject, removal, std::move(removed), share);
  for (int64_t slice = 0; slice < runner.slices(); ++slice) {
    EXPECT_TRUE(runner.Step().ok());
  }
  return runner.outcomes();
}

void ExpectSame(const VariantOutcome& a, const VariantOutcome& b) {
  EXPECT_EQ(a.value, b.value);
  EXPECT_EQ(a.log_probability, b.log_probability);
  EXPECT_EQ(a.hit, b.hit);
}

// ---- golden ----

TEST(Occlusion, IsTheOracles) {
  for (const std::string& name : testing::GoldenModels()) {
    testing::GoldenInputs golden(name);
    int compared = 0;
    for (const auto& [tensor, stored] : golden.Tensors("relevance.safetensors")) {
      if (tensor.find("/occlusion_") == std::string::npos) continue;
      SCOPED_TRACE(name + " " + tensor);
      v1::Explanation explanation;
      auto* options = explanation.mutable_occlusion();
      if (tensor.find("_token/") != std::string::npos) options->set_replacement_token_id(5);
      const Explained explained = Explain(golden.At(tensor), explanation);
      ASSERT_TRUE(explained.status.ok()) << explained.status;
      EXPECT_TRUE(explained.quality.within_tolerance());
      const std::string what = tensor.substr(tensor.rfind('/') + 1);
      const int index = what == "logit_drop" ? 0 : what == "logprob_drop" ? 1 : 2;
      testing::ExpectWithin(explained.tensors.at(index).values, testing::F64(stored), 5e-5);
      ++compared;
    }
    EXPECT_GE(compared, 6) << name;
  }
}

// ---- identities on random models ----

class Variants : public ::testing::TestWithParam<int> {
 protected:
  Variants() : random_(GetParam()), subject_(random_.subject()) {}

  std::vector<Removal> Removals() const {
    std::vector<Removal> removals = {{}, {Removal::How::kDelete, -1}};
    if (!random_.vision()) removals.push_back({Removal::How::kToken, 3});
    return removals;
  }
  // Random sets; with the empty one, and where it may be that of all candidates.
  Sets RandomSets(int count) {
    const std::vector<int32_t> candidates = random_.candidates();
    Sets sets = {{}, candidates};
    for (int i = 0; i < count; ++i) {
      std::vector<int32_t>& set = sets.emplace_back();
      const uint64_t share = random_.Draw() % 5;
      for (const int32_t j : candidates) {
        if (random_.Draw() % 5 < share) set.push_back(j);
      }
    }
    return sets;
  }

  RandomSubject random_;
  const Subject subject_;
};

// A pass over the whole variant alone, of rows put together here.
std::vector<float> LogitsOf(const Subject& subject, const Removal& removal,
                            const std::vector<int32_t>& removed) {
  const model::ModelConfig& config = subject.model->config();
  const int64_t d_model = config.d_model;
  std::vector<float> whole(subject.tokens * d_model), zero(d_model, 0), kept;
  subject.model->Embed(*subject.pool, subject.token_ids, subject.image, whole);
  if (removal.how == Removal::How::kToken) {
    subject.model->Embed(*subject.pool, {&removal.token, 1}, {}, zero);
  }
  const bool causal = config.family != model::Family::kVim && !config.mean_pooled();
  const int64_t rows = causal ? subject.position + 1 : subject.tokens;
  int32_t row = -1;  // the target's
  for (int32_t j = 0; j < rows; ++j) {
    const bool gone = std::find(removed.begin(), removed.end(), j) != removed.end();
    if (gone && removal.how == Removal::How::kDelete) continue;
    const float* from = gone ? zero.data() : whole.data() + j * d_model;
    kept.insert(kept.end(), from, from + d_model);
    if (config.mean_pooled() || j <= subject.position) ++row;
  }
  std::vector<float> logits;
  model::RecurrentState state(config);
  model::Workspace workspace;
  model::Piece piece;
  piece.embeddings = kept;
  piece.state = &state;
  piece.logit_rows = {&row, 1};
  piece.logits = &logits;
  EXPECT_TRUE(
      subject.model->Forward(*subject.pool, workspace, {&piece, 1}, [] { return false; }).ok());
  return logits;
}

TEST_P(Variants, AreBitForBitPassesOfTheirOwn) {
  for (const Removal& removal : Removals()) {
    const Sets sets = RandomSets(6);
    const std::vector<VariantOutcome> outcomes = Evaluate(subject_, removal, sets);
    for (size_t v = 0; v < sets.size(); ++v) {
      SCOPED_TRACE(v);
      if (removal.how == Removal::How::kDelete &&
          static_cast<int64_t>(sets[v].size()) == random_.rows()) {
        continue;  // the empty sequence is no pass
      }
      const std::vector<float> logits = LogitsOf(subject_, removal, sets[v]);
      const int32_t token = subject_.outputs[0].token;
      EXPECT_EQ(outcomes[v].value, explain::ValueOf(subject_, logits));
      EXPECT_EQ(outcomes[v].log_probability, model::LogProbability(logits, token));
      EXPECT_EQ(outcomes[v].hit, logits[token] == *std::max_element(logits.begin(), logits.end()));
    }
  }
}

TEST_P(Variants, AreTheSameAloneInAnyOrderAndWithoutSharing) {
  for (const Removal& removal : Removals()) {
    Sets sets = RandomSets(12);
    const std::vector<VariantOutcome> outcomes = Evaluate(subject_, removal, sets);
    const std::vector<VariantOutcome> unshared = Evaluate(subject_, removal, sets, /*share=*/false);
    for (size_t v = 0; v < sets.size(); ++v) {
      ExpectSame(outcomes[v], unshared[v]);
      ExpectSame(outcomes[v], Evaluate(subject_, removal, {sets[v]}).at(0));
    }
    std::reverse(sets.begin(), sets.end());
    const std::vector<VariantOutcome> backwards = Evaluate(subject_, removal, sets);
    for (size_t v = 0; v < sets.size(); ++v) {
      ExpectSame(outcomes[v], backwards[sets.size() - 1 - v]);
    }
  }
}

TEST_P(Variants, NothingRemovedChangesNothing) {
  for (const Removal& removal : Removals()) {
    EXPECT_EQ(Evaluate(subject_, removal, {{}}).at(0).value, subject_.explained);
  }
}

TEST_P(Variants, SeveralOutputsAreSums) {
  if (subject_.model->config().outputs() != subject_.model->config().vocabulary) return;
  Subject span = subject_;
  span.outputs.clear();
  VariantOutcome expected;
  const Sets sets = {{}, {subject_.position / 2}, {subject_.position}, {0, subject_.position}};
  std::vector<VariantOutcome> sums(sets.size());
  for (int32_t position = std::max(0, subject_.position - 70); position <= subject_.position;
       ++position) {
    explain::Output output;
    output.position = position;
    output.token = static_cast<int32_t>(random_.Draw() % span.model->config().vocabulary);
    if (position % 3 == 0) output.contrast = (output.token + 1) % span.model->config().vocabulary;
    span.outputs.push_back(output);
    Subject one = subject_;
    one.position = position;
    one.outputs = {output};
    for (size_t v = 0; v < sets.size(); ++v) {
      std::vector<int32_t> read;
      for (const int32_t j : sets[v]) {
        if (j <= position && (read.empty() || read.back() != j)) read.push_back(j);
      }
      const VariantOutcome part = Evaluate(one, {}, {read}).at(0);
      sums[v].value += part.value;
      sums[v].log_probability += part.log_probability;
      sums[v].hit = sums[v].hit && part.hit;
    }
  }
  Sets unique = sets;
  for (auto& set : unique) set.erase(std::unique(set.begin(), set.end()), set.end());
  const std::vector<VariantOutcome> outcomes = Evaluate(span, {}, unique);
  const std::vector<VariantOutcome> unshared = Evaluate(span, {}, unique, /*share=*/false);
  for (size_t v = 0; v < sets.size(); ++v) {
    ExpectSame(outcomes[v], sums[v]);
    ExpectSame(unshared[v], sums[v]);
  }
}

TEST_P(Variants, OcclusionIsTheirDifference) {
  v1::Explanation explanation;
  explanation.mutable_target()->set_position(subject_.position);
  explanation.mutable_occlusion();
  const Explained explained = Explain(random_.traced(), explanation);
  ASSERT_TRUE(explained.status.ok()) << explained.status;
  ASSERT_EQ(explained.tensors.size(), 3u);
  for (int64_t j = 0; j < subject_.tokens; ++j) {
    float value = 0, logprob = 0, ratio = 1;
    if (j < random_.rows()) {
      const auto clean = Evaluate(subject_, {}, {{}}).at(0);
      const auto without = Evaluate(subject_, {}, {{static_cast<int32_t>(j)}}).at(0);
      value = static_cast<float>(clean.value - without.value);
      logprob = static_cast<float>(clean.log_probability - without.log_probability);
      ratio = static_cast<float>(std::exp(clean.log_probability - without.log_probability));
    }
    EXPECT_EQ(explained.tensors[0].values[j], value);
    EXPECT_EQ(explained.tensors[1].values[j], logprob);
    EXPECT_EQ(explained.tensors[2].values[j], ratio);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Variants, ::testing::Range(0, testing::RandomSubject::kSeeds));

// ---- the schedule ----

// Every row of every variant once, in order; what starts does so where its input is unchanged; no
// pass is larger than its limits.
void CheckSchedule(std::mt19937_64& random) {
  const int64_t rows = 1 + static_cast<int64_t>(random() % 90);
  const int64_t outputs = random() % 3 == 0 ? 1 + static_cast<int64_t>(random() % rows) : 1;
  explain::PassLimits limits;
  limits.rows = 1 + static_cast<int64_t>(random() % 64);
  limits.variants = 1 + static_cast<int64_t>(random() % 6);
  limits.logit_rows = 1 + static_cast<int64_t>(random() % 6);
  limits.shared_rows = random() % 2 == 0 ? 0 : std::max<int64_t>(limits.rows / 4, 1);
  limits.cut = random() % 4 != 0 || outputs > 1 || limits.shared_rows > 0;
  if (!limits.cut) limits.rows = std::max(limits.rows, rows);
  std::vector<explain::VariantExtent> extents(random() % 30);
  for (auto& extent : extents) {
    extent.rows = outputs > 1 ? rows : 1 + static_cast<int64_t>(random() % rows);
    extent.start = static_cast<int64_t>(random() % extent.rows);
  }
  std::vector<int64_t> back(outputs);
  std::iota(back.begin(), back.end(), 0);
  VariantSchedule schedule(extents, rows, back, limits);
  std::vector<int64_t> reached(extents.size(), -1);
  int64_t unchanged = 0, computed = 0;
  VariantSchedule::Pass pass;
  for (int passes = 0; schedule.Next(pass); ++passes) {
    ASSERT_LT(passes, 100000);
    int64_t own_rows = 0, parts = 0, before = unchanged;
    for (const VariantSchedule::Part& part : pass.parts) {
      ASSERT_LT(part.begin, part.end);
      if (part.variant == VariantSchedule::kUnchanged) {
        ASSERT_GT(limits.shared_rows, 0);
        ASSERT_EQ(part.begin, unchanged);
        unchanged = part.end;
        continue;
      }
      ++parts;
      own_rows += part.end - part.begin;
      int64_t& row = reached[part.variant];
      if (part.starts) {
        ASSERT_EQ(row, -1);
        ASSERT_EQ(part.begin, limits.shared_rows > 0 ? before : 0);
        ASSERT_LE(part.begin, extents[part.variant].start);
      } else {
        ASSERT_EQ(part.begin, row);
      }
      row = part.end;
      ASSERT_LE(row, extents[part.variant].rows);
      ASSERT_TRUE(limits.cut || row == extents[part.variant].rows);
    }
    computed += own_rows;
    ASSERT_LE(own_rows, limits.rows);
    ASSERT_LE(parts, limits.variants);
    ASSERT_LE(pass.logit_rows, 2 * limits.logit_rows);
    ASSERT_LE(pass.rows, std::max(limits.rows, own_rows + limits.shared_rows));
  }
  int64_t all = 0;
  for (size_t v = 0; v < extents.size(); ++v) {
    EXPECT_EQ(reached[v], extents[v].rows);
    all += extents[v].rows;
  }
  EXPECT_LE(computed, all);
  EXPECT_LE(unchanged, rows);
}

TEST(VariantSchedule, ComputesEveryRowOnceWithinItsLimits) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 3000; ++i) {
    SCOPED_TRACE(i);
    CheckSchedule(random);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// 128 tokens of mamba-130m's size, each replaced alone: half of the rows are shared.
TEST(VariantSchedule, SharesPrefixes) {
  model::ModelConfig config;
  config.vocabulary = 50280;
  config.d_model = 768;
  config.d_inner = 1536;
  config.d_state = 16;
  config.d_conv = 4;
  config.dt_rank = 48;
  config.layers = 24;
  std::vector<explain::VariantExtent> extents;
  for (int64_t j = 0; j < 128; ++j) extents.push_back({j, 128});
  const explain::VariantCost cost = VariantRunner::CostOf(config, extents, true, 128, 1, 128);
  EXPECT_LT(cost.work.forward_tokens, 1.15 * 128 * 64.5 + 128);
  EXPECT_EQ(cost.slices % 24, 0);
  EXPECT_LT(cost.memory_bytes, 200 << 20);
}

}  // namespace
}  // namespace mambascope
