// Classifiers of images and texts: bits that do not depend on how the work is arranged.
#include <gtest/gtest.h>

#include <vector>

#include "tests/model/classifiers.h"
#include "tests/model/sequence.h"

namespace mambascope::model {
namespace {

TEST(Vision, AnImageGivesTheBitsItGivesAloneOnAnyNumberOfThreads) {
  const std::unique_ptr<const MambaModel> model = Random(Vision());
  std::vector<std::vector<uint32_t>> alone;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    ThreadPool pool(1);
    Workspace workspace;
    Picture picture(*model, seed);
    Piece piece = picture.Next();
    ASSERT_TRUE(model->Forward(pool, workspace, {&piece, 1}, Never).ok());
    EXPECT_EQ(picture.trace.tokens, model->config().vision.tokens());
    alone.push_back(picture.AllBits());
  }
  EXPECT_NE(alone[0], alone[1]);
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    Workspace workspace;
    std::vector<Picture> pictures;
    for (uint64_t seed = 0; seed < 4; ++seed) pictures.emplace_back(*model, seed);
    std::vector<Piece> pieces;
    for (Picture& picture : pictures) pieces.push_back(picture.Next());
    ASSERT_TRUE(model->Forward(pool, workspace, pieces, Never).ok());
    for (size_t i = 0; i < pictures.size(); ++i) {
      EXPECT_TRUE(pictures[i].AllBits() == alone[i]) << "image " << i << ", threads " << threads;
    }
  }
}

TEST(Vision, TheClassReadsPatchesBeforeAndAfterIt) {
  ThreadPool pool(2);
  const std::unique_ptr<const MambaModel> model = Random(Vision());
  const int64_t side = model->config().vision.image_size;
  std::vector<std::vector<float>> logits;
  for (const int64_t pixel : {int64_t{-1}, int64_t{0}, side * side - 1}) {
    Workspace workspace;
    Picture picture(*model, 1);
    if (pixel >= 0) picture.image[pixel] += 1;
    Piece piece = picture.Next();
    ASSERT_TRUE(model->Forward(pool, workspace, {&piece, 1}, Never).ok());
    logits.push_back(picture.logits);
  }
  EXPECT_NE(logits[0], logits[1]) << "the first patch";
  EXPECT_NE(logits[0], logits[2]) << "the last patch";
}

TEST(MeanPooling, CutsPacksAndStepsGiveTheBitsOfTheWhole) {
  ThreadPool pool(2);
  const std::unique_ptr<const MambaModel> model = Random(MeanPooled());
  const std::vector<int32_t> tokens = RandomTokens(*model, 40, 1);
  Workspace workspace;
  Sequence whole(*model, 40);
  whole.Feed(tokens, pool, workspace);
  const std::vector<uint32_t> expected = Bits(whole.logits());
  ASSERT_EQ(expected.size(), 5u);
  const auto last = [](const Sequence& sequence) {
    const std::vector<float>& logits = sequence.logits();
    return Bits(std::span<const float>(logits).last(5));
  };

  Sequence steps(*model, 40);
  for (const int32_t& token : tokens) steps.Feed({&token, 1}, pool, workspace);
  EXPECT_EQ(last(steps), expected);
  for (const size_t cut : {1, 13, 39}) {
    Sequence pieces(*model, 40);
    pieces.Feed(std::span(tokens).first(cut), pool, workspace);
    pieces.Feed(std::span(tokens).subspan(cut), pool, workspace);
    EXPECT_EQ(last(pieces), expected) << cut;
  }
  Sequence first(*model, 40), together(*model, 40);
  const std::vector<int32_t> other = RandomTokens(*model, 17, 2);
  std::vector<Piece> pieces = {first.Next(other), together.Next(tokens)};
  ASSERT_TRUE(model->Forward(pool, workspace, pieces, Never).ok());
  together.Take();
  EXPECT_EQ(last(together), expected);
}

}  // namespace
}  // namespace mambascope::model
