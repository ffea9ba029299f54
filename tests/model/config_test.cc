#include "server/model/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "tests/support/safetensors_io.h"

namespace mambascope::model {
namespace {

const std::string kFamilies = "mamba, falcon_mamba, mamba2, vim";

nlohmann::json Smallest() {
  return {
      {"model_type", "mamba"}, {"hidden_size", 40}, {"num_hidden_layers", 3}, {"vocab_size", 97}};
}

nlohmann::json With(const std::string& key, nlohmann::json value) {
  nlohmann::json config = Smallest();
  config[key] = std::move(value);
  return config;
}

std::string FaultOf(const std::string& json) {
  const absl::StatusOr<ModelConfig> config = ParseConfig(json);
  if (config.ok()) return "accepted";
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(config.status().message());
}
std::string FaultOf(const nlohmann::json& json) { return FaultOf(json.dump()); }

TEST(Config, ReadsTheKeysOfHuggingFace) {
  const absl::StatusOr<ModelConfig> config =
      ParseConfig(testing::ReadBytes(MAMBASCOPE_SOURCE_DIR "/tests/golden/mamba1-odd/config.json"));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, Family::kMamba);
  EXPECT_EQ(config->vocabulary, 97);
  EXPECT_EQ(config->d_model, 40);
  EXPECT_EQ(config->d_inner, 80);
  EXPECT_EQ(config->d_state, 5);
  EXPECT_EQ(config->d_conv, 3);
  EXPECT_EQ(config->dt_rank, 3);
  EXPECT_EQ(config->layers, 3);
  EXPECT_EQ(config->norm_eps, 1e-5f);
  EXPECT_TRUE(config->use_bias);
  EXPECT_FALSE(config->use_conv_bias);
  EXPECT_FALSE(config->tied_embeddings);
  EXPECT_EQ(config->conv_activation, kernels::Activation::kSilu);
  EXPECT_EQ(config->end_of_text, std::vector<int32_t>({0}));
}

TEST(Config, AbsentKeysTakeTheDefaultsOfHuggingFace) {
  const absl::StatusOr<ModelConfig> config = ParseConfig(Smallest().dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->d_inner, 80);
  EXPECT_EQ(config->d_state, 16);
  EXPECT_EQ(config->d_conv, 4);
  EXPECT_EQ(config->dt_rank, 3) << "ceil(40 / 16)";
  EXPECT_EQ(config->norm_eps, 1e-5f);
  EXPECT_FALSE(config->use_bias);
  EXPECT_TRUE(config->use_conv_bias);
  EXPECT_TRUE(config->tied_embeddings);
  EXPECT_EQ(config->conv_activation, kernels::Activation::kSilu);
  EXPECT_TRUE(config->end_of_text.empty());
}

TEST(Config, TheInnerWidthIsIntermediateSizeBeforeExpand) {
  nlohmann::json json = With("expand", 3);
  EXPECT_EQ(ParseConfig(json.dump())->d_inner, 120);
  json["intermediate_size"] = 56;
  EXPECT_EQ(ParseConfig(json.dump())->d_inner, 56);
}

TEST(Config, AWholeNumberMayBeWrittenAsAFloat) {
  EXPECT_EQ(ParseConfig(With("expand", 2.0).dump())->d_inner, 80);
  EXPECT_EQ(FaultOf(With("expand", 2.5)), "expand: 2.5 is not an integer in [1, 64]");
}

TEST(Config, ActivationsAreReadByTheirNamesAndOthersRefused) {
  for (const auto& [name, expected] :
       std::map<std::string, kernels::Activation>{{"silu", kernels::Activation::kSilu},
                                                  {"swish", kernels::Activation::kSilu},
                                                  {"relu", kernels::Activation::kRelu},
                                                  {"identity", kernels::Activation::kIdentity},
                                                  {"linear", kernels::Activation::kIdentity}}) {
    SCOPED_TRACE(name);
    EXPECT_EQ(ParseConfig(With("hidden_act", name).dump())->conv_activation, expected);
    EXPECT_EQ(ParseConfig(With("conv_activation", name).dump())->conv_activation, expected);
  }
  nlohmann::json both = With("hidden_act", "silu");
  both["conv_activation"] = "relu";
  EXPECT_EQ(ParseConfig(both.dump())->conv_activation, kernels::Activation::kRelu);
  EXPECT_EQ(
      FaultOf(With("hidden_act", "gelu")),
      "hidden_act: \"gelu\" is not supported; supported: silu (swish), relu, identity (linear)");
}

TEST(Config, EndOfTextIsAnIdAListOrNull) {
  EXPECT_EQ(ParseConfig(With("eos_token_id", 7).dump())->end_of_text, std::vector<int32_t>({7}));
  EXPECT_EQ(ParseConfig(With("eos_token_id", {7, 9}).dump())->end_of_text,
            std::vector<int32_t>({7, 9}));
  EXPECT_TRUE(ParseConfig(With("eos_token_id", nullptr).dump())->end_of_text.empty());
  for (const nlohmann::json& wrong :
       {nlohmann::json(97), nlohmann::json(-1), nlohmann::json("</s>"), nlohmann::json({3, 97}),
        nlohmann::json(std::vector(65, 1))}) {
    SCOPED_TRACE(wrong.dump());
    EXPECT_EQ(FaultOf(With("eos_token_id", wrong)).find("eos_token_id: "), 0u);
  }
}

TEST(Config, AnotherArchitectureIsRefusedByName) {
  nlohmann::json llama = {{"model_type", "llama"}, {"hidden_size", "not ours to judge"}};
  EXPECT_EQ(FaultOf(llama), "model_type: 'llama' is not supported; supported: " + kFamilies);
  EXPECT_EQ(FaultOf(nlohmann::json::object()), "model_type: is missing; supported: " + kFamilies);
  EXPECT_EQ(FaultOf(With("model_type", 3)),
            "model_type: 3 is not supported; supported: " + kFamilies);
}

TEST(Config, AllFaultsAreNamedAtOnce) {
  const nlohmann::json json = {{"model_type", "mamba"},
                               {"hidden_size", 0},
                               {"state_size", 257},
                               {"conv_kernel", "4"},
                               {"use_bias", 1},
                               {"layer_norm_epsilon", -1e-5},
                               {"time_step_rank", "some"},
                               {"num_hidden_layers", 1025}};
  EXPECT_EQ(FaultOf(json),
            "hidden_size: 0 is not an integer in [1, 65536]; "
            "vocab_size: is missing; "
            "num_hidden_layers: 1025 is not an integer in [1, 1024]; "
            "state_size: 257 is not an integer in [1, 256]; "
            "conv_kernel: \"4\" is not an integer in [1, 16]; "
            "layer_norm_epsilon: -1e-05 is not a number in (0, 1]; "
            "use_bias: 1 is not true or false; "
            "time_step_rank: \"some\" is neither \"auto\" nor an integer in [1, 65536]");
}

TEST(Config, SizesThatWouldOverflowAreRefused) {
  for (const char* key : {"hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers",
                          "state_size", "conv_kernel", "time_step_rank", "expand"}) {
    for (const nlohmann::json& value :
         {nlohmann::json(-1), nlohmann::json(0), nlohmann::json(int64_t{1} << 31),
          nlohmann::json(UINT64_MAX), nlohmann::json(INT64_MIN), nlohmann::json(1e300)}) {
      SCOPED_TRACE(key + value.dump());
      EXPECT_EQ(FaultOf(With(key, value)).find(key), 0u);
    }
  }
  nlohmann::json wide = With("hidden_size", 65536);
  wide["expand"] = 64;
  EXPECT_EQ(FaultOf(wide), "expand: 64 x the model's width 65536 exceeds 262144");
}

TEST(Config, WhatIsNotAJsonObjectIsRefused) {
  for (const std::string text : {"", "{", "[]", "3", "{\"model_type\": \"mamba\"", "\xff\xfe",
                                 "{}x", "{\"hidden_size\": 1e999}", "{\"a\": Infinit}"}) {
    SCOPED_TRACE(text);
    EXPECT_EQ(FaultOf(text), "not a JSON object");
  }
  EXPECT_EQ(FaultOf(std::string(100000, '[')), "nested more than 32 levels deep");
}

std::string GoldenConfig(const std::string& model) {
  return testing::ReadBytes(MAMBASCOPE_SOURCE_DIR "/tests/golden/" + model + "/config.json");
}

TEST(Config, Mamba2HasHeadsGroupsAndALimitOfDelta) {
  const absl::StatusOr<ModelConfig> config = ParseConfig(GoldenConfig("mamba2-odd"));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, Family::kMamba2);
  EXPECT_EQ(config->heads, 12);
  EXPECT_EQ(config->head_dim, 4);
  EXPECT_EQ(config->groups, 1);
  EXPECT_EQ(config->d_inner, 48);
  EXPECT_EQ(config->dt_rank, 0);
  EXPECT_EQ(config->delta_min, 0.02f);
  EXPECT_EQ(config->delta_max, 0.6f);
  EXPECT_EQ(config->conv_channels(), 48 + 2 * 6);
  EXPECT_EQ(config->in_proj_rows(), 48 + 60 + 12);
  EXPECT_EQ(config->selective_width(), 12 + 2 * 6);
  EXPECT_EQ(config->maps(), 12);
  EXPECT_TRUE(config->tied_embeddings);
}

