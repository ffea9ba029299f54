// Every wrong option, alone and all together: what is refused, under which path, and what the
// answer says about the limit.
#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "server/explain/registry.h"

namespace mambascope::explain {
namespace {

using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

model::ModelConfig Config() {
  model::ModelConfig config;
  config.family = model::Family::kMamba;
  config.vocabulary = 100;
  config.d_model = 50;
  config.d_inner = 100;
  config.d_state = 8;
  config.d_conv = 4;
  config.dt_rank = 4;
  config.layers = 6;
  config.end_of_text = {0};
  return config;
}

using Found = std::vector<std::pair<std::string, std::string>>;

Found FaultsIn(const std::string& text, const model::ModelConfig& config) {
  v1::Explanation explanation;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &explanation)) << text;
  Violations violations;
  FindMethod(MethodName(explanation))->Validate(explanation, config, 10, "o", violations);
  return violations.list();
}
Found Faults(const std::string& text) { return FaultsIn(text, Config()); }
// Of options with numbers that the text format cannot spell.
template <class Change>
Found FaultsOf(const Change& change) {
  v1::Explanation explanation;
  change(explanation);
  Violations violations;
  FindMethod(MethodName(explanation))->Validate(explanation, Config(), 10, "o", violations);
  return violations.list();
}

std::string Repeat(int count, const std::string& what) {
  std::string text;
  for (int i = 0; i < count; ++i) text += what + std::to_string(i) + " ";
  return text;
}

TEST(Validation, DefaultsAreRight) {
  for (const Method* method : AllMethods()) {
    if (method->name() == "parameters") continue;  // wants to know which
    EXPECT_THAT(Faults(std::string(method->name()) + " {}"), IsEmpty());
  }
}

TEST(Validation, RightOptionsPass) {
  for (const char* text : {
           "hidden_attention { layers { } }",
           "hidden_attention { layers { begin: 2 } layers { end: 2 } }",
           "hidden_attention { layers { begin: 5 end: 6 } layers { begin: 0 end: 1 } }",
           "hidden_attention { reduction: REDUCTION_TOP_K top_k: 100 }",
           "hidden_attention { reduction: REDUCTION_TOP_K rows: ROWS_TARGET }",
           "hidden_attention { reduction: REDUCTION_CHANNELS channels: [99, 0] }",
           "hidden_attention { part: PART_STATE channels: 3 states: [7, 0] rows: ROWS_TARGET }",
           "hidden_attention { part: PART_H channels: 3 reduction: REDUCTION_CHANNELS }",
           "hidden_attention { part: PART_K channels: 3 }",
           "hidden_attention { part: PART_RELU reduction: REDUCTION_ABS_MEAN }",
           "raw_attention { start_layer: 5 reduction: REDUCTION_ABS_MEAN }",
           "raw_attention { variant: VARIANT_CODE reduction: REDUCTION_MEAN }",
           "raw_attention { reduction: REDUCTION_CHANNELS channels: 1 }",
           "attention_rollout { variant: VARIANT_CODE_QUIRKS rows: ROWS_TARGET }",
           "attention_rollout { variant: VARIANT_CODE normalization: NORMALIZATION_ROW_SUM }",
           "attention_rollout { rows: ROWS_ALL reduction: REDUCTION_TOP_K top_k: 1 }",
       }) {
    EXPECT_THAT(Faults(text), IsEmpty()) << text;
  }
  // Only hidden_attention answers with a map for each channel, and so bounds their number.
  EXPECT_THAT(
      Faults("raw_attention { reduction: REDUCTION_CHANNELS " + Repeat(100, "channels: ") + "}"),
      IsEmpty());
}

