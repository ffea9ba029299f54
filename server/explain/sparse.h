#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "mambascope/v1/prediction.pb.h"

namespace mambascope::explain {

// Encodes rows as ENCODING_SPARSE_ROWS: a uint32 count, that many ascending uint32 columns, then
// their values as FP32 or FP16. Which entries: those that the Delivery's rule names; entries of 0
// are never among them, since what is left out counts as 0.
class SparseRowEncoder {
 public:
  // One of the delivery's sparse rules is set.
  explicit SparseRowEncoder(const v1::Delivery& delivery);

  // Appends a row of at least one value to `bytes`.
  void Append(std::span<const float> row, std::string& bytes);

  // Share of the magnitudes of all rows so far that was appended; 1 where there was none.
  double mass_kept() const { return mass_ > 0 ? kept_ / mass_ : 1; }

  // What a row takes while it is encoded, for each of its values: key, column, value, bytes.
  static constexpr int64_t kHeldBytes = 8 + 4 + 4 + 8;
  // The most that one row of `columns` takes.
  static int64_t MaxRowBytes(const v1::Delivery& delivery, int64_t columns);

 private:
  void SelectTop(size_t count);
  void SelectThreshold();
  void SelectMass(double row_mass);

  const v1::Delivery delivery_;
  const bool halves_;
  double mass_ = 0, kept_ = 0;
  // Entries of the row that are not 0: magnitude before column, so that a larger key is a larger
  // magnitude and, of equal ones, a lower column. Selecting leaves the selected ones.
  std::vector<uint64_t> keys_;
  std::vector<uint32_t> columns_;
  std::vector<float> values_;
};

}  // namespace mambascope::explain
