#include "server/model/mamba_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/support/random_model.h"
#include "tests/support/safetensors_io.h"

namespace mambascope::model {
namespace {

using testing::F32;
using testing::F64;
using ::testing::HasSubstr;
using testing::RandomModel;
using testing::StoredTensors;

bool Never() { return false; }

std::string Golden(const std::string& model) {
  return MAMBASCOPE_SOURCE_DIR "/tests/golden/" + model;
}

std::unique_ptr<const MambaModel> LoadOrFail(const std::string& folder) {
  auto model = MambaModel::Load(folder);
  if (!model.ok()) throw std::runtime_error(model.status().ToString());
  return *std::move(model);
}

// A random model in a folder of its own, which is gone once the model is loaded.
std::unique_ptr<const MambaModel> Random(const RandomModel& model,
                                         const StoredTensors* weights = nullptr) {
  const std::string folder = ::testing::TempDir() + "/mamba_model_" +
                             ::testing::UnitTest::GetInstance()->current_test_info()->name();
  testing::WriteRandomModel(folder, model);
  if (weights != nullptr) testing::WriteSafetensors(folder + "/model.safetensors", *weights);
  auto loaded = LoadOrFail(folder);
  std::filesystem::remove_all(folder);
  return loaded;
}

std::vector<int32_t> RandomTokens(const MambaModel& model, int count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % model.config().vocabulary);
  return tokens;
}

std::vector<int32_t> AllRows(size_t count) {
  std::vector<int32_t> rows(count);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

std::vector<uint32_t> Bits(std::span<const float> values) {
  std::vector<uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

// One sequence, its state and what came out, by any number of passes.
class Sequence {
 public:
  explicit Sequence(const MambaModel& model, int64_t trace_capacity = 0)
      : model_(model), state_(model.config()) {
    if (trace_capacity > 0)
      trace_ = std::make_unique<SequenceTrace>(model.config(), trace_capacity);
  }

  // The piece of the next tokens, all of whose logits are wanted; Take joins what it gave.
  Piece Next(std::span<const int32_t> tokens) {
    rows_ = AllRows(tokens.size());
    Piece piece;
    piece.tokens = tokens;
    piece.state = &state_;
    piece.trace = trace_.get();
    piece.logit_rows = rows_;
    piece.logits = &piece_logits_;
    return piece;
  }
  void Take() { logits_.insert(logits_.end(), piece_logits_.begin(), piece_logits_.end()); }

  void Feed(std::span<const int32_t> tokens, ThreadPool& pool, Workspace& workspace) {
    Piece piece = Next(tokens);
    ASSERT_TRUE(model_.Forward(pool, workspace, {&piece, 1}, Never).ok());
    ASSERT_EQ(piece.nonfinite_layer, -1);
    Take();
  }

  const std::vector<float>& logits() const { return logits_; }
  RecurrentState& state() { return state_; }
  const SequenceTrace& trace() const { return *trace_; }

  // Everything a later pass or an explanation could see.
  std::vector<uint32_t> AllBits() {
    std::vector<uint32_t> bits = Bits(logits_);
    const ModelConfig& config = model_.config();
    const auto add = [&](const float* values, size_t count) {
      const std::vector<uint32_t> more = Bits({values, count});
      bits.insert(bits.end(), more.begin(), more.end());
    };
    for (int32_t l = 0; l < config.layers; ++l) {
      add(state_.conv_state(l), static_cast<size_t>(config.d_conv - 1) * config.d_inner);
      add(state_.ssm_state(l), static_cast<size_t>(config.d_state) * config.d_inner);
      if (trace_ == nullptr) continue;
      const LayerTrace& layer = trace_->layers[l];
      const size_t checked = trace_->tokens * trace_->checked_channels.size();
      add(layer.x_dbl.data(), trace_->tokens * (config.dt_rank + 2 * config.d_state));
      add(layer.x_checked.data(), checked);
      add(layer.y_checked.data(), checked);
    }
    return bits;
  }

 private:
  const MambaModel& model_;
  RecurrentState state_;
  std::unique_ptr<SequenceTrace> trace_;
  std::vector<int32_t> rows_;
  std::vector<float> piece_logits_, logits_;
};

// ---- against float64 results of the independent oracle ----

// Tolerance class F of the golden data: 5e-5 of the largest value, which is taken as at least 0.1.
void ExpectClassF(const std::vector<double>& expected, std::span<const float> got,
                  const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  double scale = 0.1, error = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    scale = std::max(scale, std::abs(expected[i]));
    const double difference = std::abs(expected[i] - got[i]);
    error = std::isnan(difference) ? INFINITY : std::max(error, difference);
  }
  EXPECT_LE(error, 5e-5 * scale) << what;
}

class GoldenModel : public ::testing::TestWithParam<std::string> {
 protected:
  GoldenModel()
      : model_(LoadOrFail(Golden(GetParam()))),
        inputs_(nlohmann::json::parse(testing::ReadBytes(Golden(GetParam()) + "/inputs.json"))
                    .at("inputs")),
        forward_(testing::ReadSafetensors(Golden(GetParam()) + "/forward.safetensors")) {}

  ThreadPool pool_{2};
  const std::unique_ptr<const MambaModel> model_;
  const nlohmann::json inputs_;
  const StoredTensors forward_;
};

TEST_P(GoldenModel, LogitsAndResidualStreamAreTheOracles) {
  for (const auto& [name, input] : inputs_.items()) {
    const std::vector<int32_t> tokens = input.at("tokens");
    const ModelConfig& config = model_->config();
    Sequence sequence(*model_);
    Workspace workspace;
    std::vector<float> resid;  // `stop` is asked before each layer: the stream that enters it
    const auto keep = [&] {
      resid.insert(resid.end(), workspace.h.data(),
                   workspace.h.data() + tokens.size() * config.d_model);
      return false;
    };
    Piece piece = sequence.Next(tokens);
    ASSERT_TRUE(model_->Forward(pool_, workspace, {&piece, 1}, keep).ok());
    keep();
    sequence.Take();
    ExpectClassF(F64(forward_.at(name + "/logits")), sequence.logits(), name + "/logits");
    ExpectClassF(F64(forward_.at(name + "/resid")), resid, name + "/resid");
  }
}

TEST_P(GoldenModel, TheTraceHoldsTheOraclesScan) {
  const ModelConfig& config = model_->config();
  const StoredTensors weights = testing::ReadSafetensors(Golden(GetParam()) + "/model.safetensors");
  for (const std::string name : {"len1", "len7"}) {
    const std::vector<int32_t> tokens = inputs_.at(name).at("tokens");
    const int64_t count = tokens.size();
    Sequence sequence(*model_, count);
    Workspace workspace;
    sequence.Feed(tokens, pool_, workspace);
    const SequenceTrace& trace = sequence.trace();
    ASSERT_EQ(trace.tokens, count);

    for (int32_t l = 0; l < config.layers; ++l) {
      const std::string layer = name + "/layer" + std::to_string(l) + "/";
      Array<float> delta;
      const kernels::ScanParameters scan = model_->ScanParametersOf(pool_, trace, l, count, delta);
      ASSERT_EQ(scan.delta, delta.data());
      ExpectClassF(F64(forward_.at(layer + "delta")),
                   {delta.data(), static_cast<size_t>(count * config.d_inner)}, layer + "delta");
      std::vector<float> B, C;
      for (int64_t i = 0; i < count; ++i) {
        B.insert(B.end(), scan.B + i * scan.bc_stride, scan.B + i * scan.bc_stride + scan.d_state);
        C.insert(C.end(), scan.C + i * scan.bc_stride, scan.C + i * scan.bc_stride + scan.d_state);
      }
      ExpectClassF(F64(forward_.at(layer + "B")), B, layer + "B");
      ExpectClassF(F64(forward_.at(layer + "C")), C, layer + "C");

      const std::vector<double> x = F64(forward_.at(layer + "x")),
                                y = F64(forward_.at(layer + "y"));
      const std::vector<float> D =
          F32(weights.at("backbone.layers." + std::to_string(l) + ".mixer.D"));
      std::vector<double> x_checked, y_checked;
      for (int64_t i = 0; i < count; ++i) {
        for (const int32_t d : trace.checked_channels) {
          const int64_t at = i * config.d_inner + d;
          x_checked.push_back(x[at]);
          y_checked.push_back(y[at] + D[d] * x[at]);
        }
      }
      ExpectClassF(x_checked, trace.layers[l].x_checked, layer + "x");
      ExpectClassF(y_checked, trace.layers[l].y_checked, layer + "y + D x");
    }
  }
}

TEST_P(GoldenModel, ScanParametersRebuildTheCheckedOutputs) {
  const ModelConfig& config = model_->config();
  const StoredTensors weights = testing::ReadSafetensors(Golden(GetParam()) + "/model.safetensors");
  const std::vector<int32_t> tokens = inputs_.at("len33").at("tokens");
  Sequence sequence(*model_, tokens.size());
  Workspace workspace;
  sequence.Feed(tokens, pool_, workspace);
  const SequenceTrace& trace = sequence.trace();
  for (int32_t l = 0; l < config.layers; ++l) {
    Array<float> delta;
    const kernels::ScanParameters scan =
        model_->ScanParametersOf(pool_, trace, l, trace.tokens, delta);
    const std::vector<float> D =
        F32(weights.at("backbone.layers." + std::to_string(l) + ".mixer.D"));
    for (size_t c = 0; c < trace.checked_channels.size(); ++c) {
      const int32_t d = trace.checked_channels[c];
      std::vector<double> state(config.d_state, 0), rebuilt;
      for (int64_t i = 0; i < trace.tokens; ++i) {
        const size_t at = i * trace.checked_channels.size() + c;
        const double x = trace.layers[l].x_checked[at], step = delta[i * config.d_inner + d];
        double y = D[d] * x;
        for (int32_t n = 0; n < config.d_state; ++n) {
          state[n] = std::exp(step * scan.A[n * config.d_inner + d]) * state[n] +
                     step * scan.B[i * scan.bc_stride + n] * x;
          y += scan.C[i * scan.bc_stride + n] * state[n];
        }
        rebuilt.push_back(y);
      }
      std::vector<float> checked;
      for (int64_t i = 0; i < trace.tokens; ++i) {
        checked.push_back(trace.layers[l].y_checked[i * trace.checked_channels.size() + c]);
      }
      ExpectClassF(rebuilt, checked, "layer" + std::to_string(l) + "/y");
    }
  }
}

TEST_P(GoldenModel, ReluScanParametersDifferInDeltaAlone) {
  const std::vector<int32_t> tokens = inputs_.at("len7").at("tokens");
  Sequence sequence(*model_, tokens.size());
  Workspace workspace;
  sequence.Feed(tokens, pool_, workspace);
  Array<float> softplus, relu;
  const auto scan = model_->ScanParametersOf(pool_, sequence.trace(), 0, 7, softplus);
  const auto simple = model_->ReluScanParametersOf(pool_, sequence.trace(), 0, 7, relu);
  EXPECT_EQ(simple.A, scan.A);
  EXPECT_EQ(simple.B, scan.B);
  EXPECT_EQ(simple.C, scan.C);
  std::vector<double> expected;  // softplus(v) = log(1 + e^v), so v = log(e^delta - 1)
  for (const float delta : softplus) {
    expected.push_back(std::max(0.0, std::log(std::expm1(static_cast<double>(delta)))));
  }
  ExpectClassF(expected, relu, "delta_relu");
}

INSTANTIATE_TEST_SUITE_P(All, GoldenModel,
                         ::testing::Values("mamba1-tiny", "mamba1-odd", "mamba1-identity-conv"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(MambaModel, LogitsAreThoseOfTransformers) {
  const std::unique_ptr<const MambaModel> model = LoadOrFail(Golden("transformers"));
  const StoredTensors expected =
      testing::ReadSafetensors(Golden("transformers") + "/expected.safetensors");
  ThreadPool pool(2);
  Workspace workspace;
  Sequence sequence(*model);
  sequence.Feed(testing::I32(expected.at("tokens")), pool, workspace);
  const std::vector<float> logits = F32(expected.at("logits"));
  ASSERT_EQ(sequence.logits().size(), logits.size());
  float largest = 0, difference = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    largest = std::max(largest, std::abs(logits[i]));
    difference = std::max(difference, std::abs(logits[i] - sequence.logits()[i]));
  }
  EXPECT_LE(difference, 1e-4f * largest);  // two fp32 sums in different orders
}

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
  return {odd, even, short_conv};
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
  testing::WriteBytes(folder + "/config.json", R"({"model_type": "mamba2"})");
  EXPECT_EQ(refusal(),
            folder + "/config.json: model_type: 'mamba2' is not supported; supported: mamba");

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
