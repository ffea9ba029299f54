#include "server/explain/sparse.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

#include "server/base/check.h"
#include "server/explain/half.h"

namespace mambascope::explain {
namespace {

uint64_t KeyOf(float value, size_t column) {
  const uint32_t magnitude = std::bit_cast<uint32_t>(value) & 0x7fffffff;
  return uint64_t{magnitude} << 32 | static_cast<uint32_t>(~column);
}
uint32_t ColumnOf(uint64_t key) { return ~static_cast<uint32_t>(key); }
double MagnitudeOf(uint64_t key) { return std::bit_cast<float>(static_cast<uint32_t>(key >> 32)); }

template <class T>
void AppendRaw(std::span<const T> values, std::string& bytes) {
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
}

}  // namespace

SparseRowEncoder::SparseRowEncoder(const v1::Delivery& delivery)
    : delivery_(delivery), halves_(delivery.dtype() == v1::DATA_TYPE_FP16) {
  MS_CHECK(delivery.sparse_case() != v1::Delivery::SPARSE_NOT_SET);
}

int64_t SparseRowEncoder::MaxRowBytes(const v1::Delivery& delivery, int64_t columns) {
  const int64_t entries = delivery.sparse_case() == v1::Delivery::kSparseTopK
                              ? std::min<int64_t>(delivery.sparse_top_k(), columns)
                              : columns;
  return 4 + entries * (4 + (delivery.dtype() == v1::DATA_TYPE_FP16 ? 2 : 4));
}

void SparseRowEncoder::Append(std::span<const float> row, std::string& bytes) {
  keys_.clear();
  double row_mass = 0;
  for (size_t column = 0; column < row.size(); ++column) {
    if (row[column] == 0) continue;
    keys_.push_back(KeyOf(row[column], column));
    row_mass += std::abs(double{row[column]});
  }
  switch (delivery_.sparse_case()) {
    case v1::Delivery::kSparseTopK:
      SelectTop(delivery_.sparse_top_k());
      break;
    case v1::Delivery::kSparseThreshold:
      SelectThreshold();
      break;
    case v1::Delivery::kSparseMass:
      SelectMass(row_mass);
      break;
    case v1::Delivery::SPARSE_NOT_SET:
      break;
  }
  columns_.clear();
  for (const uint64_t key : keys_) columns_.push_back(ColumnOf(key));
  std::sort(columns_.begin(), columns_.end());
  values_.clear();
  double row_kept = 0;  // in the order of row_mass: a row that is kept whole keeps all of it
  for (const uint32_t column : columns_) {
    values_.push_back(row[column]);
    row_kept += std::abs(double{row[column]});
  }
  mass_ += row_mass;
  kept_ += row_kept;
  const auto count = static_cast<uint32_t>(columns_.size());
  AppendRaw(std::span(&count, 1), bytes);
  AppendRaw(std::span<const uint32_t>(columns_), bytes);
  if (halves_) {
    AppendHalves(values_, bytes);
  } else {
    AppendRaw(std::span<const float>(values_), bytes);
  }
}

void SparseRowEncoder::SelectTop(size_t count) {
  if (count >= keys_.size()) return;
  std::nth_element(keys_.begin(), keys_.begin() + static_cast<int64_t>(count), keys_.end(),
                   std::greater<>());
  keys_.resize(count);
}

void SparseRowEncoder::SelectThreshold() {
  std::erase_if(keys_,
                [&](uint64_t key) { return MagnitudeOf(key) < delivery_.sparse_threshold(); });
}

// Sorts only as far as is needed, block by block: most rows hold their mass in few entries.
void SparseRowEncoder::SelectMass(double row_mass) {
  if (delivery_.sparse_mass() >= 1) return;
  const double wanted = row_mass * double{delivery_.sparse_mass()};
  double sum = 0;
  size_t sorted = 0;
  for (size_t block = 64; sorted < keys_.size(); block *= 2) {
    const auto begin = keys_.begin() + static_cast<int64_t>(sorted);
    const size_t end = std::min(keys_.size(), sorted + block);
    const auto middle = keys_.begin() + static_cast<int64_t>(end);
    if (end < keys_.size()) std::nth_element(begin, middle, keys_.end(), std::greater<>());
    std::sort(begin, middle, std::greater<>());
    for (; sorted < end; ++sorted) {
      if (sum >= wanted) {
        keys_.resize(sorted);
        return;
      }
      sum += MagnitudeOf(keys_[sorted]);
    }
  }
}

}  // namespace mambascope::explain
