// Every golden model's forward pass against the independent float64 oracle, and transformers'
// logits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/model/golden.h"
#include "tests/model/sequence.h"

namespace mambascope::model {
namespace {

using testing::F32;
using testing::F64;
using testing::StoredTensors;

class GoldenModel : public ::testing::TestWithParam<std::string> {
 protected:
  // Where the oracle keeps a scan's numbers.
  static std::string Place(const std::string& input, int32_t layer, int32_t direction) {
    return input + "/layer" + std::to_string(layer) + (direction == 1 ? "/bwd/" : "/");
  }
  std::vector<float> Skip(int32_t layer, int32_t direction) const {
    const bool vision = model_->config().family == Family::kVim;
    return F32(weights_.at((vision ? "layers." : "backbone.layers.") + std::to_string(layer) +
                           ".mixer.D" + (direction == 1 ? "_b" : "")));
  }

  ThreadPool pool_{2};
  const std::string folder_ = Golden(GetParam());
  const std::unique_ptr<const MambaModel> model_ = LoadOrFail(folder_);
  const std::vector<Input> inputs_ = ReadInputs(folder_);
  const StoredTensors forward_ = testing::ReadSafetensors(folder_ + "/forward.safetensors");
  const StoredTensors weights_ = testing::ReadSafetensors(folder_ + "/model.safetensors");
};

TEST_P(GoldenModel, LogitsAndResidualStreamAreTheOracles) {
  ASSERT_FALSE(inputs_.empty());
  for (const Input& input : inputs_) {
    const Pass pass(*model_, input, pool_);
    ExpectClassF(F64(forward_.at(input.name + "/logits")), pass.logits, input.name + "/logits");
    ExpectClassF(F64(forward_.at(input.name + "/resid")), pass.resid, input.name + "/resid");
  }
}

TEST_P(GoldenModel, TheTraceHoldsTheOraclesScan) {
  const ModelConfig& config = model_->config();
  for (const Input& input : inputs_) {
    const Pass pass(*model_, input, pool_);
    ASSERT_EQ(pass.trace.tokens, pass.rows);
    for (int32_t scan_index = 0; scan_index < config.layers * config.directions(); ++scan_index) {
      const int32_t l = scan_index / config.directions(),
                    direction = scan_index % config.directions();
      const std::string place = Place(input.name, l, direction);
      if (forward_.count(place + "delta") == 0) continue;  // kept for short inputs only
      MambaModel::ScanBuffers buffers;
      const kernels::ScanParameters scan =
          model_->ScanParametersOf(pool_, pass.trace, l, direction, pass.rows, buffers);
      ExpectClassF(F64(forward_.at(place + "delta")),
                   {scan.delta, static_cast<size_t>(pass.rows * scan.d_inner)}, place + "delta");
      std::vector<float> B, C;
      const int64_t states = int64_t{config.groups} * config.d_state;
      for (int64_t i = 0; i < pass.rows; ++i) {
        const int64_t row = i * scan.bc_stride;
        B.insert(B.end(), scan.B + row, scan.B + row + states);
        C.insert(C.end(), scan.C + row, scan.C + row + states);
      }
      ExpectClassF(F64(forward_.at(place + "B")), B, place + "B");
      ExpectClassF(F64(forward_.at(place + "C")), C, place + "C");

      const std::vector<double> x = F64(forward_.at(place + "x")),
                                y = F64(forward_.at(place + "y"));
      const std::vector<float> D = Skip(l, direction);
      std::vector<double> x_checked, y_checked;
      for (int64_t i = 0; i < pass.rows; ++i) {
        for (const int32_t d : pass.trace.checked_channels) {
          const int64_t at = i * config.d_inner + d;
          x_checked.push_back(x[at]);
          y_checked.push_back(y[at] + D[d / config.channels_per_map()] * x[at]);
        }
      }
      ExpectClassF(x_checked, pass.trace.layer(l, direction).x_checked, place + "x");
      ExpectClassF(y_checked, pass.trace.layer(l, direction).y_checked, place + "y + D x");
    }
  }
}

TEST_P(GoldenModel, ScanParametersRebuildTheCheckedOutputs) {
  const ModelConfig& config = model_->config();
  const Pass pass(*model_, inputs_.back(), pool_);
  for (int32_t scan_index = 0; scan_index < config.layers * config.directions(); ++scan_index) {
    const int32_t l = scan_index / config.directions(),
                  direction = scan_index % config.directions();
    MambaModel::ScanBuffers buffers;
    const kernels::ScanParameters scan =
        model_->ScanParametersOf(pool_, pass.trace, l, direction, pass.rows, buffers);
    const LayerTrace& trace = pass.trace.layer(l, direction);
    const std::vector<float> D = Skip(l, direction);
    const size_t count = pass.trace.checked_channels.size();
    for (size_t c = 0; c < count; ++c) {
      const int32_t map = pass.trace.checked_channels[c] / config.channels_per_map();
      const int64_t group = map / (config.maps() / config.groups);
      std::vector<double> state(config.d_state, 0), rebuilt;
      std::vector<float> checked;
      for (int64_t i = 0; i < pass.rows; ++i) {
        const double x = trace.x_checked[i * count + c], step = scan.delta[i * scan.d_inner + map];
        double y = D[map] * x;
        for (int32_t n = 0; n < config.d_state; ++n) {
          const int64_t at = i * scan.bc_stride + group * config.d_state + n;
          state[n] =
              std::exp(step * scan.A[n * scan.d_inner + map]) * state[n] + step * scan.B[at] * x;
          y += scan.C[at] * state[n];
        }
        rebuilt.push_back(y);
        checked.push_back(trace.y_checked[i * count + c]);
      }
      ExpectClassF(rebuilt, checked, "layer" + std::to_string(l) + "/y");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenModel, ::testing::ValuesIn(GoldenModels()), TestNameOf);

TEST(ScanParameters, ReluOnesDifferInDeltaAlone) {
  ThreadPool pool(2);
  const std::unique_ptr<const MambaModel> model = LoadOrFail(Golden("mamba1-tiny"));
  const Pass pass(*model, {"", RandomTokens(*model, 7, 1), {}}, pool);
  MambaModel::ScanBuffers softplus, relu;
  const auto scan = model->ScanParametersOf(pool, pass.trace, 0, 0, 7, softplus);
  const auto simple = model->ReluScanParametersOf(pool, pass.trace, 0, 0, 7, relu);
  EXPECT_EQ(simple.A, scan.A);
  EXPECT_EQ(simple.B, scan.B);
  EXPECT_EQ(simple.C, scan.C);
  std::vector<double> expected;  // softplus(v) = log(1 + e^v), so v = log(e^delta - 1)
  for (const float delta : softplus.delta) {
    expected.push_back(std::max(0.0, std::log(std::expm1(static_cast<double>(delta)))));
  }
  ExpectClassF(expected, relu.delta, "delta_relu");
}

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

}  // namespace
}  // namespace mambascope::model
