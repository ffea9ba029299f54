#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "google/protobuf/repeated_field.h"
#include "mambascope/v1/explanation.pb.h"

namespace mambascope::explain {

// How far two vectors of equal length agree (methods.md, section 8 "Agreement"). Everything is
// taken of the signed values: the best token is the one of largest value, not of largest magnitude.

// A vector as its entries rank, sorted once for all its comparisons.
class RankedScores {
 public:
  explicit RankedScores(std::span<const float> scores);
  explicit RankedScores(std::span<const double> scores);

  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }
  // All values are equal (or there are none): nothing is defined of such a vector.
  bool constant() const { return tied_pairs_ == size() * (size() - 1) / 2; }
  // Entries from the largest value to the smallest; ties: lower index first.
  std::span<const int32_t> best() const { return best_; }
  // Twice the zero-based mean rank from the best, an integer: equal values share theirs.
  std::span<const int64_t> ranks() const { return ranks_; }
  int64_t tied_pairs() const { return tied_pairs_; }

  static int64_t Bytes(int64_t size) { return 12 * size; }

 private:
  template <class T>
  void Rank(std::span<const T> scores);

  std::vector<int32_t> best_;
  std::vector<int64_t> ranks_;
  int64_t tied_pairs_ = 0;
};

// Pearson correlation of the mean ranks.
std::optional<double> Spearman(const RankedScores& a, const RankedScores& b);
// (concordant - discordant) / sqrt(pairs untied in a x pairs untied in b), in O(n log n) (Knight
// 1966).
std::optional<double> KendallTauB(const RankedScores& a, const RankedScores& b);
// |top k of a and of b| / k, k at most the length.
std::optional<double> TopOverlap(const RankedScores& a, const RankedScores& b, int32_t k);

// The agreements of one request's explanations, each as soon as the later one is known.
class AgreementList {
 public:
  // Appends to `agreements` those with all earlier scores of the same length. `top` is 10, or half
  // of the tokens (rounded up) if that is fewer.
  void Add(const std::string& id, std::span<const float> scores,
           google::protobuf::RepeatedPtrField<v1::Agreement>* agreements);

 private:
  struct Entry {
    std::string id;
    RankedScores ranked;
  };
  std::vector<Entry> entries_;
};

}  // namespace mambascope::explain