TEST(Validation, EachFaultAlone) {
  struct Case {
    const char *text, *field, *description;
  };
  for (const Case& c : std::vector<Case>{
           {"hidden_attention { layers { begin: -1 } }", "o.layers[0].begin",
            "-1 is outside [0, 6)"},
           {"hidden_attention { layers { begin: 6 } }", "o.layers[0].begin", "6 is outside [0, 6)"},
           {"hidden_attention { layers { end: 7 } }", "o.layers[0].end", "7 is outside [0, 6]"},
           {"hidden_attention { layers { end: -1 } }", "o.layers[0].end", "-1 is outside [0, 6]"},
           {"hidden_attention { layers { begin: 3 end: 2 } }", "o.layers[0]",
            "[3, 2) holds no layer"},
           {"hidden_attention { layers { begin: 3 end: 3 } }", "o.layers[0]",
            "[3, 3) holds no layer"},
           {"hidden_attention { layers { begin: 1 end: 3 } layers { begin: 2 } }", "o.layers[1]",
            "[2, 6) overlaps [1, 3)"},
           {"hidden_attention { layers { begin: 2 } layers { begin: 1 end: 3 } }", "o.layers[0]",
            "[2, 6) overlaps [1, 3)"},
           {"hidden_attention { layers { } layers { } }", "o.layers[1]", "[0, 6) overlaps [0, 6)"},
           {"hidden_attention { reduction: REDUCTION_CHANNELS }", "o.channels",
            "is empty, at least 1 of the model's 100 channels must be named"},
           {"hidden_attention { part: PART_STATE }", "o.channels",
            "is empty, at least 1 of the model's 100 channels must be named"},
           {"hidden_attention { part: PART_Q }", "o.channels",
            "is empty, at least 1 of the model's 100 channels must be named"},
           {"hidden_attention { channels: 1 }", "o.channels", "is for REDUCTION_CHANNELS only"},
           {"hidden_attention { reduction: REDUCTION_TOP_K channels: 1 }", "o.channels",
            "is for REDUCTION_CHANNELS only"},
           {"hidden_attention { reduction: REDUCTION_CHANNELS channels: [1, 100] }",
            "o.channels[1]", "100 is outside [0, 100)"},
           {"hidden_attention { reduction: REDUCTION_CHANNELS channels: -1 }", "o.channels[0]",
            "-1 is outside [0, 100)"},
           {"hidden_attention { reduction: REDUCTION_CHANNELS channels: [5, 1, 5] }",
            "o.channels[2]", "5 repeats entry 0"},
           {"hidden_attention { top_k: 3 }", "o.top_k", "is for REDUCTION_TOP_K only"},
           {"hidden_attention { reduction: REDUCTION_TOP_K top_k: 101 }", "o.top_k",
            "101 is outside [1, 100]"},
           {"hidden_attention { reduction: REDUCTION_TOP_K top_k: -1 }", "o.top_k",
            "-1 is outside [1, 100]"},
           {"hidden_attention { states: 1 }", "o.states", "is for PART_STATE and PART_H only"},
           {"hidden_attention { part: PART_Q channels: 1 states: 1 }", "o.states",
            "is for PART_STATE and PART_H only"},
           {"hidden_attention { part: PART_H channels: 1 states: [0, 8] }", "o.states[1]",
            "8 is outside [0, 8)"},
           {"hidden_attention { part: PART_H channels: 1 states: [2, 2] }", "o.states[1]",
            "2 repeats entry 0"},
           {"hidden_attention { part: PART_Q channels: 1 rows: ROWS_TARGET }", "o.rows",
            "ROWS_TARGET does not go with PART_Q, which has no rows"},
           {"hidden_attention { part: PART_STATE channels: 1 reduction: REDUCTION_MEAN }",
            "o.reduction",
            "REDUCTION_MEAN does not go with PART_STATE, which allows REDUCTION_CHANNELS only"},
           {"raw_attention { start_layer: 6 }", "o.start_layer", "6 is outside [0, 6)"},
           {"raw_attention { start_layer: -1 }", "o.start_layer", "-1 is outside [0, 6)"},
           {"raw_attention { reduction: REDUCTION_CHANNELS }", "o.channels",
            "is empty, at least 1 of the model's 100 channels must be named"},
           {"raw_attention { channels: 0 }", "o.channels", "is for REDUCTION_CHANNELS only"},
           {"raw_attention { variant: VARIANT_CODE reduction: REDUCTION_ABS_MEAN }", "o.reduction",
            "REDUCTION_ABS_MEAN does not go with VARIANT_CODE, which allows REDUCTION_MEAN only"},
           {"attention_rollout { start_layer: 6 }", "o.start_layer", "6 is outside [0, 6)"},
           {"attention_rollout { top_k: 1 }", "o.top_k", "is for REDUCTION_TOP_K only"},
           {"attention_rollout { variant: VARIANT_CODE rows: ROWS_ALL }", "o.rows",
            "ROWS_ALL does not go with VARIANT_CODE, which knows the target's row only"},
           {"attention_rollout { variant: VARIANT_CODE normalization: NORMALIZATION_PAPER }",
            "o.normalization",
            "NORMALIZATION_PAPER does not go with VARIANT_CODE, which always divides rows by "
            "their sums"},
       }) {
    EXPECT_THAT(Faults(c.text), UnorderedElementsAre(Pair(c.field, c.description))) << c.text;
  }
  EXPECT_THAT(
      Faults("hidden_attention { reduction: REDUCTION_CHANNELS " + Repeat(65, "channels: ") + "}"),
      UnorderedElementsAre(Pair("o.channels", "65 are more than 64")));
}

