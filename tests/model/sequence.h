#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "server/model/mamba_model.h"
#include "tests/support/random_model.h"
#include "tests/support/safetensors_io.h"

// What the tests of whole models share.
namespace mambascope::model {

inline bool Never() { return false; }

inline std::string Golden(const std::string& model) {
  return MAMBASCOPE_SOURCE_DIR "/tests/golden/" + model;
}

inline std::unique_ptr<const MambaModel> LoadOrFail(const std::string& folder,
                                                    const Device& device = {}) {
  auto model = MambaModel::Load(folder, device);
  if (!model.ok()) throw std::runtime_error(model.status().ToString());
  return *std::move(model);
}

// A random model in a folder of its own, which is gone once the model is loaded.
inline std::unique_ptr<const MambaModel> Random(const testing::RandomModel& model,
                                                const testing::StoredTensors* weights = nullptr,
                                                const Device& device = {}) {
  const std::string folder = ::testing::TempDir() + "/mamba_model_" +
                             ::testing::UnitTest::GetInstance()->current_test_info()->name();
  testing::WriteRandomModel(folder, model);
  if (weights != nullptr) testing::WriteSafetensors(folder + "/model.safetensors", *weights);
  auto loaded = LoadOrFail(folder, device);
  std::filesystem::remove_all(folder);
  return loaded;
}

inline std::vector<int32_t> RandomTokens(const MambaModel& model, int count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % model.config().vocabulary);
  return tokens;
}

inline std::vector<int32_t> AllRows(size_t count) {
  std::vector<int32_t> rows(count);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

inline std::vector<uint32_t> Bits(std::span<const float> values) {
  std::vector<uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

// One sequence, its state and what came out, by any number of passes.
class Sequence {
 public:
  explicit Sequence(const MambaModel& model, int64_t trace_capacity = 0)
      : model_(model), state_(*model.NewState()) {
    if (trace_capacity > 0)
      trace_ = std::make_unique<SequenceTrace>(model.config(), trace_capacity);
  }

  // The piece of the next tokens, all of whose logits are wanted; Take joins what it gave.
  Piece Next(std::span<const int32_t> tokens) {
    rows_ = AllRows(tokens.size());
    if (model_.config().mean_pooled()) rows_ = {rows_.back()};
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
    RecurrentState state = *state_.ToHost();
    for (const double sum : state.pooled()) {
      const auto both = std::bit_cast<uint64_t>(sum);
      bits.push_back(static_cast<uint32_t>(both));
      bits.push_back(static_cast<uint32_t>(both >> 32));
    }
    const ModelConfig& config = model_.config();
    const auto add = [&](const float* values, size_t count) {
      const std::vector<uint32_t> more = Bits({values, count});
      bits.insert(bits.end(), more.begin(), more.end());
    };
    for (int32_t l = 0; l < config.layers; ++l) {
      add(state.conv_state(l), static_cast<size_t>(config.d_conv - 1) * config.conv_channels());
      add(state.ssm_state(l), static_cast<size_t>(config.d_state) * config.d_inner);
      if (trace_ == nullptr) continue;
      const LayerTrace& layer = trace_->layer(l);
      const size_t checked = trace_->tokens * trace_->checked_channels.size();
      add(layer.selective.data(), trace_->tokens * config.selective_width());
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

}  // namespace mambascope::model
