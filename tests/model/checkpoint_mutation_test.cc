// Broken checkpoints: whatever the bytes of config.json and the weight file, loading them gives an
// error or a model that works; never a crash, never memory without bound. The mutations are the
// same in every run. tests/fuzz/ searches further.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "server/model/mamba_model.h"
#include "tests/support/random_model.h"
#include "tests/support/safetensors_io.h"

namespace mambascope::model {
namespace {

using Json = nlohmann::json;
using testing::StoredTensors;

struct Seed {
  Json config;
  StoredTensors tensors;
};

testing::RandomModel Tiny() {
  testing::RandomModel tiny;
  tiny.vocabulary = 11;
  tiny.d_model = 6;
  tiny.d_inner = 8;
  tiny.d_state = 2;
  tiny.d_conv = 3;
  tiny.dt_rank = 2;
  tiny.layers = 1;
  return tiny;
}

Seed Mamba(const testing::RandomModel& model) {
  return {testing::RandomConfig(model), testing::RandomWeights(model)};
}

StoredTensors Tensors(const std::vector<std::pair<std::string, std::vector<int64_t>>>& shapes) {
  StoredTensors tensors;
  for (const auto& [name, shape] : shapes) {
    int64_t size = 1;
    for (const int64_t extent : shape) size *= extent;
    tensors[name] = testing::StoreF32(shape, std::vector<float>(size, 0.25f));
  }
  return tensors;
}

Seed Mamba2() {
  const std::string layer = "backbone.layers.0.", mixer = layer + "mixer.";
  Json config = testing::RandomConfig(Tiny());
  config.update({{"model_type", "mamba2"},
                 {"architectures", {"Mamba2ForCausalLM"}},
                 {"expand", 2},
                 {"head_dim", 4},
                 {"num_heads", 3},
                 {"n_groups", 1},
                 {"chunk_size", 4},
                 {"time_step_limit", {0.0, 1.0}}});
  config.erase("intermediate_size");
  return {config, Tensors({{"backbone.embeddings.weight", {11, 6}},
                           {"backbone.norm_f.weight", {6}},
                           {layer + "norm.weight", {6}},
                           {mixer + "in_proj.weight", {12 + 16 + 3, 6}},
                           {mixer + "conv1d.weight", {16, 1, 3}},
                           {mixer + "conv1d.bias", {16}},
                           {mixer + "dt_bias", {3}},
                           {mixer + "A_log", {3}},
                           {mixer + "D", {3}},
                           {mixer + "norm.weight", {12}},
                           {mixer + "out_proj.weight", {6, 12}}})};
}

Seed Vim() {
  const std::string layer = "layers.0.", mixer = layer + "mixer.";
  std::vector<std::pair<std::string, std::vector<int64_t>>> shapes = {
      {"patch_embed.proj.weight", {6, 3, 2, 2}},
      {"patch_embed.proj.bias", {6}},
      {"cls_token", {1, 1, 6}},
      {"pos_embed", {1, 5, 6}},
      {"norm_f.weight", {6}},
      {"head.weight", {3, 6}},
      {"head.bias", {3}},
      {layer + "norm.weight", {6}},
      {mixer + "in_proj.weight", {24, 6}},
      {mixer + "out_proj.weight", {6, 12}},
      {mixer + "A_log", {12, 2}},
      {mixer + "A_b_log", {12, 2}},
      {mixer + "D", {12}},
      {mixer + "D_b", {12}}};
  for (const std::string way : {"", "_b"}) {
    shapes.push_back({mixer + "conv1d" + way + ".weight", {12, 1, 3}});
    shapes.push_back({mixer + "conv1d" + way + ".bias", {12}});
    shapes.push_back({mixer + "x_proj" + way + ".weight", {5, 12}});
    shapes.push_back({mixer + "dt_proj" + way + ".weight", {12, 1}});
    shapes.push_back({mixer + "dt_proj" + way + ".bias", {12}});
  }
  return {{{"model_type", "vim"},
           {"img_size", 4},
           {"patch_size", 2},
           {"stride", 2},
           {"channels", 3},
           {"embed_dim", 6},
           {"depth", 1},
           {"num_classes", 3},
           {"d_state", 2},
           {"d_conv", 3},
           {"expand", 2},
           {"dt_rank", "auto"},
           {"norm_epsilon", 1e-5},
           {"rms_norm", true},
           {"bimamba_type", "v2"},
           {"if_cls_token", true},
           {"use_middle_cls_token", true},
           {"if_abs_pos_embed", true},
           {"if_divide_out", true}},
          Tensors(shapes)};
}

std::vector<Seed> Seeds() {
  testing::RandomModel full = Tiny();
  full.use_bias = true;
  full.tied_embeddings = false;
  full.layers = 2;
  Seed falcon = Mamba(Tiny()), classifier = Mamba(Tiny());
  falcon.config["model_type"] = "falcon_mamba";
  falcon.config["mixer_rms_eps"] = 1e-6;
  classifier.config["architectures"] = {"MambaForSequenceClassification"};
  classifier.config["num_labels"] = 2;
  classifier.tensors["score.weight"] = testing::StoreF32({2, 6}, std::vector<float>(12, 0.5f));
  return {Mamba(Tiny()), Mamba(full), Mamba2(), Vim(), falcon, classifier};
}

// ------------------------------------------------------------------ mutations

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  uint64_t Below(uint64_t bound) { return random_() % bound; }