// Python writes Infinity, and transformers {"__float__": "Infinity"}; neither is strict JSON's
// number.
TEST(Config, TheLimitOfDeltaMayBeInfinite) {
  nlohmann::json json = nlohmann::json::parse(R"({"model_type": "mamba2", "hidden_size": 8,
      "num_heads": 4, "head_dim": 4, "n_groups": 2, "num_hidden_layers": 1, "vocab_size": 9})");
  EXPECT_TRUE(std::isinf(ParseConfig(json.dump())->delta_max));
  json["time_step_limit"] = {0.5, "LIMIT"};
  for (const std::string limit : {"Infinity", R"({"__float__": "Infinity"})", R"("Infinity")"}) {
    std::string text = json.dump();
    text.replace(text.find("\"LIMIT\""), 7, limit);
    const absl::StatusOr<ModelConfig> config = ParseConfig(text);
    ASSERT_TRUE(config.ok()) << config.status() << text;
    EXPECT_EQ(config->delta_min, 0.5f);
    EXPECT_TRUE(std::isinf(config->delta_max));
  }
  // Text is text, with escaped quotes and backslashes too.
  std::string text = json.dump();
  text.replace(text.find("\"LIMIT\""), 7, "Infinity");
  text.insert(1, R"("a": "say \"NaN\", \\", "b": "Infinity", )");
  EXPECT_TRUE(ParseConfig(text).ok()) << ParseConfig(text).status() << text;
  for (const std::string wrong : {"[1, 0.5]", "[-1, 1]", "[0]", "3", "[0, \"x\"]",
                                  "[Infinity, Infinity]", "[0, NaN]", "[0, -Infinity]"}) {
    std::string text = json.dump();
    text.replace(text.find("[0.5,\"LIMIT\"]"), 13, wrong);
    EXPECT_EQ(FaultOf(text).find("time_step_limit: "), 0u) << text;
  }
  json["time_step_limit"] = nullptr;
  json["num_heads"] = 3;
  EXPECT_EQ(FaultOf(json),
            "num_heads: 3 x head_dim 4 is 12, not expand x hidden_size 16; "
            "n_groups: 2 does not divide num_heads 3");
}

