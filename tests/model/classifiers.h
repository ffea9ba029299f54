#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "tests/model/sequence.h"

// Random classifiers and images.
namespace mambascope::model {

inline testing::RandomModel Vision() {
  testing::RandomModel model;
  model.family = "vim";
  model.d_inner = 2 * model.d_model;
  model.classes = 7;
  return model;
}

inline testing::RandomModel MeanPooled() {
  testing::RandomModel model;
  model.classes = 5;
  model.pooling = "mean";
  return model;
}

inline std::vector<float> RandomImage(const ModelConfig& config, uint64_t seed) {
  std::mt19937_64 random(seed);
  const int64_t side = config.vision.image_size;
  std::vector<float> image(3 * side * side);
  for (float& value : image) value = static_cast<float>(random() % 2001) / 500 - 2;
  return image;
}

// An image's piece and all it needs.
struct Picture {
  Picture(const MambaModel& model, uint64_t seed)
      : image(RandomImage(model.config(), seed)),
        state(*model.NewState()),
        trace(model.config(), model.config().vision.tokens()),
        rows{model.config().vision.class_position()} {}

  Piece Next() {
    Piece piece;
    piece.image = image;
    piece.state = &state;
    piece.trace = &trace;
    piece.logit_rows = rows;
    piece.logits = &logits;
    return piece;
  }
  std::vector<uint32_t> AllBits() const {
    std::vector<uint32_t> bits = Bits(logits);
    for (const LayerTrace& layer : trace.layers) {
      for (const Array<float>* values : {&layer.selective, &layer.x_checked, &layer.y_checked}) {
        const std::vector<uint32_t> more = Bits(*values);
        bits.insert(bits.end(), more.begin(), more.end());
      }
    }
    return bits;
  }

  std::vector<float> image;
  RecurrentState state;
  SequenceTrace trace;
  std::vector<int32_t> rows;
  std::vector<float> logits;
};

}  // namespace mambascope::model
