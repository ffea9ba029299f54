#include "server/model/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "server/base/check.h"

namespace mambascope::model {
namespace {

// Most probable first; ties to the lower id.
struct Better {
  std::span<const float> logits;
  bool operator()(int32_t a, int32_t b) const {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  }
};

std::vector<int32_t> AllIds(std::span<const float> logits) {
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

int32_t MostProbable(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// The exponentials are floats, which is a third of the time over 50,000 of them; their rounding,
// 6e-8 of each, is below that of the logits. The sum is not: it has as many roundings as terms.
double LogSumExp(std::span<const float> logits) {
  const float top = logits[MostProbable(logits)];
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - top);
  return top + std::log(sum);
}

}  // namespace

// 1. temperature: weight w = exp((logit - max) / temperature)
// 2. top_k: the k largest stay
// 3. top_p: of those, best first, the shortest run whose share of their weight reaches top_p
// 4. one u in [0, 1) from the 53 high bits of `random`: the first token at which the running weight
//    exceeds u x total. Order: best first after step 2 or 3, otherwise by id.
int32_t SampleToken(std::span<const float> logits, const SamplingOptions& options,
                    std::mt19937_64& random) {
  MS_CHECK(!logits.empty());
  const int32_t best = MostProbable(logits);
  if (!(options.temperature > 0)) return best;

  std::vector<int32_t> ids = AllIds(logits);
  const Better better{logits};
  if (options.top_k > 0 && static_cast<size_t>(options.top_k) < ids.size()) {
    std::nth_element(ids.begin(), ids.begin() + options.top_k - 1, ids.end(), better);
    ids.resize(options.top_k);
    std::sort(ids.begin(), ids.end(), better);  // nth_element's own order depends on the library
  }

  std::vector<double> weight(ids.size());
  const auto weigh = [&](int32_t id) {
    return static_cast<double>(std::exp((logits[id] - logits[best]) / options.temperature));
  };
  std::transform(ids.begin(), ids.end(), weight.begin(), weigh);
  double total = std::accumulate(weight.begin(), weight.end(), 0.0);

  if (options.top_p < 1) {
    // A heap gives them best first without sorting the long tail that top_p is there to cut.
    const auto worse = [&](int32_t a, int32_t b) { return better(b, a); };
    std::make_heap(ids.begin(), ids.end(), worse);
    double kept = 0;
    size_t count = 0;
    while (count < ids.size()) {
      std::pop_heap(ids.begin(), ids.end() - count, worse);
      ++count;
      kept += weigh(ids[ids.size() - count]);
      if (kept >= options.top_p * total) break;
    }
    std::reverse(ids.begin(), ids.end());
    ids.resize(count);
    weight.resize(count);
    std::transform(ids.begin(), ids.end(), weight.begin(), weigh);
    total = kept;
  }

  const double u = static_cast<double>(random() >> 11) * 0x1p-53;
  double running = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    running += weight[i];
    if (running > u * total) return ids[i];
  }
  return ids.back();  // u x total rounded up to the whole sum
}

float LogProbability(std::span<const float> logits, int32_t token) {
  MS_CHECK(token >= 0 && static_cast<size_t>(token) < logits.size());
  return static_cast<float>(logits[token] - LogSumExp(logits));
}

std::vector<RankedToken> TopTokens(std::span<const float> logits, int32_t k) {
  if (k <= 0 || logits.empty()) return {};
  std::vector<int32_t> ids = AllIds(logits);
  const size_t count = std::min<size_t>(k, ids.size());
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), Better{logits});
  const double log_sum = LogSumExp(logits);
  std::vector<RankedToken> top;
  for (size_t i = 0; i < count; ++i) {
    top.push_back({ids[i], static_cast<float>(logits[ids[i]] - log_sum)});
  }
  return top;
}

}  // namespace mambascope::model