  std::string Config(const Json& sound) {
    if (Below(3) == 0) return Bytes(sound.dump());
    Json config = sound;
    for (uint64_t changes = 1 + Below(3); changes > 0; --changes) Member(config);
    return config.dump();
  }

  std::string Weights(const StoredTensors& sound) {
    StoredTensors tensors = sound;
    if (Below(4) == 0) Values(tensors);
    Json header = {{"__metadata__", {{"format", "pt"}}}};
    std::string data;
    for (const auto& [name, tensor] : tensors) {
      header[name] = {{"dtype", tensor.dtype},
                      {"shape", tensor.shape},
                      {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
      data.append(tensor.bytes.begin(), tensor.bytes.end());
    }
    const uint64_t kind = Below(6);
    if (kind < 2) Entry(header);
    std::string text = header.dump();
    if (kind == 2) text = Bytes(text);
    std::string file = testing::SafetensorsBytes(text, data);
    if (kind == 3) Length(file);
    if (kind == 4) file = Bytes(file);
    return file;
  }

 private:
  template <typename T>
  const T& Any(const std::vector<T>& values) {
    return values[Below(values.size())];
  }

  Json Value() {
    switch (Below(4)) {
      case 0:
        return Any<Json>({0, 1, 2, 3, 8, 16, 64, 255, 256, 1023, 1024, 65535, 65536, 1 << 22});
      case 1:
        return Any<Json>({-1, 2147483647, 2147483648, 4294967296, INT64_MAX, INT64_MIN, UINT64_MAX,
                          uint64_t{1} << 61});
      case 2:
        return Any<Json>({0.5, -0.0, 1e-320, 1e308, 2.0, 1e15, -3.7});
      default:
        return Any<Json>({nullptr,
                          true,
                          false,
                          "",
                          "auto",
                          "mamba",
                          "mamba2",
                          "vim",
                          "falcon_mamba",
                          "silu",
                          "relu",
                          "F16",
                          "BF16",
                          "I64",
                          "BOOL",
                          std::string(300, 'x'),
                          "\x01\n",
                          Json::array(),
                          Json::object(),
                          {1, 2},
                          {0, 0},
                          {{"__float__", "Infinity"}},
                          Json::parse("[[[[[[[[[[0]]]]]]]]]]"),
                          {"MambaForCausalLM"},
                          {"Mamba2ForSequenceClassification"}});
    }
  }

  void Member(Json& object) {
    const std::vector<std::string> keys = {"model_type",
                                           "hidden_size",
                                           "expand",
                                           "intermediate_size",
                                           "vocab_size",
                                           "state_size",
                                           "num_hidden_layers",
                                           "conv_kernel",
                                           "time_step_rank",
                                           "layer_norm_epsilon",
                                           "use_bias",
                                           "use_conv_bias",
                                           "tie_word_embeddings",
                                           "conv_activation",
                                           "hidden_act",
                                           "eos_token_id",
                                           "architectures",
                                           "head_dim",
                                           "num_heads",
                                           "n_groups",
                                           "time_step_limit",
                                           "mixer_rms_eps",
                                           "img_size",
                                           "patch_size",
                                           "stride",
                                           "channels",
                                           "embed_dim",
                                           "depth",
                                           "num_classes",
                                           "d_state",
                                           "d_conv",
                                           "dt_rank",
                                           "norm_epsilon",
                                           "pooling",
                                           "num_labels",
                                           "id2label"};
    std::string key = Any(keys);
    if (Below(2) == 0) key = std::next(object.begin(), Below(object.size())).key();
    if (Below(6) == 0) {
      object.erase(key);
      if (object.empty()) object["x"] = 1;
    } else {
      object[key] = Value();
    }
  }

  // Something of one tensor's entry of the header, or the entry as a whole.
  void Entry(Json& header) {
    const std::string name = std::next(header.begin(), Below(header.size())).key();
    Json& entry = header[name];
    switch (Below(7)) {
      case 0:
        entry["dtype"] = Value();
        break;
      case 1:
        entry["dtype"] = Any<std::string>({"F64", "F16", "BF16", "I8", "BOOL", "F32", "U8", "F8"});
        break;
      case 2:
        if (entry.contains("shape") && !entry["shape"].empty()) {
          entry["shape"][Below(entry["shape"].size())] = Value();
        }
        break;
      case 3:
        if (entry.contains("data_offsets")) entry["data_offsets"][Below(2)] = Value();
        break;
      case 4:
        entry = Value();
        break;
      case 5: {
        const Json moved = entry;
        header.erase(name);
        header[name + "x"] = moved;
        break;
      }
      case 6: {  // two tensors change places
        const std::string other = std::next(header.begin(), Below(header.size())).key();
        std::swap(header[name], header[other]);
        break;
      }
    }
  }

  void Length(std::string& file) {
    uint64_t length;
    std::memcpy(&length, file.data(), 8);
    length = Any<uint64_t>({0, 1, length - 1, length + 1, file.size() - 8, file.size(), 1 << 24,
                            uint64_t{1} << 32, INT64_MAX, UINT64_MAX, UINT64_MAX - 7, random_()});
    std::memcpy(file.data(), &length, 8);
  }

  void Values(StoredTensors& tensors) {
    std::vector<uint8_t>& bytes = std::next(tensors.begin(), Below(tensors.size()))->second.bytes;
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const auto value = Any<float>({0.f, -0.f, 1e-40f, 88.f, 89.f, 1e20f, 3e38f, -3e38f, kInfinity,
                                   -kInfinity, std::numeric_limits<float>::quiet_NaN()});
    if (bytes.size() >= 4) std::memcpy(bytes.data() + 4 * Below(bytes.size() / 4), &value, 4);
  }

  std::string Bytes(std::string bytes) {
    for (uint64_t changes = 1 + Below(4); changes > 0 && !bytes.empty(); --changes) {
      const size_t at = Below(bytes.size());
      switch (Below(5)) {
        case 0:
          bytes[at] = static_cast<char>(random_());
          break;
        case 1:
          bytes[at] = "0123456789-.\"{}[]:,e"[Below(20)];
          break;
        case 2:
          bytes.resize(at);
          break;
        case 3:
          bytes.insert(at, bytes.substr(Below(bytes.size()), Below(40)));
          break;
        case 4:
          bytes.erase(at, Below(40));
          break;
      }
    }
    return bytes;
  }

  std::mt19937_64 random_;
};

// ------------------------------------------------------------------ what must hold

// The largest resident size since the last call, in MiB; 0 where the system does not say.
int64_t PeakMegabytes() {
  int64_t kilobytes = 0;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) kilobytes = std::stoll(line.substr(6));
  }
  std::ofstream("/proc/self/clear_refs") << 5;
  return kilobytes >> 10;
}

void ExpectWorks(const MambaModel& model, ThreadPool& pool, Workspace& workspace) {
  const ModelConfig& config = model.config();
  const bool vision = config.task == Task::kImageClass;
  const int64_t size = config.vision.image_size;
  if (vision && size > 64) return;  // it would take long
  const std::vector<int32_t> tokens = {0, config.vocabulary - 1, 0};
  const std::vector<float> image(3 * size * size, 0.5f);
  RecurrentState state(config);
  std::vector<float> logits;
  Piece piece;
  if (vision) {
    piece.image = image;
  } else {
    piece.tokens = tokens;
  }
  const std::vector<int32_t> rows = {static_cast<int32_t>(RowsOf(config, piece)) - 1};
  piece.state = &state;
  piece.logit_rows = rows;
  piece.logits = &logits;
  ASSERT_TRUE(model.Forward(pool, workspace, std::span(&piece, 1), [] { return false; }).ok());
  EXPECT_TRUE(piece.nonfinite_layer >= 0 || logits.size() == size_t(config.outputs()));
  bool finite = true;
  for (const float logit : logits) finite &= std::isfinite(logit);
  EXPECT_TRUE(finite || piece.nonfinite_layer >= 0) << "numbers that are none must be told";
}

TEST(CheckpointMutation, EveryMutationIsRefusedOrWorks) {
  const std::string folder = ::testing::TempDir() + "/checkpoint_mutation";
  std::filesystem::create_directories(folder);
  const std::vector<Seed> seeds = Seeds();
  ThreadPool pool(1);
  Workspace workspace;
  PeakMegabytes();
  int loaded = 0, refused = 0;
  std::vector<std::string> sound;  // weight files
  const auto load = [&](const std::string& config, const std::string& weights) {
    testing::WriteBytes(folder + "/config.json", config);
    testing::WriteBytes(folder + "/model.safetensors", weights);
    const auto model = MambaModel::Load(folder);
    if (!model.ok()) {
      ++refused;
      const auto code = model.status().code();
      EXPECT_TRUE(code == absl::StatusCode::kInvalidArgument ||
                  code == absl::StatusCode::kUnimplemented)
          << model.status();
      EXPECT_FALSE(model.status().message().empty());
      EXPECT_LT(model.status().message().size(), 16384u);
      return;
    }
    ++loaded;
    ExpectWorks(**model, pool, workspace);
  };

  for (const Seed& seed : seeds) {
    testing::WriteSafetensors(folder + "/sound", seed.tensors);
    sound.push_back(testing::ReadBytes(folder + "/sound"));
    load(seed.config.dump(), sound.back());
  }
  EXPECT_EQ(loaded, static_cast<int>(seeds.size())) << "the models as they are";
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t i = 0; i < 10000; ++i) {
    SCOPED_TRACE(i);
    Mutator mutator(i);
    const Seed& seed = seeds[i % seeds.size()];
    const uint64_t what = mutator.Below(5);  // either file, or both
    load(what < 2 || what == 4 ? mutator.Config(seed.config) : seed.config.dump(),
         what >= 2 ? mutator.Weights(seed.tensors) : sound[&seed - seeds.data()]);
    if (::testing::Test::HasFatalFailure()) break;
  }
  const auto took = std::chrono::steady_clock::now() - begin;
  std::filesystem::remove_all(folder);
  EXPECT_GT(loaded, 500) << "mutations must reach the forward pass";
  EXPECT_GT(refused, 5000);
#if !defined(__SANITIZE_ADDRESS__)
  EXPECT_LT(PeakMegabytes(), 512) << "LibTorch alone takes half of it";
#endif
  RecordProperty("loaded", loaded);
  RecordProperty(
      "milliseconds",
      static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(took).count()));
}

}  // namespace
}  // namespace mambascope::model
