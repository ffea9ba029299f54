#include "server/explain/speed.h"

#include <cmath>

#include "gtest/gtest.h"
#include "server/explain/registry.h"
#include "tests/explain/explained.h"

namespace mambascope::explain {
namespace {

// How fast this machine is decides no test: only that something was measured, and of what kind.
TEST(Speed, EveryUnitIsMeasured) {
  ThreadPool pool(2);
  for (const std::string family : {"mamba", "mamba2", "vim"}) {
    testing::RandomModel random;
    random.family = family;
    if (family == "mamba2") random.d_model = 15;
    if (family == "vim") random.classes = 4;
    const auto model = testing::LoadRandomModel(random);
    const Speed speed = Speed::Measure(pool, *model);
    for (const double seconds : {speed.forward_token, speed.gemm, speed.map, speed.scan}) {
      EXPECT_GT(seconds, 0);
      EXPECT_TRUE(std::isfinite(seconds));
    }
    EXPECT_EQ(speed.step > 0, family != "vim");
  }
}

TEST(Speed, EveryMethodSaysWhatItComputesAndMoreOfItForLongerInputs) {
  const auto model = testing::LoadRandomModel({});
  const Speed speed{.forward_token = 1, .step = 1, .gemm = 1, .map = 1, .scan = 1};
  for (const Method* method : AllMethods()) {
    v1::Explanation options;
    const auto* field = v1::Explanation::descriptor()->FindFieldByName(std::string(method->name()));
    v1::Explanation::GetReflection()->MutableMessage(&options, field);
    if (options.has_parameters()) options.mutable_parameters()->add_kinds(v1::Parameters::KIND_B);
    const auto seconds = [&](int64_t tokens) {
      return speed.Seconds(
          method->MakePlan(options, model->config(), tokens, v1::DATA_TYPE_FP32).work);
    };
    EXPECT_GT(seconds(10), 0) << method->name();
    EXPECT_GE(seconds(100), seconds(10)) << method->name();
  }
}

}  // namespace
}  // namespace mambascope::explain
