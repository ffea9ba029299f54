#include "server/explain/agreement.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <utility>

#include "server/base/check.h"

namespace mambascope::explain {
namespace {

constexpr int64_t kMostTop = 10;

int64_t PairsOf(int64_t count) { return count * (count - 1) / 2; }

// Pairs (i < j) with values[i] > values[j]; sorts `values`.
int64_t CountInversions(std::vector<int64_t>& values) {
  std::vector<int64_t> merged(values.size());
  int64_t inversions = 0;
  const auto size = static_cast<int64_t>(values.size());
  for (int64_t width = 1; width < size; width *= 2) {
    for (int64_t begin = 0; begin < size; begin += 2 * width) {
      const int64_t middle = std::min(begin + width, size);
      const int64_t end = std::min(begin + 2 * width, size);
      int64_t left = begin, right = middle;
      for (int64_t at = begin; at < end; ++at) {
        if (right == end || (left < middle && values[left] <= values[right])) {
          merged[at] = values[left++];
        } else {
          inversions += middle - left;
          merged[at] = values[right++];
        }
      }
    }
    values.swap(merged);
  }
  return inversions;
}

}  // namespace

template <class T>
void RankedScores::Rank(std::span<const T> scores) {
  best_.resize(scores.size());
  std::iota(best_.begin(), best_.end(), 0);
  std::sort(best_.begin(), best_.end(), [&](int32_t a, int32_t b) {
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
  });
  ranks_.resize(scores.size());
  const int64_t count = size();
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {
    while (end < count && scores[best_[end]] == scores[best_[begin]]) ++end;
    if (end == begin) ++end;  // a value that is not even itself
    for (int64_t i = begin; i < end; ++i) ranks_[best_[i]] = begin + end - 1;
    tied_pairs_ += PairsOf(end - begin);
  }
}

RankedScores::RankedScores(std::span<const float> scores) { Rank(scores); }
RankedScores::RankedScores(std::span<const double> scores) { Rank(scores); }

std::optional<double> Spearman(const RankedScores& a, const RankedScores& b) {
  MS_CHECK(a.size() == b.size());
  if (a.constant() || b.constant()) return std::nullopt;
  const double mean = static_cast<double>(a.size() - 1);  // of twice the ranks
  double ab = 0, aa = 0, bb = 0;
  for (int64_t i = 0; i < a.size(); ++i) {
    const double x = static_cast<double>(a.ranks()[i]) - mean;
    const double y = static_cast<double>(b.ranks()[i]) - mean;
    ab += x * y;
    aa += x * x;
    bb += y * y;
  }
  return ab / std::sqrt(aa * bb);
}

std::optional<double> KendallTauB(const RankedScores& a, const RankedScores& b) {
  MS_CHECK(a.size() == b.size());
  if (a.constant() || b.constant()) return std::nullopt;
  std::vector<int64_t> other(a.size());  // b's ranks in a's order, those of a's ties ascending
  for (int64_t i = 0; i < a.size(); ++i) other[i] = b.ranks()[a.best()[i]];
  int64_t tied_in_both = 0;
  for (int64_t begin = 0, end = 0; begin < a.size(); begin = end) {
    while (end < a.size() && a.ranks()[a.best()[end]] == a.ranks()[a.best()[begin]]) ++end;
    std::sort(other.begin() + begin, other.begin() + end);
    for (int64_t i = begin, next = begin; i < end; i = next) {
      while (next < end && other[next] == other[i]) ++next;
      tied_in_both += PairsOf(next - i);
    }
  }
  const int64_t discordant = CountInversions(other);
  const int64_t pairs = PairsOf(a.size());
  const int64_t untied = pairs - a.tied_pairs() - b.tied_pairs() + tied_in_both;  // in neither
  return static_cast<double>(untied - 2 * discordant) /
         std::sqrt(static_cast<double>(pairs - a.tied_pairs()) *
                   static_cast<double>(pairs - b.tied_pairs()));
}

std::optional<double> TopOverlap(const RankedScores& a, const RankedScores& b, int32_t k) {
  MS_CHECK(a.size() == b.size());
  if (a.constant() || b.constant()) return std::nullopt;
  const int64_t count = std::min<int64_t>(k, a.size());
  const auto first = a.best().first(count), second = b.best().first(count);
  std::vector<int32_t> x(first.begin(), first.end()), y(second.begin(), second.end()), both;
  std::sort(x.begin(), x.end());
  std::sort(y.begin(), y.end());
  std::set_intersection(x.begin(), x.end(), y.begin(), y.end(), std::back_inserter(both));
  return static_cast<double>(both.size()) / static_cast<double>(count);
}

void AgreementList::Add(const std::string& id, std::span<const float> scores,
                        google::protobuf::RepeatedPtrField<v1::Agreement>* agreements) {
  RankedScores ranked(scores);
  const auto top = static_cast<int32_t>(std::min(kMostTop, (ranked.size() + 1) / 2));
  for (const Entry& earlier : entries_) {
    if (earlier.ranked.size() != ranked.size()) continue;
    v1::Agreement* agreement = agreements->Add();
    agreement->set_first_id(earlier.id);
    agreement->set_second_id(id);
    agreement->set_top(top);
    const auto spearman = Spearman(earlier.ranked, ranked);
    if (spearman.has_value()) agreement->set_spearman(*spearman);
    const auto kendall = KendallTauB(earlier.ranked, ranked);
    if (kendall.has_value()) agreement->set_kendall(*kendall);
    const auto overlap = TopOverlap(earlier.ranked, ranked, top);
    if (overlap.has_value()) agreement->set_top_overlap(*overlap);
  }
  entries_.push_back({id, std::move(ranked)});
}

}  // namespace mambascope::explain
