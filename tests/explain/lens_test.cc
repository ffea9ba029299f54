// The lenses: every golden of them, and what must hold for any model.
#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>

#include <string>
#include <vector>

#include "tests/explain/latim_support.h"

namespace mambascope {
namespace {

using testing::Explained;
using testing::ExplainSubject;
using testing::F64;
using testing::I32;
using testing::Tensor;
using testing::Traced;

constexpr int kSeeds = 56;
constexpr double kRounding = 5e-5;  // classes F and M of the goldens

// ---- goldens ----

class LensGolden : public ::testing::TestWithParam<std::string> {
 protected:
  testing::GoldenModel golden_{GetParam()};
};

TEST_P(LensGolden, Lenses) {
  const auto golden = golden_.Read("lens.safetensors");
  int compared = 0;
  for (const auto& [name, tensor] : golden) {
    const size_t slash = name.find('/');
    if (name.substr(slash + 1) != "positions") continue;
    const std::string input = name.substr(0, slash);
    SCOPED_TRACE(input);
    v1::Explanation logit, edge;
    for (const int32_t position : I32(tensor)) {
      logit.mutable_logit_lens()->add_positions(position);
      edge.mutable_edge_lens()->add_sources(position);
    }
    for (const auto& [method, explanation] :
         {std::pair("logit_lens", &logit), std::pair("edge_lens", &edge)}) {
      const Explained explained = Explain(golden_.At(input), *explanation);
      ASSERT_TRUE(explained.status.ok()) << explained.status;
      const std::string prefix = input + "/" + method + "/";
      golden_.Compare(explained.values(), F64(golden.at(prefix + "values")), 'M');
      EXPECT_EQ(Tensor(explained, "ids").indices, I32(golden.at(prefix + "ids")));
      ++compared;
    }
  }
  EXPECT_GE(compared, 4);
}

INSTANTIATE_TEST_SUITE_P(Models, LensGolden, ::testing::ValuesIn(model::GoldenModels()),
                         model::TestNameOf);

// ---- identities ----

class LensProperties : public ::testing::TestWithParam<int> {
 protected:
  LensProperties()
      : model_(testing::LoadRandomModel(testing::RandomOfAnyKind(GetParam()))),
        traced_(testing::TraceRandom(*model_, GetParam())),
        L_(traced_->trace.tokens),
        outputs_(model_->config().outputs()),
        position_(explain::PositionOf({}, model_->config(), L_)) {}

  // All outputs of every cell, [layers, positions, outputs].
  static std::vector<float> Spread(const Explained& explained, int64_t outputs) {
    const std::vector<int32_t>& ids = Tensor(explained, "ids").indices;
    std::vector<float> values(ids.size());
    for (size_t e = 0; e < ids.size(); ++e) {
      values[static_cast<int64_t>(e) / outputs * outputs + ids[e]] = explained.values()[e];
    }
    return values;
  }

