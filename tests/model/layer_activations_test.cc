// A layer computed once more, from the stream that entered it, and the walk over recorded streams.
#include "server/model/layer_activations.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/model/stream_walk.h"
#include "tests/model/golden.h"
#include "tests/model/sequence.h"

namespace mambascope::model {
namespace {

using testing::F64;
using testing::StoredTensors;

class Activations : public ::testing::TestWithParam<std::string> {
 protected:
  static std::vector<float> Columns(const Array<float>& from, int64_t rows, int64_t stride,
                                    int64_t first, int64_t cols) {
    std::vector<float> out;
    for (int64_t i = 0; i < rows; ++i) {
      const float* row = from.data() + i * stride + first;
      out.insert(out.end(), row, row + cols);
    }
    return out;
  }

  ThreadPool pool_{2};
  const std::string folder_ = Golden(GetParam());
  const std::unique_ptr<const MambaModel> model_ = LoadOrFail(folder_);
};

TEST_P(Activations, AreTheOracles) {
  const StoredTensors forward = testing::ReadSafetensors(folder_ + "/forward.safetensors");
  const ModelConfig& config = model_->config();
  const InProjLayout layout = InProjLayoutOf(config);
  int compared = 0;
  for (const Input& input : ReadInputs(folder_)) {
    const Pass pass(*model_, input, pool_);
    LayerActivations a;
    for (int32_t l = 0; l < config.layers; ++l) {
      const std::string layer = input.name + "/layer" + std::to_string(l) + "/";
      if (forward.count(layer + "gated") == 0) continue;  // kept for short inputs only
      RunLayerOnce(pool_, *model_, l, pass.trace.stream(l), pass.rows, LayerParts::kAll, a);
      const size_t inner = pass.rows * config.d_inner;
      const auto compare = [&](const std::string& name, std::span<const float> got) {
        ExpectClassF(F64(forward.at(name)), got, name);
        ++compared;
      };
      compare(layer + "u", {a.u.data(), static_cast<size_t>(pass.rows * config.d_model)});
      compare(layer + "z", Columns(a.in, pass.rows, layout.stride, layout.z, config.d_inner));
      compare(layer + "gated", {a.gated.data(), inner});
      compare(layer + "mixed", {MixedOf(a), inner});
      for (int32_t direction = 0; direction < config.directions(); ++direction) {
        const std::string scan = layer + (direction == 1 ? "bwd/" : "");
        const LayerActivations::Branch& branch = a.branches[direction];
        const Array<float>& in = direction == 1 ? a.flipped_in : a.in;
        const int64_t wide = config.conv_channels();
        compare(scan + "x_in", Columns(in, pass.rows, layout.stride, layout.x_in, config.d_inner));
        compare(scan + "c", Columns(branch.c, pass.rows, wide, 0, config.d_inner));
        compare(scan + "x", Columns(branch.x, pass.rows, wide, 0, config.d_inner));
        compare(scan + "y", {branch.y.data(), inner});
        compare(scan + "delta", {branch.delta.data(), size_t(pass.rows * config.maps())});
        const kernels::ScanParameters scanned = ScanOf(*model_, l, direction, a);
        const int64_t states = int64_t{config.groups} * config.d_state;
        std::vector<float> B, C;
        for (int64_t i = 0; i < pass.rows; ++i) {
          const int64_t row = i * scanned.bc_stride;
          B.insert(B.end(), scanned.B + row, scanned.B + row + states);
          C.insert(C.end(), scanned.C + row, scanned.C + row + states);
        }
        compare(scan + "B", B);
        compare(scan + "C", C);
      }
    }
  }
  EXPECT_GT(compared, 0);
}

TEST_P(Activations, AWalkGivesTheRecordedBitsInBothDirections) {
  const ModelConfig& config = model_->config();
  for (const Input& input : ReadInputs(folder_)) {
    const Pass pass(*model_, input, pool_);
    for (const int32_t stride : {1, 2, 3}) {
      SequenceTrace sparse(config, pass.rows, stride);
      RecurrentState state(config);
      Piece piece;
      piece.tokens = input.tokens;
      piece.image = input.image;
      piece.state = &state;
      piece.trace = &sparse;
      Workspace workspace;
      ASSERT_TRUE(model_->Forward(pool_, workspace, {&piece, 1}, [] { return false; }).ok());
      for (const bool up : {true, false}) {
        StreamWalk walk(*model_, sparse, pass.rows);
        int recomputed = 0;
        for (int32_t k = 0; k <= config.layers; ++k) {
          const int32_t layer = up ? k : config.layers - k;
          while (!walk.Prepare(pool_, layer)) ++recomputed;
          const size_t count = pass.rows * config.d_model;
          EXPECT_EQ(std::vector<float>(walk.Entering(layer), walk.Entering(layer) + count),
                    std::vector<float>(pass.trace.stream(layer), pass.trace.stream(layer) + count))
              << stride << " " << layer;
        }
        EXPECT_EQ(recomputed, StreamWalk::Recomputed(config, stride));
      }
    }
  }
}

TEST_P(Activations, EmbeddingsInPlaceOfTokensGiveTheSameBits) {
  for (const Input& input : ReadInputs(folder_)) {
    const Pass pass(*model_, input, pool_);
    std::vector<float> embeddings(pass.rows * model_->config().d_model), logits;
    model_->Embed(pool_, input.tokens, input.image, embeddings);
    RecurrentState state(model_->config());
    Piece piece;
    piece.embeddings = embeddings;
    piece.state = &state;
    piece.logit_rows = pass.wanted;
    piece.logits = &logits;
    Workspace workspace;
    const int32_t layers = model_->config().layers;
    ASSERT_TRUE(model_->ForwardLayers(pool_, workspace, {&piece, 1}, 0, 1).ok());
    ASSERT_TRUE(model_->ForwardLayers(pool_, workspace, {&piece, 1}, 1, layers).ok());
    EXPECT_EQ(logits, pass.logits);
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, Activations, ::testing::ValuesIn(GoldenModels()), TestNameOf);

}  // namespace
}  // namespace mambascope::model
