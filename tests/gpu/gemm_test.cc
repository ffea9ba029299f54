#include "server/kernels/cuda/gemm.h"

#include <optional>
#include <vector>

#include "server/kernels/split_body.h"
#include "tests/gpu/device.h"

namespace mambascope::kernels::cuda {
namespace {

using reference::Close;
using reference::Random;
using reference::SameBits;

class GemmTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped()) return;
    auto gemm = Gemm::Create();
    ASSERT_TRUE(gemm.ok()) << gemm.status();
    gemm_.emplace(*std::move(gemm));
  }

  // y of the first `rows` rows of x.
  std::vector<float> Run(const std::vector<float>& x, int64_t rows, const WeightMatrix& w,
                         const float* bias = nullptr) {
    std::vector<float> covered(x.begin(), x.begin() + rows * w.cols);
    covered.resize(Gemm::RowsCovered(rows) * w.cols, std::nanf(""));
    const auto device_x = ToDevice(covered);
    auto y = OnDevice<float>(Gemm::RowsCovered(rows) * w.rows);
    auto scratch = OnDevice<char>(Gemm::LinearScratchBytes(w, rows));
    const absl::Status status = gemm_->Linear(device_x.data(), w.cols, rows, w, bias, y.data(),
                                              w.rows, scratch.data(), stream());
    EXPECT_TRUE(status.ok()) << status;
    std::vector<float> result = ToHost(y);
    result.resize(rows * w.rows);
    return result;
  }
  Gemm& gemm() { return *gemm_; }

 private:
  std::optional<Gemm> gemm_;
};

// Shapes of mamba-130m and of tests; odd ones have rows that lie on no 16 bytes.
constexpr struct {
  int64_t N, K;
} kShapes[] = {{3072, 768}, {768, 1536}, {80, 1536}, {1536, 48}, {1000, 16}, {37, 29}, {1, 5}};

TEST_F(GemmTest, EqualsTheDefinition) {
  for (const auto& [N, K] : kShapes) {
    if (kEmulated && N * K > 20000) continue;
    SCOPED_TRACE(testing::Message() << N << " x " << K);
    constexpr int64_t kRows = 70;
    const auto x = Random(kRows * K, 1), w = Random(N * K, 2), bias = Random(N, 3);
    const auto device_w = ToDevice(w), device_bias = ToDevice(bias);
    EXPECT_TRUE(Close(Run(x, kRows, {device_w.data(), N, K, K}, device_bias.data()),
                      reference::Linear(x, w, bias, kRows, N, K)));
  }
}

TEST_F(GemmTest, Bf16WeightsGiveWhatTheWidenedOnesGive) {
  for (const auto& [N, K] : kShapes) {
    if (kEmulated && N * K > 20000) continue;
    SCOPED_TRACE(testing::Message() << N << " x " << K);
    constexpr int64_t kRows = 70;
    const auto x = Random(kRows * K, 4), bias = Random(N, 5);
    const int64_t stride = (K + 7) / 8 * 8;  // bf16 rows on 16 bytes, as they are loaded
    std::vector<uint16_t> narrow(N * stride);
    std::vector<float> w;
    for (int64_t n = 0; n < N; ++n) {
      for (const float v : Random(K, 6 + static_cast<uint32_t>(n))) {
        narrow[n * stride + static_cast<int64_t>(w.size()) % K] = body::NearestBf16(v);
        w.push_back(body::WideBf16(body::NearestBf16(v)));
      }
    }
    const auto device_w = ToDevice(narrow);
    const auto device_bias = ToDevice(bias);
    EXPECT_TRUE(Close(
        Run(x, kRows, {device_w.data(), ElementType::kBF16, N, K, stride}, device_bias.data()),
        reference::Linear(x, w, bias, kRows, N, K)));
  }
}

#ifndef MAMBASCOPE_EMULATED  // has another Gemm
TEST_F(GemmTest, ARowsBitsDependOnThatRowAlone) {
  constexpr int64_t kRows = 300, N = 3072, K = 768;
  const auto x = Random(kRows * K, 7), w = Random(N * K, 8);
  std::vector<uint16_t> narrow;
  for (const float v : w) narrow.push_back(body::NearestBf16(v));
  const auto device_w = ToDevice(w);
  const auto device_narrow = ToDevice(narrow);
  for (const WeightMatrix& weight :
       {WeightMatrix(device_w.data(), N, K, K),
        WeightMatrix(device_narrow.data(), ElementType::kBF16, N, K, K)}) {
    SCOPED_TRACE(weight.type == ElementType::kBF16 ? "bf16" : "fp32");
    const std::vector<float> all = Run(x, kRows, weight);
    for (const int64_t rows : {1, 2, 3, 15, 16, 17, 21, 22, 63, 64, 65, 127, 128, 129, 256}) {
      EXPECT_TRUE(SameBits(Run(x, rows, weight), {all.data(), static_cast<size_t>(rows * N)}))
          << rows;
    }
    // Each row in the first place of a call of its own, too.
    for (const int64_t row : {1, 20, 63, 64, 100, 299}) {
      const std::vector<float> alone(x.begin() + row * K, x.begin() + (row + 1) * K);
      EXPECT_TRUE(SameBits(Run(alone, 1, weight), {all.data() + row * N, N})) << row;
    }
  }
}
#endif

TEST_F(GemmTest, BlocksAreAddedToWhatIsThere) {
  constexpr int64_t kRows = 16, kCols = 32, kDepth = 200, kCount = 3;
  const auto a = Random(kCount * kRows * kDepth, 9), b = Random(kCount * kCols * kDepth, 10);
  const auto before = Random(kCount * kRows * kCols, 11);
  const auto device_a = ToDevice(a), device_b = ToDevice(b);
  auto c = ToDevice(before);
  Gemm::Blocks blocks;
  blocks.rows = kRows;
  blocks.cols = kCols;
  blocks.depth = kDepth;
  blocks.count = kCount;
  blocks.a = device_a.data();
  blocks.b = device_b.data();
  blocks.c = c.data();
  blocks.a_stride = blocks.b_stride = kDepth;
  blocks.c_stride = kCols;
  blocks.a_step = kRows * kDepth;
  blocks.b_step = kCols * kDepth;
  blocks.c_step = kRows * kCols;
  ASSERT_TRUE(gemm().AddBlocks(blocks, stream()).ok());
  std::vector<double> expected;
  for (int64_t p = 0; p < kCount; ++p) {
    const auto product =
        reference::Linear({a.data() + p * blocks.a_step, static_cast<size_t>(blocks.a_step)},
                          {b.data() + p * blocks.b_step, static_cast<size_t>(blocks.b_step)}, {},
                          kRows, kCols, kDepth);
    for (size_t e = 0; e < product.size(); ++e) {
      expected.push_back(product[e] + before[p * blocks.c_step + e]);
    }
  }
  EXPECT_TRUE(Close(ToHost(c), expected));
}

}  // namespace
}  // namespace mambascope::kernels::cuda
