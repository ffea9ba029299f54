// Whole models on a device: the oracle's numbers, the CPU's, and bits that depend on a sequence
// alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "server/kernels/cuda/device.h"
#include "tests/gpu/device.h"
#include "tests/model/classifiers.h"
#include "tests/model/golden.h"
#include "tests/model/sequence.h"

namespace mambascope::model {
namespace {

using testing::RandomModel;
using testing::StoredTensors;

constexpr Device kGpu{Device::Kind::kCuda, 0};
using kernels::cuda::kEmulated;

template <typename Base>
class OnDevice : public Base {
 protected:
  void SetUp() override {
    if (!ParseDevice("cuda").ok()) GTEST_SKIP() << "no GPU";
  }
};

std::vector<double> AsDouble(std::span<const float> values) {
  return {values.begin(), values.end()};
}

// ---- numbers ----

class GoldenOnDevice : public OnDevice<::testing::TestWithParam<std::string>> {};

TEST_P(GoldenOnDevice, LogitsAreTheOraclesAndTheCpus) {
  const std::string folder = Golden(GetParam());
  const auto cpu = LoadOrFail(folder), gpu = LoadOrFail(folder, kGpu);
  const StoredTensors oracle = testing::ReadSafetensors(folder + "/forward.safetensors");
  ThreadPool pool(2);
  for (const Input& input : ReadInputs(folder)) {
    const Pass here(*cpu, input, pool), there(*gpu, input, pool);
    ExpectClassF(testing::F64(oracle.at(input.name + "/logits")), there.logits, input.name);
    ExpectClassF(AsDouble(here.logits), there.logits, input.name + ", the CPU's");
  }
}

TEST_P(GoldenOnDevice, TracesHoldTheCpusNumbers) {
  const std::string folder = Golden(GetParam());
  const auto cpu = LoadOrFail(folder), gpu = LoadOrFail(folder, kGpu);
  ThreadPool pool(2);
  for (const Input& input : ReadInputs(folder)) {
    SCOPED_TRACE(input.name);
    const Pass here(*cpu, input, pool), there(*gpu, input, pool);
    ASSERT_EQ(there.trace.tokens, here.trace.tokens);
    for (size_t scan = 0; scan < here.trace.layers.size(); ++scan) {
      const LayerTrace &a = here.trace.layers[scan], &b = there.trace.layers[scan];
      const std::string where = "scan " + std::to_string(scan);
      ExpectClassF(AsDouble(a.selective), b.selective, where + ": selective");
      ExpectClassF(AsDouble(a.x_checked), b.x_checked, where + ": x");
      ExpectClassF(AsDouble(a.y_checked), b.y_checked, where + ": y");
    }
    ExpectClassF(AsDouble(here.resid), there.resid, "streams");
  }
}

TEST_P(GoldenOnDevice, EmbeddingsInPlaceOfTokensGiveTheSameBits) {
  const std::string folder = Golden(GetParam());
  const auto gpu = LoadOrFail(folder, kGpu);
  const ModelConfig& config = gpu->config();
  ThreadPool pool(2);
  for (const Input& input : ReadInputs(folder)) {
    const Pass whole(*gpu, input, pool);
    RecurrentState state = *gpu->NewState();
    std::vector<float> logits;
    Piece piece;
    piece.embeddings = {whole.trace.stream(0), static_cast<size_t>(whole.rows * config.d_model)};
    piece.state = &state;
    piece.logit_rows = whole.wanted;
    piece.logits = &logits;
    Workspace workspace;
    ASSERT_TRUE(gpu->ForwardLayers(pool, workspace, {&piece, 1}, 0, 1).ok());
    ASSERT_TRUE(gpu->ForwardLayers(pool, workspace, {&piece, 1}, 1, config.layers).ok());
    EXPECT_EQ(logits, whole.logits) << input.name;
  }
}

TEST_P(GoldenOnDevice, StatesAreTheCpus) {
  const std::string folder = Golden(GetParam());
  const auto cpu = LoadOrFail(folder), gpu = LoadOrFail(folder, kGpu);
  const ModelConfig& config = cpu->config();
  const StateSizes sizes = SizesOf(config);
  ThreadPool pool(2);
  for (const Input& input : ReadInputs(folder)) {
    Pass here(*cpu, input, pool), there(*gpu, input, pool);
    auto state = there.state.ToHost();
    ASSERT_TRUE(state.ok()) << state.status();
    EXPECT_EQ(state->pooled_tokens, here.state.pooled_tokens);
    for (int32_t layer = 0; layer < config.layers; ++layer) {
      for (int32_t direction = 0; direction < config.directions(); ++direction) {
        const auto values = [&](RecurrentState& s) {  // conv_state, then ssm_state
          return std::span<const float>(s.conv_state(layer, direction), sizes.conv + sizes.ssm);
        };
        ExpectClassF(AsDouble(values(here.state)), values(*state), input.name);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenOnDevice, ::testing::ValuesIn(GoldenModels()), TestNameOf);

// ---- bits ----

struct Shape {
  RandomModel model;
  bool bf16 = false;
};

std::vector<Shape> Shapes() {
  RandomModel odd;
  odd.d_inner = 45;
  odd.use_bias = true;
  RandomModel even;
  even.d_model = 64;
  even.d_inner = 128;
  even.d_state = 16;
  even.dt_rank = 4;
  even.layers = 3;
  even.tied_embeddings = false;
  RandomModel short_conv = even;  // no conv_state at all
  short_conv.d_conv = 1;
  RandomModel falcon;
  falcon.family = "falcon_mamba";
  RandomModel headed;
  headed.family = "mamba2";
  headed.d_model = 15;
  headed.delta_min = 0.02;
  headed.delta_max = 0.3;
  RandomModel mean = MeanPooled();
  RandomModel odd_half;  // bf16 rows that do not start on 16 bytes, of a head that is tied
  odd_half.d_model = 21;
  odd_half.d_inner = 42;
  return {{odd}, {even}, {short_conv}, {falcon}, {headed}, {mean}, {even, true}, {odd_half, true}};
}

// The shape's random weights; bf16 ones are cut, so that the CPU reads the same.
std::unique_ptr<const MambaModel> Load(const Shape& shape, const Device& device = kGpu) {
  if (!shape.bf16) return Random(shape.model, nullptr, device);
  StoredTensors halves = testing::RandomWeights(shape.model);
  for (auto& [name, tensor] : halves) {
    std::vector<uint16_t> high;
    for (const float value : testing::F32(tensor)) {
      high.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
    }
    tensor = testing::Store("BF16", tensor.shape, high);
  }
  return Random(shape.model, &halves, device);
}

class ModelOnDevice : public OnDevice<::testing::TestWithParam<int>> {
 protected:
  const Shape shape_ = Shapes()[GetParam()];
  ThreadPool pool_{2};
  Workspace workspace_;
};

TEST_P(ModelOnDevice, GivesTheCpusNumbers) {
  const auto cpu = Load(shape_, {}), gpu = Load(shape_);
  const std::vector<int32_t> tokens = RandomTokens(*cpu, 50, 1);
  Sequence here(*cpu), there(*gpu);
  here.Feed(tokens, pool_, workspace_);
  there.Feed(tokens, pool_, workspace_);
  ExpectClassF(AsDouble(here.logits()), there.logits(), "logits");
}

TEST_P(ModelOnDevice, StepsGiveTheBitsOfThePrefill) {
  const auto model = Load(shape_);
  const std::vector<int32_t> tokens = RandomTokens(*model, kEmulated ? 18 : 70, 1);
  Sequence prefill(*model, 70), steps(*model, 70);
  prefill.Feed(tokens, pool_, workspace_);
  for (const int32_t& token : tokens) steps.Feed({&token, 1}, pool_, workspace_);
  if (model->config().mean_pooled()) {  // a step answers too
    const size_t classes = model->config().classes;
    EXPECT_TRUE(Bits(std::span(steps.logits()).last(classes)) == Bits(prefill.logits()));
  } else {
    EXPECT_TRUE(steps.AllBits() == prefill.AllBits());
  }
}

TEST_P(ModelOnDevice, ACutAnywhereGivesTheBitsOfTheWhole) {
  const auto model = Load(shape_);
  const std::vector<int32_t> tokens = RandomTokens(*model, 70, 2);
  Sequence whole(*model, 70);
  whole.Feed(tokens, pool_, workspace_);
  const auto last = [&](const Sequence& sequence) {
    return Bits(std::span(sequence.logits()).last(model->config().outputs()));
  };
  for (size_t cut = 1; cut < tokens.size(); cut += kEmulated ? 17 : 1) {
    SCOPED_TRACE(cut);
    Sequence pieces(*model, 70);
    pieces.Feed(std::span(tokens).first(cut), pool_, workspace_);
    pieces.Feed(std::span(tokens).subspan(cut), pool_, workspace_);
    ASSERT_TRUE(last(pieces) == last(whole));
    if (!model->config().mean_pooled()) {
      ASSERT_TRUE(pieces.AllBits() == whole.AllBits());
    }
  }
}

// The contract: alone, first, last or in the middle of 32 others of mixed lengths, in prefill and
// in decode, traced or not.
TEST_P(ModelOnDevice, InABatchOf32ARequestGivesTheBitsItGivesAlone) {
  constexpr int kBatch = kEmulated ? 6 : 32, kSteps = kEmulated ? 1 : 4;
  const auto model = Load(shape_);
  const std::vector<int32_t> prompt = RandomTokens(*model, 21, 1);
  const std::vector<int32_t> steps = RandomTokens(*model, kSteps, 2);
  Sequence alone(*model, 21 + kSteps);
  alone.Feed(prompt, pool_, workspace_);
  for (const int32_t& token : steps) alone.Feed({&token, 1}, pool_, workspace_);
  const std::vector<uint32_t> expected = alone.AllBits();

  for (const int place : {0, kBatch / 2, kBatch - 1}) {
    SCOPED_TRACE(place);
    std::vector<Sequence> batch;
    std::vector<std::vector<int32_t>> prompts;
    for (int s = 0; s < kBatch; ++s) {
      const bool traced = s == place || s % 3 == 0;
      batch.emplace_back(*model, traced ? 100 : 0);
      prompts.push_back(s == place ? prompt : RandomTokens(*model, 1 + s * 7 % 40, 100 + s));
    }
    const auto pass = [&](const auto& tokens_of) {
      std::vector<Piece> pieces;
      for (int s = 0; s < kBatch; ++s) pieces.push_back(batch[s].Next(tokens_of(s)));
      ASSERT_TRUE(model->Forward(pool_, workspace_, pieces, Never).ok());
      for (int s = 0; s < kBatch; ++s) {
        EXPECT_EQ(pieces[s].nonfinite_layer, -1);
        batch[s].Take();
      }
    };
    pass([&](int s) { return std::span<const int32_t>(prompts[s]); });
    for (const int32_t& token : steps) {
      pass([&](int) { return std::span<const int32_t>(&token, 1); });
    }
    EXPECT_TRUE(batch[place].AllBits() == expected);
  }
}

TEST_P(ModelOnDevice, ManyWantedRowsGiveTheBitsOfEachAlone) {
  const auto model = Load(shape_);
  if (model->config().mean_pooled()) return;  // its answer is one
  constexpr int kTokens = 300;                // the head takes several rounds
  const std::vector<int32_t> tokens = RandomTokens(*model, kTokens, 5);
  const size_t outputs = model->config().outputs();
  Sequence all(*model);
  all.Feed(tokens, pool_, workspace_);
  for (const int32_t row : {0, 127, 128, 255, 256, kTokens - 1}) {
    if (kEmulated && row != 128) continue;
    auto state = model->NewState();
    ASSERT_TRUE(state.ok()) << state.status();
    std::vector<float> logits;
    Piece piece;
    piece.tokens = tokens;
    piece.state = &*state;
    piece.logit_rows = {&row, 1};
    piece.logits = &logits;
    ASSERT_TRUE(model->Forward(pool_, workspace_, {&piece, 1}, Never).ok());
    EXPECT_TRUE(Bits(logits) == Bits(std::span(all.logits()).subspan(row * outputs, outputs)))
        << row;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ModelOnDevice,
                         ::testing::Range(0, static_cast<int>(Shapes().size())));

class OnDeviceAlone : public OnDevice<::testing::Test> {
 protected:
  ThreadPool pool_{2};
  Workspace workspace_;
};

TEST_F(OnDeviceAlone, AnImageInABatchGivesTheBitsItGivesAlone) {
  const auto model = Random(Vision(), nullptr, kGpu);
  std::vector<Picture> alone, together;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    alone.emplace_back(*model, seed);
    together.emplace_back(*model, seed);
  }
  for (Picture& picture : alone) {
    Piece piece = picture.Next();
    ASSERT_TRUE(model->Forward(pool_, workspace_, {&piece, 1}, Never).ok());
    EXPECT_EQ(picture.trace.tokens, model->config().vision.tokens());
  }
  EXPECT_NE(alone[0].AllBits(), alone[1].AllBits());
  std::vector<Piece> pieces;
  for (Picture& picture : together) pieces.push_back(picture.Next());
  ASSERT_TRUE(model->Forward(pool_, workspace_, pieces, Never).ok());
  for (size_t i = 0; i < alone.size(); ++i) {
    EXPECT_TRUE(together[i].AllBits() == alone[i].AllBits()) << i;
  }
}

TEST_F(OnDeviceAlone, ModelsShareAWorkspace) {
  std::vector<std::unique_ptr<const MambaModel>> models;
  for (const Shape& shape : Shapes()) models.push_back(Load(shape));
  for (const auto& model : models) {
    const std::vector<int32_t> tokens = RandomTokens(*model, 30, 1);
    Workspace own;
    Sequence expected(*model, 30), shared(*model, 30);
    expected.Feed(tokens, pool_, own);
    shared.Feed(tokens, pool_, workspace_);
    EXPECT_TRUE(shared.AllBits() == expected.AllBits());
  }
}

// ---- stopping, numbers that are not, and too little memory ----

TEST_F(OnDeviceAlone, StopsBeforeTheLayerAtWhichItIsTold) {
  RandomModel shape;
  shape.layers = 4;
  const auto model = Random(shape, nullptr, kGpu);
  const std::vector<int32_t> tokens = RandomTokens(*model, 5, 7);
  for (int32_t layer = 0; layer < 4; ++layer) {
    SCOPED_TRACE(layer);
    auto state = model->NewState();
    ASSERT_TRUE(state.ok()) << state.status();
    Piece piece;
    piece.tokens = tokens;
    piece.state = &*state;
    int32_t asked = 0;
    const absl::Status status =
        model->Forward(pool_, workspace_, {&piece, 1}, [&] { return asked++ == layer; });
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
    EXPECT_EQ(asked, layer + 1);
    auto host = state->ToHost();
    ASSERT_TRUE(host.ok()) << host.status();
    for (int32_t l = 0; l < 4; ++l) {
      const float* values = host->ssm_state(l);
      const bool untouched = std::all_of(values, values + shape.d_state * shape.d_inner,
                                         [](float value) { return value == 0; });
      EXPECT_EQ(untouched, l >= layer) << l;
    }
  }
}

TEST_F(OnDeviceAlone, ASequenceThatOverflowsIsNamedWithItsLayerAndHarmsNoOther) {
  RandomModel shape;
  shape.layers = 4;
  shape.use_bias = true;
  StoredTensors weights = testing::RandomWeights(shape);
  const auto set = [&](const std::string& name, size_t at, float value) {
    std::memcpy(weights.at(name).bytes.data() + 4 * at, &value, 4);
  };
  // Token 7 and the bias of layer 2 together leave the floats; each alone does not.
  set("backbone.embeddings.weight", 7 * shape.d_model, 3e38f);
  set("backbone.layers.2.mixer.out_proj.bias", 0, 3e38f);
  const auto model = Random(shape, &weights, kGpu);

  const std::vector<std::vector<int32_t>> prompts = {{1, 2, 3}, {4, 5, 7, 6}, {8, 9}};
  std::vector<Sequence> together;
  for (size_t s = 0; s < prompts.size(); ++s) together.emplace_back(*model, 10);
  std::vector<Piece> pieces;
  for (size_t s = 0; s < prompts.size(); ++s) pieces.push_back(together[s].Next(prompts[s]));
  ASSERT_TRUE(model->Forward(pool_, workspace_, pieces, Never).ok());
  EXPECT_EQ(pieces[0].nonfinite_layer, -1);
  EXPECT_EQ(pieces[1].nonfinite_layer, 2);
  EXPECT_EQ(pieces[2].nonfinite_layer, -1);
  for (const size_t s : {0, 2}) {
    together[s].Take();
    Sequence alone(*model, 10);
    alone.Feed(prompts[s], pool_, workspace_);
    EXPECT_TRUE(together[s].AllBits() == alone.AllBits());
  }
}

TEST_F(OnDeviceAlone, AHeadThatOverflowsIsNamedAsTheLayerAfterTheLast) {
  RandomModel shape;
  StoredTensors weights = testing::RandomWeights(shape);
  const std::vector<float> norm_f(shape.d_model, 3e38f);
  weights["backbone.norm_f.weight"] = testing::StoreF32({shape.d_model}, norm_f);
  const auto model = Random(shape, &weights, kGpu);
  const std::vector<int32_t> tokens = {1, 2, 3};
  Sequence sequence(*model);
  Piece piece = sequence.Next(tokens);
  ASSERT_TRUE(model->Forward(pool_, workspace_, {&piece, 1}, Never).ok());
  EXPECT_EQ(piece.nonfinite_layer, shape.layers);
  piece.logit_rows = {};
  ASSERT_TRUE(model->Forward(pool_, workspace_, {&piece, 1}, Never).ok());
  EXPECT_EQ(piece.nonfinite_layer, -1) << "no logits were asked for";
}

TEST_F(OnDeviceAlone, AShortageEndsOnePassAndLaterOnesWork) {
  RandomModel shape;  // whose state and whose pass take tens of megabytes
  shape.d_model = 64;
  shape.d_inner = 4096;
  shape.d_state = 128;
  const auto model = Random(shape, nullptr, kGpu);
  const std::vector<int32_t> small = RandomTokens(*model, 1, 1);
  const std::vector<int32_t> large = RandomTokens(*model, 1024, 2);
  Sequence before(*model), during(*model), after(*model), late(*model);
  before.Feed(small, pool_, workspace_);
  {
    std::vector<kernels::cuda::DeviceArray<char>> hoard;
    for (int64_t bytes = int64_t{1} << 36; bytes >= 1 << 20;) {
      auto taken = kernels::cuda::DeviceArray<char>::Create(bytes);
      if (taken.ok()) {
        hoard.push_back(*std::move(taken));
      } else {
        bytes /= 2;
      }
    }
    const absl::Status no_state = model->NewState().status();
    EXPECT_EQ(no_state.code(), absl::StatusCode::kResourceExhausted) << no_state;
    Piece piece = during.Next(large);
    const absl::Status no_pass = model->Forward(pool_, workspace_, {&piece, 1}, Never);
    EXPECT_EQ(no_pass.code(), absl::StatusCode::kResourceExhausted) << no_pass;
  }
  after.Feed(small, pool_, workspace_);
  EXPECT_TRUE(after.AllBits() == before.AllBits());
  if (!kEmulated) late.Feed(large, pool_, workspace_);
}

TEST_F(OnDeviceAlone, TheDeviceHasANameAndMemory) {
  const auto model = Random({}, nullptr, kGpu);
  EXPECT_EQ(model->device(), kGpu);
  EXPECT_NE(Describe(kGpu), "");
  const auto memory = MemoryOf(kGpu);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_GT(memory->used_bytes, 0);
  EXPECT_LT(memory->used_bytes, memory->total_bytes);
  EXPECT_EQ(*ParseDevice("cuda"), kGpu);
  EXPECT_EQ(*ParseDevice("cuda:0"), kGpu);
}

}  // namespace
}  // namespace mambascope::model
