#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "tests/model/sequence.h"

// The golden models, their inputs and the tolerance of their results.
namespace mambascope::model {

inline std::vector<std::string> GoldenModels() {
  return {"mamba1-tiny",           "mamba1-odd",  "mamba1-identity-conv",
          "falcon-mamba-tiny",     "mamba2-tiny", "mamba2-odd",
          "mamba2-relu",           "vim-tiny",    "mamba1-classifier-tiny",
          "mamba2-classifier-tiny"};
}
inline std::string TestNameOf(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// Tolerance class F of the golden data: 5e-5 of the largest value, which is taken as at least 0.1.
inline void ExpectClassF(const std::vector<double>& expected, std::span<const float> got,
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

struct Input {
  std::string name;
  std::vector<int32_t> tokens;
  std::vector<float> image;
};

inline std::vector<Input> ReadInputs(const std::string& folder) {
  const auto json = nlohmann::json::parse(testing::ReadBytes(folder + "/inputs.json"));
  std::vector<Input> inputs;
  for (const auto& [name, input] : json.at("inputs").items()) {
    inputs.push_back({name, input.value("tokens", std::vector<int32_t>()), {}});
    if (!inputs.back().tokens.empty()) continue;
    const std::vector<float> images =
        testing::F32(testing::ReadSafetensors(folder + "/images.safetensors").begin()->second);
    const size_t size = images.size() / 2, first = size * (name == "image1" ? 1 : 0);
    inputs.back().image.assign(images.begin() + first, images.begin() + first + size);
  }
  return inputs;
}

// A whole input's forward pass.
struct Pass {
  Pass(const MambaModel& model, const Input& input, ThreadPool& pool)
      : state(*model.NewState()),
        rows(static_cast<int64_t>(input.image.empty() ? input.tokens.size()
                                                      : model.config().vision.tokens())),
        trace(model.config(), rows, /*stream_stride=*/1) {
    const ModelConfig& config = model.config();
    // A language model answers at every position, a classifier at one.
    if (config.task == Task::kNextToken) wanted = AllRows(rows);
    if (config.task == Task::kTextClass) wanted = {static_cast<int32_t>(rows) - 1};
    if (config.task == Task::kImageClass) wanted = {config.vision.class_position()};
    Piece piece;
    piece.tokens = input.tokens;
    piece.image = input.image;
    piece.state = &state;
    piece.trace = &trace;
    piece.logit_rows = wanted;
    piece.logits = &logits;
    Workspace workspace;
    EXPECT_TRUE(model.Forward(pool, workspace, {&piece, 1}, [] { return false; }).ok());
    for (int32_t layer = 0; layer <= config.layers; ++layer) {
      const float* h = trace.stream(layer);
      resid.insert(resid.end(), h, h + rows * config.d_model);
    }
    EXPECT_EQ(piece.nonfinite_layer, -1);
  }

  RecurrentState state;
  const int64_t rows;
  SequenceTrace trace;
  std::vector<int32_t> wanted;
  std::vector<float> logits, resid;
};

}  // namespace mambascope::model
