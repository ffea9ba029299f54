#include "server/model/mamba_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/model/sequence.h"

namespace mambascope::model {
namespace {

using testing::F32;
using ::testing::HasSubstr;
using testing::RandomModel;
using testing::StoredTensors;

// ---- bits do not depend on how the work is arranged ----

// Odd sizes, and one with the widths of vector registers.
std::vector<RandomModel> Shapes() {
  RandomModel odd;
  odd.d_inner = 45;
  odd.use_bias = true;
  odd.conv_activation = "relu";
  RandomModel even;
  even.d_model = 64;
  even.d_inner = 128;
  even.d_state = 16;
  even.dt_rank = 4;
  even.layers = 3;
  even.tied_embeddings = false;
  even.seed = 2;
  RandomModel short_conv = even;  // no conv_state at all
  short_conv.d_conv = 1;
  RandomModel falcon;
  falcon.family = "falcon_mamba";
  RandomModel headed;
  headed.family = "mamba2";
  headed.d_model = 15;
  headed.delta_min = 0.02;
  headed.delta_max = 0.3;
  RandomModel wide = headed;
  wide.heads = 4;
  wide.head_dim = 32;
  wide.groups = 1;
  wide.d_model = 64;
  wide.d_state = 16;
  wide.use_bias = true;
  RandomModel last = odd;
  last.classes = 4;
  return {odd, even, short_conv, falcon, headed, wide, last};
}

TEST(MambaModel, StepsGiveTheBitsOfThePrefill) {
  ThreadPool pool(2);
  for (const RandomModel& shape : Shapes()) {
    const std::unique_ptr<const MambaModel> model = Random(shape);
    const std::vector<int32_t> tokens = RandomTokens(*model, 50, 1);
    Workspace workspace;
    Sequence prefill(*model, 50), steps(*model, 50);
    prefill.Feed(tokens, pool, workspace);
    for (const int32_t& token : tokens) steps.Feed({&token, 1}, pool, workspace);
    EXPECT_TRUE(steps.AllBits() == prefill.AllBits());
  }
}

TEST(MambaModel, ACutAnywhereGivesTheBitsOfTheWhole) {
  ThreadPool pool(2);
  for (const RandomModel& shape : Shapes()) {
    const std::unique_ptr<const MambaModel> model = Random(shape);
    const std::vector<int32_t> tokens = RandomTokens(*model, 70, 2);
    Workspace workspace;
    Sequence whole(*model, 70);
    whole.Feed(tokens, pool, workspace);
    for (size_t cut = 1; cut < tokens.size(); ++cut) {
      SCOPED_TRACE(cut);
      Sequence pieces(*model, 70);
      pieces.Feed(std::span(tokens).first(cut), pool, workspace);
      pieces.Feed(std::span(tokens).subspan(cut), pool, workspace);
      ASSERT_TRUE(pieces.AllBits() == whole.AllBits());
    }
  }
}

TEST(MambaModel, AStateCopyGoesOnByItself) {
  ThreadPool pool(1);
  const std::unique_ptr<const MambaModel> model = Random({});
  const std::vector<int32_t> tokens = RandomTokens(*model, 20, 3);
  Workspace workspace;
  Sequence first(*model), second(*model);
  first.Feed(std::span(tokens).first(9), pool, workspace);
  second.state() = first.state().Copy();
  first.Feed(std::span(tokens).subspan(9), pool, workspace);
  second.Feed(std::span(tokens).subspan(9), pool, workspace);
  const std::vector<float> tail(first.logits().begin() + 9 * model->config().vocabulary,
                                first.logits().end());
  EXPECT_TRUE(Bits(tail) == Bits(second.logits()));
}

TEST(MambaModel, APackedSequenceGivesTheBitsItGivesAlone) {
  ThreadPool pool(2);
  const std::vector<std::vector<int>> packings = {
      {33, 1, 7, 16, 2}, {1, 33, 5, 8, 12}, {4, 1, 1, 1, 33}, {1, 1, 1, 1, 1}, {17}};
  for (const RandomModel& shape : Shapes()) {
    const std::unique_ptr<const MambaModel> model = Random(shape);
    for (const std::vector<int>& lengths : packings) {
      SCOPED_TRACE(::testing::PrintToString(lengths));
      std::vector<Sequence> together, alone;
      std::vector<std::vector<int32_t>> heads, tails;
      Workspace workspace;
      for (size_t s = 0; s < lengths.size(); ++s) {
        const int64_t capacity =
            s % 2 == 0 ? 3 + lengths[s] : 0;  // some with a trace, some without
        together.emplace_back(*model, capacity);
        alone.emplace_back(*model, capacity);
        heads.push_back(RandomTokens(*model, 3, 100 + s));  // so that states are not zero
        tails.push_back(RandomTokens(*model, lengths[s], 200 + s));
        together[s].Feed(heads[s], pool, workspace);
        alone[s].Feed(heads[s], pool, workspace);
        alone[s].Feed(tails[s], pool, workspace);
      }
      std::vector<Piece> pieces;
      for (size_t s = 0; s < lengths.size(); ++s) pieces.push_back(together[s].Next(tails[s]));
      ASSERT_TRUE(model->Forward(pool, workspace, pieces, Never).ok());
      for (size_t s = 0; s < lengths.size(); ++s) {
        SCOPED_TRACE(s);
        together[s].Take();
        EXPECT_EQ(pieces[s].nonfinite_layer, -1);
        EXPECT_TRUE(together[s].AllBits() == alone[s].AllBits());
      }
    }
  }
}

// The contract: alone, first, last or in the middle of 32 others of mixed lengths, in prefill and
// in decode.
TEST(MambaModel, InABatchOf32ARequestGivesTheBitsItGivesAlone) {
  ThreadPool pool(2);
  constexpr int kBatch = 32, kSteps = 4;
  for (const RandomModel& shape : Shapes()) {
    if (shape.classes > 0) continue;  // its answer is one
    SCOPED_TRACE(shape.family + ", d_inner " + std::to_string(shape.inner()));
    const std::unique_ptr<const MambaModel> model = Random(shape);
    const std::vector<int32_t> prompt = RandomTokens(*model, 21, 1);
    const std::vector<int32_t> steps = RandomTokens(*model, kSteps, 2);
    Workspace workspace;
    Sequence alone(*model);
    alone.Feed(prompt, pool, workspace);
    for (const int32_t& token : steps) alone.Feed({&token, 1}, pool, workspace);
    const std::vector<uint32_t> expected = alone.AllBits();

    for (const int place : {0, 13, kBatch - 1}) {
      SCOPED_TRACE(place);
      std::vector<Sequence> batch;
      std::vector<std::vector<int32_t>> prompts;
      for (int s = 0; s < kBatch; ++s) {
        batch.emplace_back(*model);
        prompts.push_back(s == place ? prompt : RandomTokens(*model, 1 + s * 7 % 40, 100 + s));
      }
      const auto pass = [&](const auto& tokens_of) {
        std::vector<Piece> pieces;
        for (int s = 0; s < kBatch; ++s) pieces.push_back(batch[s].Next(tokens_of(s)));
        ASSERT_TRUE(model->Forward(pool, workspace, pieces, Never).ok());
        for (Sequence& sequence : batch) sequence.Take();
      };
      pass([&](int s) { return std::span<const int32_t>(prompts[s]); });
      for (const int32_t& token : steps) {
        pass([&](int) { return std::span<const int32_t>(&token, 1); });
      }
      EXPECT_TRUE(batch[place].AllBits() == expected);
    }
  }
}

TEST(MambaModel, OneThreadGivesTheBitsOfMany) {
  for (const RandomModel& shape : Shapes()) {
    const std::unique_ptr<const MambaModel> model = Random(shape);
    const std::vector<int32_t> tokens = RandomTokens(*model, 40, 4);
    std::vector<uint32_t> bits;
    for (const int threads : {1, 2, 5}) {
      ThreadPool pool(threads);
      Workspace workspace;
      Sequence sequence(*model, 40);
      sequence.Feed(std::span(tokens).first(30), pool, workspace);
      for (int i = 30; i < 40; ++i) sequence.Feed({&tokens[i], 1}, pool, workspace);
      if (threads == 1) bits = sequence.AllBits();
      EXPECT_TRUE(sequence.AllBits() == bits) << threads << " threads";
    }
  }
}

TEST(MambaModel, OnlyTheWantedRowsAreGivenAndTheirBitsAreTheSame) {
  ThreadPool pool(2);
  const std::unique_ptr<const MambaModel> model = Random({});
  const size_t vocabulary = model->config().vocabulary;
  const std::vector<int32_t> tokens = RandomTokens(*model, 12, 5);
  Workspace workspace;
  Sequence all(*model);
  all.Feed(tokens, pool, workspace);
  const std::vector<std::vector<int32_t>> wanted = {{11}, {}, {0, 3, 11}};
  std::vector<RecurrentState> states;
  std::vector<std::vector<float>> logits(wanted.size(), {1, 2, 3});  // what was there is replaced
  std::vector<Piece> pieces;
  for (size_t s = 0; s < wanted.size(); ++s) states.emplace_back(model->config());
  for (size_t s = 0; s < wanted.size(); ++s) {
    Piece piece;
    piece.tokens = tokens;
    piece.state = &states[s];
    piece.logit_rows = wanted[s];
    piece.logits = &logits[s];
    pieces.push_back(piece);
  }
  ASSERT_TRUE(model->Forward(pool, workspace, pieces, Never).ok());
  for (size_t s = 0; s < wanted.size(); ++s) {
    std::vector<float> expected;
    for (const int32_t row : wanted[s]) {
      const float* first = all.logits().data() + row * vocabulary;
      expected.insert(expected.end(), first, first + vocabulary);
    }
    EXPECT_TRUE(Bits(logits[s]) == Bits(expected)) << s;
  }
}

TEST(MambaModel, BF16WeightsGiveTheBitsOfTheirFloats) {
  ThreadPool pool(2);
  const RandomModel shape = Shapes()[1];
  StoredTensors halves = testing::RandomWeights(shape), floats;
  for (auto& [name, tensor] : halves) {
    std::vector<uint16_t> high;
    std::vector<float> widened;
    for (const float value : F32(tensor)) {
      high.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
      widened.push_back(std::bit_cast<float>(static_cast<uint32_t>(high.back()) << 16));
    }
    floats[name] = testing::StoreF32(tensor.shape, widened);
    tensor = testing::Store("BF16", tensor.shape, high);
  }
  const std::unique_ptr<const MambaModel> stored = Random(shape, &halves);
  const std::unique_ptr<const MambaModel> reference = Random(shape, &floats);
  EXPECT_EQ(stored->weights().stored_dtype(), "BF16");
  const std::vector<int32_t> tokens = RandomTokens(*stored, 30, 6);
  Workspace workspace;
  Sequence a(*stored, 30), b(*reference, 30);
  a.Feed(tokens, pool, workspace);
  b.Feed(tokens, pool, workspace);
  EXPECT_TRUE(a.AllBits() == b.AllBits());
}

// ---- stopping, and numbers that are not ----

TEST(MambaModel, StopsBeforeTheLayerAtWhichItIsTold) {
  ThreadPool pool(1);
  RandomModel shape;
  shape.layers = 4;
  const std::unique_ptr<const MambaModel> model = Random(shape);
  const std::vector<int32_t> tokens = RandomTokens(*model, 5, 7);
  for (int32_t layer = 0; layer < 4; ++layer) {
    SCOPED_TRACE(layer);
    RecurrentState state(model->config());
    Piece piece;
    piece.tokens = tokens;
    piece.state = &state;
    Workspace workspace;
    int32_t asked = 0;
    const absl::Status status =
        model->Forward(pool, workspace, {&piece, 1}, [&] { return asked++ == layer; });
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
    EXPECT_EQ(asked, layer + 1);
    const auto untouched = [&](int32_t l) {
      const float* values = state.ssm_state(l);
      return std::all_of(values, values + shape.d_state * shape.d_inner,
                         [](float value) { return value == 0; });
    };
    for (int32_t l = 0; l < 4; ++l) EXPECT_EQ(untouched(l), l >= layer) << l;
  }
}

TEST(MambaModel, ASequenceThatOverflowsIsNamedWithItsLayerAndHarmsNoOther) {
  ThreadPool pool(2);
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
  const std::unique_ptr<const MambaModel> model = Random(shape, &weights);

  const std::vector<std::vector<int32_t>> prompts = {{1, 2, 3}, {4, 5, 7, 6}, {8, 9}};
  std::vector<Sequence> together;
  for (size_t s = 0; s < prompts.size(); ++s) together.emplace_back(*model, 10);
  std::vector<Piece> pieces;
  for (size_t s = 0; s < prompts.size(); ++s) pieces.push_back(together[s].Next(prompts[s]));
  Workspace workspace;
  ASSERT_TRUE(model->Forward(pool, workspace, pieces, Never).ok());
  EXPECT_EQ(pieces[0].nonfinite_layer, -1);
  EXPECT_EQ(pieces[1].nonfinite_layer, 2);
  EXPECT_EQ(pieces[2].nonfinite_layer, -1);
  for (const size_t s : {0, 2}) {
    together[s].Take();
    Sequence alone(*model, 10);
    alone.Feed(prompts[s], pool, workspace);
    EXPECT_TRUE(together[s].AllBits() == alone.AllBits());
  }
}

TEST(MambaModel, AHeadThatOverflowsIsNamedAsTheLayerAfterTheLast) {
  ThreadPool pool(1);
  RandomModel shape;
  StoredTensors weights = testing::RandomWeights(shape);
  std::vector<float> norm_f(shape.d_model, 3e38f);
  weights["backbone.norm_f.weight"] = testing::StoreF32({shape.d_model}, norm_f);
  const std::unique_ptr<const MambaModel> model = Random(shape, &weights);
  const std::vector<int32_t> tokens = {1, 2, 3};
  Sequence sequence(*model);
  Workspace workspace;
  Piece piece = sequence.Next(tokens);
  ASSERT_TRUE(model->Forward(pool, workspace, {&piece, 1}, Never).ok());
  EXPECT_EQ(piece.nonfinite_layer, shape.layers);
  piece.logit_rows = {};
  ASSERT_TRUE(model->Forward(pool, workspace, {&piece, 1}, Never).ok());
  EXPECT_EQ(piece.nonfinite_layer, -1) << "no logits were asked for";
}

// ---- sizes, and folders that are not models ----

TEST(MambaModel, NoPiecesAreNoWork) {
  ThreadPool pool(1);
  Workspace workspace;
  EXPECT_TRUE(Random({})->Forward(pool, workspace, {}, Never).ok());
}

TEST(MambaModel, TheWorkspaceKeepsItsBuffersWhileSizesDoNotGrow) {
  ThreadPool pool(1);
  const std::unique_ptr<const MambaModel> model = Random({});
  Workspace workspace;
  Sequence sequence(*model, 60);
  sequence.Feed(RandomTokens(*model, 20, 8), pool, workspace);
  const float *h = workspace.h.data(), *xz = workspace.xz.data(), *y = workspace.y.data();
  sequence.Feed(RandomTokens(*model, 20, 9), pool, workspace);
  sequence.Feed(RandomTokens(*model, 1, 9), pool, workspace);
  EXPECT_EQ(workspace.h.data(), h);
  EXPECT_EQ(workspace.xz.data(), xz);
  EXPECT_EQ(workspace.y.data(), y);
}

TEST(MambaModel, SizesInBytesAreThoseOfTheDesign) {
  ModelConfig config;  // mamba-130m
  config.vocabulary = 50280;
  config.d_model = 768;
  config.d_inner = 1536;
  config.d_state = 16;
  config.d_conv = 4;
  config.dt_rank = 48;
  config.layers = 24;
  EXPECT_EQ(SequenceTrace::Bytes(config, 10), 10 * 24 * 576);
  EXPECT_EQ(RecurrentState::Bytes(config), 24 * (3 + 16) * 1536 * 4);
  const SequenceTrace trace(config, 2);
  ASSERT_EQ(trace.checked_channels.size(), 32u);
  for (int32_t c = 0; c < 32; ++c) EXPECT_EQ(trace.checked_channels[c], 48 * c);
}

TEST(MambaModel, AFolderThatIsNoModelIsRefusedByFile) {
  const std::string folder = ::testing::TempDir() + "/mamba_model_refused";
  std::filesystem::remove_all(folder);
  const auto refusal = [&] { return std::string(MambaModel::Load(folder).status().message()); };
  EXPECT_EQ(MambaModel::Load(folder).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(refusal(), folder + "/config.json: there is no such file");

  testing::WriteRandomModel(folder, {});
  testing::WriteBytes(folder + "/config.json", R"({"model_type": "mamba3"})");
  EXPECT_EQ(refusal(), folder +
                           "/config.json: model_type: 'mamba3' is not supported; supported: "
                           "mamba, falcon_mamba, mamba2, vim");

  testing::WriteBytes(folder + "/config.json", std::string((1 << 20) + 1, ' '));
  EXPECT_EQ(refusal(), folder + "/config.json: has more than 1048576 bytes");

  testing::WriteRandomModel(folder, {});
  const std::string sound = testing::ReadBytes(folder + "/model.safetensors");
  testing::WriteBytes(folder + "/model.safetensors", sound.substr(0, sound.size() - 1));
  EXPECT_THAT(refusal(), HasSubstr(folder + "/model.safetensors: tensor '"));
  EXPECT_THAT(refusal(), HasSubstr("is the file truncated?"));

  std::filesystem::remove(folder + "/model.safetensors");
  EXPECT_EQ(MambaModel::Load(folder).status().code(), absl::StatusCode::kNotFound);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace mambascope::model