model::ModelConfig ConfigOf(model::Family family) {
  model::ModelConfig config = Config();
  config.family = family;
  if (family == model::Family::kMamba2) {
    config.heads = 10;
    config.head_dim = 10;
  }
  config.vision.image_size = 12;
  config.vision.patch_size = config.vision.stride = 4;
  return config;
}

// What depends on the model.
TEST(Validation, ScopesDirectionsAndParameters) {
  model::ModelConfig pooled = Config();
  pooled.task = model::Task::kTextClass;
  pooled.pooling = model::Pooling::kMean;
  const model::ModelConfig mamba = Config(), mamba2 = ConfigOf(model::Family::kMamba2),
                           vim = ConfigOf(model::Family::kVim);
  struct Case {
    const model::ModelConfig& config;
    const char *text, *field, *description;  // no field: nothing is wrong
  };
  for (const Case& c : std::vector<Case>{
           {mamba, "hidden_attention { scope: SCOPE_MIXER rows: ROWS_TARGET }", "", ""},
           {mamba, "hidden_attention { scope: SCOPE_MIXER part: PART_RELU }", "o.part",
            "PART_RELU does not go with SCOPE_MIXER, which allows PART_ALPHA only"},
           {mamba, "hidden_attention { direction: DIRECTION_FORWARD }", "o.direction",
            "DIRECTION_FORWARD is for models with two scans only"},
           {mamba2, "hidden_attention { reduction: REDUCTION_CHANNELS channels: 10 }",
            "o.channels[0]", "10 is outside [0, 10)"},
           {mamba2,
            "hidden_attention { scope: SCOPE_MIXER reduction: REDUCTION_CHANNELS channels: 99 }",
            "", ""},
           {vim, "hidden_attention { direction: DIRECTION_BACKWARD part: PART_K channels: 1 }", "",
            ""},
           {vim, "hidden_attention { direction: DIRECTION_BOTH part: PART_H channels: 1 }",
            "o.direction",
            "PART_H belongs to one scan: DIRECTION_FORWARD or DIRECTION_BACKWARD must be named"},
           {vim, "raw_attention { variant: VARIANT_CODE_QUIRKS }", "", ""},
           {pooled, "raw_attention { reduction: REDUCTION_ABS_MEAN }", "", ""},
           {pooled, "attention_rollout { variant: VARIANT_CODE }", "o.variant",
            "VARIANT_CODE does not go with a model that pools the mean of all tokens, because it "
            "explains a single row"},
           {mamba, "parameters { }", "o.kinds", "is empty, at least 1 must be named"},
           {mamba, "parameters { kinds: [KIND_B, KIND_C, KIND_B] }", "o.kinds[2]",
            "2 repeats entry 0"},
           {mamba, "parameters { kinds: KIND_B positions: 10 }", "o.positions[0]",
            "10 is outside [0, 10)"},
           {mamba, "parameters { kinds: KIND_B channels: 1 }", "o.channels",
            "is not for KIND_B and KIND_C, which have none"},
           {mamba2, "parameters { kinds: [KIND_GATE, KIND_STATE] channels: 99 }", "", ""},
           {mamba2, "parameters { kinds: [KIND_GATE, KIND_DECAY] channels: 10 }", "o.channels[0]",
            "10 is outside [0, 10)"},
           {mamba, "parameters { kinds: KIND_STATE direction: DIRECTION_BACKWARD }", "o.direction",
            "DIRECTION_BACKWARD is for models with two scans only"},
           {vim, "parameters { kinds: KIND_STATE direction: DIRECTION_BOTH }", "o.direction",
            "DIRECTION_BOTH: parameters belong to one scan"},
       }) {
    SCOPED_TRACE(c.text);
    const Found found = FaultsIn(c.text, c.config);
    if (*c.field == 0) {
      EXPECT_THAT(found, IsEmpty());
    } else {
      EXPECT_THAT(found, UnorderedElementsAre(Pair(c.field, c.description)));
    }
  }
  for (const char* method : {"raw_attention", "attention_rollout"}) {
    const std::string span = "target { generated: 0 generated_end: 2 }";
    EXPECT_THAT(
        FaultsIn(span + method + " { variant: VARIANT_CODE }", mamba),
        UnorderedElementsAre(
            Pair("o.variant",
                 "VARIANT_CODE does not go with a span of generated tokens, because it explains a "
                 "single row")));
  }
}