TEST(Config, FalconMambaAndClassifiersHaveTheirOwnKeys) {
  const absl::StatusOr<ModelConfig> falcon = ParseConfig(GoldenConfig("falcon-mamba-tiny"));
  ASSERT_TRUE(falcon.ok()) << falcon.status();
  EXPECT_EQ(falcon->family, Family::kFalconMamba);
  EXPECT_EQ(falcon->mixer_rms_eps, 1e-6f);
  EXPECT_FALSE(falcon->tied_embeddings);

  const absl::StatusOr<ModelConfig> mean = ParseConfig(GoldenConfig("mamba1-classifier-tiny"));
  ASSERT_TRUE(mean.ok()) << mean.status();
  EXPECT_EQ(mean->task, Task::kTextClass);
  EXPECT_EQ(mean->classes, 5);
  EXPECT_EQ(mean->outputs(), 5);
  EXPECT_TRUE(mean->mean_pooled());

  nlohmann::json json = With("architectures", {"MambaForSequenceClassification"});
  EXPECT_EQ(ParseConfig(json.dump())->classes, 2) << "Hugging Face's default";
  json["id2label"] = {{"0", "bad"}, {"1", "so-so"}, {"2", "good"}};
  const absl::StatusOr<ModelConfig> named = ParseConfig(json.dump());
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_EQ(named->class_labels, (std::vector<std::string>{"bad", "so-so", "good"}));
  EXPECT_FALSE(named->mean_pooled());
  json["id2label"] = {{"0", "bad"}, {"7", "good"}};
  EXPECT_EQ(FaultOf(json), "id2label: does not name the classes 0 to 1");
  json.erase("id2label");
  json["pooling"] = "max";
  EXPECT_EQ(FaultOf(json), "pooling: \"max\" is neither \"last\" nor \"mean\"");
}

