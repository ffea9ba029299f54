#include "server/explain/upsample.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/support/safetensors_io.h"

namespace mambascope::explain {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

TEST(Upsample, IsTheOracles) {
  const auto golden = testing::ReadSafetensors(MAMBASCOPE_SOURCE_DIR
                                               "/tests/golden/vim-tiny/perturbation.safetensors");
  double worst = 0;
  for (const std::string name : {"raw", "rollout", "attribution"}) {
    const std::vector<double> scores = testing::F64(golden.at(name + "/scores"));  // [6, 16]
    const std::vector<double> expected = testing::F64(golden.at(name + "/upsampled"));
    ASSERT_EQ(expected.size(), 6u * 256);
    for (int image = 0; image < 6; ++image) {
      const std::vector<float> patches(scores.begin() + 16 * image,
                                       scores.begin() + 16 * (image + 1));
      const std::vector<float> pixels = Upsample(patches, 16);
      ASSERT_EQ(pixels.size(), 256u);
      for (int p = 0; p < 256; ++p) {
        worst = std::max(worst, std::abs(pixels[p] - expected[256 * image + p]));
      }
    }
  }
  EXPECT_LT(worst, 1e-6);
  RecordProperty("largest_error", std::to_string(worst));
}

TEST(Upsample, RepeatsTheBorderAndIsLinearBetween) {
  const std::vector<float> patches = {0, 4, 0, 4};
  EXPECT_THAT(Upsample(patches, 4), ElementsAre(0, 1, 3, 4, 0, 1, 3, 4, 0, 1, 3, 4, 0, 1, 3, 4));
  const std::vector<float> one = {2.5f};
  EXPECT_THAT(Upsample(one, 3), Each(2.5f));
}

TEST(Upsample, LeavesTheClassTokenOut) {
  model::VisionConfig vision;
  vision.image_size = 4;
  vision.patch_size = 2;
  vision.stride = 2;
  vision.middle_class_token = true;
  const std::vector<float> middle = {1, 1, 100, 1, 1};
  EXPECT_THAT(PixelScores(middle, vision), Each(1.0f));
  vision.middle_class_token = false;
  const std::vector<float> first = {100, 1, 1, 1, 1};
  EXPECT_THAT(PixelScores(first, vision), Each(1.0f));
}

}  // namespace
}  // namespace mambascope::explain