  const std::unique_ptr<const model::MambaModel> model_;
  const std::unique_ptr<Traced> traced_;
  const int64_t L_, outputs_, position_;
};

TEST_P(LensProperties, TheLastLayersLensIsTheOutput) {
  if (model_->config().mean_pooled()) return;  // the head reads the mean of all rows
  v1::Explanation explanation;
  explanation.mutable_logit_lens()->set_top(static_cast<int32_t>(outputs_));
  const Explained explained = Explain(*traced_, explanation);
  ASSERT_TRUE(explained.status.ok()) << explained.status;
  const std::vector<float> values = Spread(explained, outputs_);
  EXPECT_EQ(std::vector<float>(values.end() - outputs_, values.end()),
            traced_->LogitsAt(position_));
  for (size_t e = 1; e < explained.values().size(); ++e) {  // best first
    if (static_cast<int64_t>(e) % outputs_ == 0) continue;
    EXPECT_GE(explained.values()[e - 1], explained.values()[e]);
  }
}

// All edges, the embedding and the biases sum to the logit, for every output at once; an edge's
// value at the target is what ALTI-Logit gives it.
TEST_P(LensProperties, EdgesSumToTheLogits) {
  const auto& config = model_->config();
  v1::Explanation edges, parts;
  edges.mutable_edge_lens()->set_top(static_cast<int32_t>(outputs_));
  for (int32_t j = 0; j < L_; ++j) edges.mutable_edge_lens()->add_sources(j);
  parts.mutable_latim();
  const Explained all = Explain(*traced_, edges);
  ASSERT_TRUE(all.status.ok()) << all.status;
  const std::vector<float> values = Spread(all, outputs_);
  for (const int32_t output : {int32_t{0}, static_cast<int32_t>(outputs_ - 1)}) {
    traced_->token = output;
    const Explained logit = Explain(*traced_, parts);
    const std::vector<float>& per_layer = Tensor(logit, "per_layer").values;
    double sum = Tensor(logit, "embedding").values[0] + double{Tensor(logit, "constant").values[0]};
    for (int64_t cell = 0; cell < config.layers * L_; ++cell) {
      const float value = values[cell * outputs_ + output];
      EXPECT_NEAR(value, per_layer[cell], kRounding * std::max(1.0f, std::fabs(value)));
      sum += value;
    }
    const double f = traced_->SubjectAt(position_).explained;
    EXPECT_NEAR(sum, f, 2 * kRounding * std::max(1.0, std::fabs(f)));
  }
}

TEST_P(LensProperties, ThreadsSparseStreamsAndOtherCellsChangeNoBit) {
  v1::Explanation logit, edge;
  logit.mutable_logit_lens()->add_positions(static_cast<int32_t>(L_ - 1));
  edge.mutable_edge_lens()->add_sources(static_cast<int32_t>(position_ / 2));
  for (v1::Explanation* explanation : {&logit, &edge}) {
    explain::Subject subject = traced_->SubjectAt(position_);
    const Explained once = ExplainSubject(subject, *explanation);
    ThreadPool pool(3);
    subject.pool = &pool;
    model::SequenceTrace sparse(model_->config(), L_, 3);
    sparse.tokens = L_;
    for (int32_t l = 0; l <= model_->config().layers; ++l) {
      if (sparse.stream(l) == nullptr) continue;
      std::copy_n(traced_->trace.stream(l), L_ * model_->config().d_model, sparse.stream(l));
    }
    subject.trace = &sparse;
    const Explained again = ExplainSubject(subject, *explanation);
    ASSERT_TRUE(again.status.ok()) << again.status;
    EXPECT_EQ(once.values(), again.values());
    EXPECT_EQ(once.tensors[1].indices, again.tensors[1].indices);
    // The last layer alone.
    const int32_t last = model_->config().layers - 1;
    auto* range = explanation == &logit ? explanation->mutable_logit_lens()->add_layers()
                                        : explanation->mutable_edge_lens()->add_layers();
    range->set_begin(last);
    const std::vector<float> values = Explain(*traced_, *explanation).values();
    EXPECT_EQ(values, std::vector<float>(once.values().end() - static_cast<int64_t>(values.size()),
                                         once.values().end()));
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, LensProperties, ::testing::Range(0, kSeeds));

// ---- what is refused ----

using Found = std::vector<std::pair<std::string, std::string>>;

Found Faults(const std::string& text) {
  v1::Explanation explanation;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &explanation)) << text;
  model::ModelConfig config;
  config.vocabulary = 30;
  config.layers = 6;
  explain::Violations violations;
  explain::FindMethod(explain::MethodName(explanation))
      ->Validate(explanation, config, 10, "explanations[0].lens", violations);
  return violations.list();
}

TEST(LensValidation, RightOptionsPass) {
  for (const char* text : {
           "logit_lens { }",
           "logit_lens { layers { begin: 2 end: 3 } positions: [9, 0] top: 30 }",
           "edge_lens { }",
           "target { position: 4 } edge_lens { layers { begin: 5 } sources: [4, 0] top: 1 }",
           "target { generated: 2 generated_end: 3 } edge_lens { }",
       }) {
    EXPECT_THAT(Faults(text), ::testing::IsEmpty()) << text;
  }
}

TEST(LensValidation, EachFault) {
  struct Case {
    const char *text, *field, *description;
  };
  for (const Case& c : std::vector<Case>{
           {"target { value: OUTPUT_VALUE_LOG_PROBABILITY } logit_lens { }",
            "explanations[0].target.value", "OUTPUT_VALUE_LOGIT explains"},
           {"target { value: OUTPUT_VALUE_LOG_PROBABILITY } edge_lens { }",
            "explanations[0].target.value", "OUTPUT_VALUE_LOGIT explains"},
           {"target { generated: 1 generated_end: 4 } edge_lens { }",
            "explanations[0].target.generated_end", "4 makes a span of 3 tokens"},
           {"logit_lens { positions: 10 }", "explanations[0].lens.positions[0]",
            "10 is outside [0, 10)"},
           {"logit_lens { positions: [3, 3] }", "explanations[0].lens.positions[1]",
            "3 repeats entry 0"},
           {"logit_lens { top: 31 }", "explanations[0].lens.top", "31 is outside [1, 30]"},
           {"logit_lens { layers { begin: 7 } }", "explanations[0].lens.layers[0].begin",
            "7 is outside [0, 6)"},
           {"edge_lens { top: -1 }", "explanations[0].lens.top", "-1 is outside [1, 30]"},
           {"edge_lens { sources: -1 }", "explanations[0].lens.sources[0]",
            "-1 is outside [0, 10)"},
           {"target { position: 4 } edge_lens { sources: [4, 5] }",
            "explanations[0].lens.sources[1]", "5 comes after the target's position 4"},
       }) {
    EXPECT_THAT(Faults(c.text), ::testing::ElementsAre(
                                    ::testing::Pair(c.field, ::testing::HasSubstr(c.description))))
        << c.text;
  }
  std::string many = "logit_lens { ";
  for (int i = 0; i < 257; ++i) many += "positions: " + std::to_string(i % 10) + " ";
  EXPECT_THAT(Faults(many + "}"), ::testing::Contains(::testing::Pair(
                                      "explanations[0].lens.positions", "257 are more than 256")));
}

}  // namespace
}  // namespace mambascope
