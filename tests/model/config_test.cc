#include "server/model/config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "tests/support/safetensors_io.h"

namespace mambascope::model {
namespace {

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
  EXPECT_EQ(config->family, "mamba");
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
  EXPECT_EQ(FaultOf(llama), "model_type: 'llama' is not supported; supported: mamba");
  EXPECT_EQ(FaultOf(nlohmann::json::object()), "model_type: is missing; supported: mamba");
  EXPECT_EQ(FaultOf(With("model_type", 3)), "model_type: 3 is not supported; supported: mamba");
  EXPECT_EQ(FaultOf(With("architectures", {"MambaForSequenceClassification"})),
            "architectures: \"MambaForSequenceClassification\" is not supported; supported: "
            "MambaForCausalLM");
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
            "time_step_rank: \"some\" is neither \"auto\" nor an integer in [1, 65536]; "
            "layer_norm_epsilon: -1e-05 is not a number in (0, 1]; "
            "use_bias: 1 is not true or false");
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
  EXPECT_EQ(FaultOf(wide), "expand: 64 x hidden_size 65536 exceeds 262144");
}

TEST(Config, WhatIsNotAJsonObjectIsRefused) {
  for (const std::string text : {"", "{", "[]", "3", "{\"model_type\": \"mamba\"", "\xff\xfe",
                                 "{}x", "{\"hidden_size\": 1e999}", "{\"a\": Infinity}"}) {
    SCOPED_TRACE(text);
    EXPECT_EQ(FaultOf(text), "not a JSON object");
  }
  EXPECT_EQ(FaultOf(std::string(100000, '[')), "nested more than 32 levels deep");
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