TEST(Config, VimReadsItsPublishedKeys) {
  const absl::StatusOr<ModelConfig> config = ParseConfig(GoldenConfig("vim-tiny"));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, Family::kVim);
  EXPECT_EQ(config->task, Task::kImageClass);
  EXPECT_EQ(config->d_model, 24);
  EXPECT_EQ(config->d_inner, 48);
  EXPECT_EQ(config->classes, 10);
  EXPECT_EQ(config->vocabulary, 0);
  EXPECT_EQ(config->directions(), 2);
  EXPECT_EQ(config->vision.tokens(), 17);
  EXPECT_EQ(config->vision.class_position(), 8);
  EXPECT_TRUE(config->vision.divide_out);

  nlohmann::json json = nlohmann::json::parse(GoldenConfig("vim-tiny"));
  const auto fault = [&](const char* key, const nlohmann::json& value) {
    nlohmann::json changed = json;
    changed[key] = value;
    return FaultOf(changed);
  };
  EXPECT_EQ(fault("bimamba_type", "v1"), "bimamba_type: \"v1\" is not supported; supported: v2");
  EXPECT_EQ(fault("rms_norm", false), "rms_norm: false is not supported");
  EXPECT_EQ(fault("if_cls_token", false), "if_cls_token: false is not supported");
  EXPECT_EQ(fault("channels", 1), "channels: 1 is not an integer in [3, 3]");
  EXPECT_EQ(fault("patch_size", 17), "patch_size: 17 exceeds img_size 16");
  EXPECT_EQ(fault("img_size", 4096), "stride: gives more than 65536 patches");
  json["img_size"] = 4096;
  json["stride"] = 1;
  EXPECT_EQ(fault("patch_size", 3900),
            "stride: gives patches that overlap to more than 268435456 numbers");
}

TEST(Config, NoBytesCrashIt) {
  const std::string sound =
      testing::ReadBytes(MAMBASCOPE_SOURCE_DIR "/tests/golden/mamba1-tiny/config.json");
  int accepted = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 random(seed);
    std::string text = sound;
    for (uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
      const size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, 1 + random() % 20);
          break;
        case 2:
          text.insert(at, 1, "0123456789-.eE\"{}[]:,"[random() % 21]);
          break;
        case 3:
          text[at] = static_cast<char>(text[at] ^ (1 << random() % 7));
          break;
      }
      if (text.empty()) text.push_back(' ');
    }
    accepted += ParseConfig(text).ok();
  }
  EXPECT_GT(accepted, 0);  // a change inside an ignored value
  EXPECT_LT(accepted, 2000);
}

}  // namespace
}  // namespace mambascope::model