TEST(Validation, UnknownEnumValues) {
  const std::string unknown = "77 is not one of the enum's values";
  EXPECT_THAT(FaultsOf([](v1::Explanation& e) {
                auto* options = e.mutable_hidden_attention();
                options->set_reduction(static_cast<v1::Reduction>(77));
                options->set_part(static_cast<v1::Part>(77));
                options->set_rows(static_cast<v1::Rows>(77));
              }),
              UnorderedElementsAre(Pair("o.reduction", unknown), Pair("o.part", unknown),
                                   Pair("o.rows", unknown)));
  EXPECT_THAT(FaultsOf([](v1::Explanation& e) {
                auto* options = e.mutable_raw_attention();
                options->set_reduction(static_cast<v1::Reduction>(77));
                options->set_variant(static_cast<v1::Variant>(77));
              }),
              UnorderedElementsAre(Pair("o.reduction", unknown), Pair("o.variant", unknown)));
  EXPECT_THAT(FaultsOf([](v1::Explanation& e) {
                auto* options = e.mutable_attention_rollout();
                options->set_reduction(static_cast<v1::Reduction>(77));
                options->set_variant(static_cast<v1::Variant>(77));
                options->set_rows(static_cast<v1::Rows>(77));
                options->set_normalization(static_cast<v1::AttentionRollout::Normalization>(77));
              }),
              UnorderedElementsAre(Pair("o.reduction", unknown), Pair("o.variant", unknown),
                                   Pair("o.rows", unknown), Pair("o.normalization", unknown)));
}

TEST(Validation, AllFaultsAtOnce) {
  EXPECT_THAT(
      Faults("hidden_attention { reduction: REDUCTION_MEAN part: PART_K rows: ROWS_TARGET "
             "layers { begin: 4 end: 2 } layers { begin: -3 end: 9 } layers { begin: 1 end: 4 } "
             "layers { begin: 3 } channels: [1, 1, -7] states: [9, 1] top_k: 101 }"),
      UnorderedElementsAre(
          Pair("o.reduction",
               "REDUCTION_MEAN does not go with PART_K, which allows REDUCTION_CHANNELS only"),
          Pair("o.rows", "ROWS_TARGET does not go with PART_K, which has no rows"),
          Pair("o.layers[0]", "[4, 2) holds no layer"),
          Pair("o.layers[1].begin", "-3 is outside [0, 6)"),
          Pair("o.layers[1].end", "9 is outside [0, 6]"),
          Pair("o.layers[3]", "[3, 6) overlaps [1, 4)"), Pair("o.channels[1]", "1 repeats entry 0"),
          Pair("o.channels[2]", "-7 is outside [0, 100)"),
          Pair("o.states[0]", "9 is outside [0, 8)"),
          Pair("o.states", "is for PART_STATE and PART_H only"),
          Pair("o.top_k", "101 is outside [1, 100]"),
          Pair("o.top_k", "is for REDUCTION_TOP_K only")));
  EXPECT_THAT(Faults("attention_rollout { variant: VARIANT_CODE_QUIRKS start_layer: 9 "
                     "reduction: REDUCTION_CHANNELS rows: ROWS_ALL "
                     "normalization: NORMALIZATION_PAPER top_k: -2 }")
                  .size(),
              7u);
}

// A request of megabytes is answered shortly.
TEST(Validation, LongListsAreCountedNotListed) {
  const Found found = FaultsOf([](v1::Explanation& e) {
    auto* options = e.mutable_hidden_attention();
    options->set_reduction(v1::REDUCTION_CHANNELS);
    for (int i = 0; i < 1000000; ++i) options->add_channels(-1);
    for (int i = 0; i < 100000; ++i) options->add_layers();
  });
  EXPECT_LT(found.size(), 200u);
  EXPECT_THAT(found, ::testing::Contains(Pair("o.channels", "1000000 are more than 64")));
  EXPECT_THAT(found, ::testing::Contains(Pair("o.layers", "100000 are more than the model's 6")));
}

}  // namespace
}  // namespace mambascope::explain
