#include "server/explain/speed.h"

#include <algorithm>
#include <vector>

#include "absl/time/clock.h"
#include "server/kernels/gemm.h"
#include "server/kernels/hidden_attention.h"

namespace mambascope::explain {
namespace {

// The better of two: the first also pays for caches and pages.
template <class Run>
double BestSeconds(const Run& run) {
  double best = 0;
  for (int round = 0; round < 2; ++round) {
    const absl::Time begin = absl::Now();
    run();
    const double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
    best = round == 0 ? seconds : std::min(best, seconds);
  }
  return best;
}

// A short input: as many tokens as a tenth of a second or so may take.
int64_t PrefillTokens(const model::MambaModel& model) {
  constexpr double kMultiplyAdds = 5e9;
  const double of_token = static_cast<double>(std::max<int64_t>(model.weights().parameters(), 1));
  return std::clamp<int64_t>(static_cast<int64_t>(kMultiplyAdds / of_token), 8, 64);
}

// One pass over `rows` made-up embeddings, with the last row's logits or none.
double Pass(ThreadPool& pool, const model::MambaModel& model, int64_t rows, bool head) {
  const std::vector<float> embeddings(rows * model.config().d_model, 0.01f);
  model::Workspace workspace;
  std::vector<float> logits;
  const auto last = static_cast<int32_t>(rows - 1);
  return BestSeconds([&] {
    auto state = model.NewState();
    if (!state.ok()) return;
    model::Piece piece;
    piece.embeddings = embeddings;
    piece.state = &*state;
    piece.logits = &logits;
    if (head) piece.logit_rows = std::span(&last, 1);
    (void)model.Forward(pool, workspace, std::span(&piece, 1), [] { return false; });
  });
}

double MultiplyAdd(ThreadPool& pool) {
  constexpr int64_t kRows = 128, kCols = 512, kInner = 256;
  const std::vector<float> x(kRows * kInner, 0.5f), w(kCols * kInner, 0.25f);
  std::vector<float> y(kRows * kCols);
  return BestSeconds([&] {
           kernels::Linear(pool, {x.data(), kRows, kInner, kInner},
                           {w.data(), kCols, kInner, kInner}, nullptr,
                           {y.data(), kRows, kCols, kCols});
         }) /
         (kRows * kCols * kInner);
}

// Maps and scans of a made-up layer.
struct Layer {
  static constexpr int64_t kTokens = 256, kChannels = 128, kStates = 16;

  Layer() {
    scan.tokens = kTokens;
    scan.d_inner = kChannels;
    scan.d_state = kStates;
    scan.delta = delta.data();
    scan.A = A.data();
    scan.B = scan.C = bc.data();
    scan.bc_stride = kStates;
  }

  const std::vector<float> delta = std::vector<float>(kTokens * kChannels, 0.1f);
  const std::vector<float> A = std::vector<float>(kStates * kChannels, -1.0f);
  const std::vector<float> bc = std::vector<float>(kTokens * kStates, 0.5f);
  kernels::ScanParameters scan;
};

}  // namespace

Speed Speed::Measure(ThreadPool& pool, const model::MambaModel& model) {
  Speed speed;
  const int64_t tokens = model.config().family == model::Family::kVim
                             ? model.config().vision.tokens()
                             : PrefillTokens(model);
  speed.forward_token = Pass(pool, model, tokens, /*head=*/false) / static_cast<double>(tokens);
  if (model.config().task == model::Task::kNextToken) speed.step = Pass(pool, model, 1, true);
  speed.gemm = MultiplyAdd(pool);
  const Layer layer;
  constexpr int64_t kScan = Layer::kTokens * Layer::kChannels * Layer::kStates;
  std::vector<float> map(Layer::kTokens * Layer::kTokens), row(Layer::kTokens, 1.0f);
  speed.map = BestSeconds([&] { kernels::MeanMap(pool, layer.scan, map.data()); }) /
              (0.5 * kScan * Layer::kTokens);
  speed.scan =
      BestSeconds([&] { kernels::MeanAdjoint(pool, layer.scan, {}, row.data(), row.data()); }) /
      kScan;
  return speed;
}

double Speed::Seconds(const Work& work) const {
  return work.forward_tokens * forward_token + work.gemm * gemm + work.map * map + work.scan * scan;
}

}  // namespace mambascope::explain
