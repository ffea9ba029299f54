#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "mambascope/v1/explanation.pb.h"

namespace mambascope::testing {

// What a client makes of a tensor's delivered bytes, written from the proto's comments alone.
// Throws where bytes are missing or left over, which fails the test.

inline float HalfToFloat(uint16_t half) {
  const int exponent = half >> 10 & 31, significand = half & 1023;
  const float sign = half & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) {
    return significand ? std::numeric_limits<float>::quiet_NaN()
                       : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(significand), -24);
  return sign * std::ldexp(static_cast<float>(1024 + significand), exponent - 25);
}

struct DecodedTensor {
  std::vector<double> values;                  // dense: what was left out is 0
  std::vector<float> scales;                   // of each slab of UINT8
  std::vector<std::vector<uint32_t>> columns;  // of each sparse row
};

class TensorDecoder {
 public:
  TensorDecoder(const v1::TensorInfo& info, const std::string& bytes)
      : info_(info), bytes_(bytes) {}

  DecodedTensor Decode() {
    const int64_t size = SizeOfLast(info_.axes_size());
    if (info_.encoding() == v1::ENCODING_SPARSE_ROWS) {
      const int64_t row = SizeOfLast(1);
      for (int64_t r = 0; r < size / row; ++r) SparseRow(row);
    } else if (info_.dtype() == v1::DATA_TYPE_UINT8) {
      const int64_t slab = SizeOfLast(2);
      for (int64_t s = 0; size > 0 && s < size / slab; ++s) Slab(slab);
    } else {
      for (int64_t i = 0; i < size; ++i) out_.values.push_back(Float());
    }
    if (at_ != bytes_.size()) throw std::runtime_error("bytes left over");
    return std::move(out_);
  }

 private:
  int64_t SizeOfLast(int count) const {
    int64_t size = 1;
    for (int a = 0; a < info_.axes_size(); ++a) {
      if (a >= info_.axes_size() - count) size *= info_.axes(a).size();
    }
    return size;
  }
  template <class T>
  T Next() {
    T value;
    if (at_ + sizeof(T) > bytes_.size()) throw std::runtime_error("bytes missing");
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }
  float Float() {
    return info_.dtype() == v1::DATA_TYPE_FP16 ? HalfToFloat(Next<uint16_t>()) : Next<float>();
  }
  void Slab(int64_t size) {
    const auto scale = Next<float>(), zero = Next<float>();
    out_.scales.push_back(scale);
    for (int64_t i = 0; i < size; ++i) {
      out_.values.push_back(double{scale} * (Next<uint8_t>() - double{zero}));
    }
  }
  void SparseRow(int64_t size) {
    std::vector<uint32_t> columns(Next<uint32_t>());
    for (uint32_t& column : columns) column = Next<uint32_t>();
    std::vector<double> row(size);
    for (const uint32_t column : columns) row.at(column) = Float();
    out_.values.insert(out_.values.end(), row.begin(), row.end());
    out_.columns.push_back(std::move(columns));
  }

  const v1::TensorInfo& info_;
  const std::string& bytes_;
  size_t at_ = 0;
  DecodedTensor out_;
};

inline DecodedTensor DecodeTensor(const v1::TensorInfo& info, const std::string& bytes) {
  return TensorDecoder(info, bytes).Decode();
}

}  // namespace mambascope::testing
