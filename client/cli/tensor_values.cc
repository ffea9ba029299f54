#include "client/cli/tensor_values.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"

namespace mambascope::cli {
namespace {

// Tensors travel as little-endian bytes and are copied as they are.
static_assert(std::endian::native == std::endian::little);

constexpr int64_t kMostValues = int64_t{1} << 30;

absl::Status NotWhole(const v1::TensorInfo& info) {
  return absl::DataLossError(absl::StrCat("tensor '", info.name(), "' is not whole"));
}

// The bytes of a tensor from its first on.
class Reader {
 public:
  explicit Reader(const Tensor& tensor) : info_(tensor.info), left_(tensor.bytes) {}

  bool Has(int64_t bytes) const { return static_cast<int64_t>(left_.size()) >= bytes; }
  template <typename T>
  T Next() {
    T value;
    std::memcpy(&value, left_.data(), sizeof(T));
    left_.remove_prefix(sizeof(T));
    return value;
  }
  float NextFloat() {
    return info_.dtype() == v1::DATA_TYPE_FP16 ? FloatFromHalf(Next<uint16_t>()) : Next<float>();
  }

 private:
  const v1::TensorInfo& info_;
  absl::string_view left_;
};

absl::Status ReadSlabs(const v1::TensorInfo& info, Reader reader, std::vector<float>* values) {
  const int64_t slab = SizeOfLast(info, 2);
  for (size_t begin = 0; begin < values->size(); begin += slab) {
    if (!reader.Has(kGridBytes + slab)) return NotWhole(info);
    const auto scale = reader.Next<float>(), zero = reader.Next<float>();
    for (int64_t i = 0; i < slab; ++i) {
      (*values)[begin + i] = scale * (static_cast<float>(reader.Next<uint8_t>()) - zero);
    }
  }
  return absl::OkStatus();
}

absl::Status ReadSparseRow(const v1::TensorInfo& info, Reader* reader, std::span<float> row) {
  if (!reader->Has(kCountBytes)) return NotWhole(info);
  std::vector<uint32_t> columns;
  const auto count = reader->Next<uint32_t>();
  if (!reader->Has(int64_t{count} * (kColumnBytes + BytesPerValue(info.dtype())))) {
    return NotWhole(info);
  }
  for (uint32_t i = 0; i < count; ++i) {
    const auto column = reader->Next<uint32_t>();
    if (column >= row.size() || (i > 0 && column <= columns.back())) {
      return absl::DataLossError(
          absl::StrCat("tensor '", info.name(), "': the columns of a row are out of order"));
    }
    columns.push_back(column);
  }
  for (const uint32_t column : columns) row[column] = reader->NextFloat();
  return absl::OkStatus();
}

absl::Status ReadSparse(const v1::TensorInfo& info, Reader reader, std::vector<float>* values) {
  const int64_t columns = SizeOfLast(info, 1);
  for (size_t begin = 0; begin < values->size(); begin += columns) {
    RETURN_IF_ERROR(
        ReadSparseRow(info, &reader, std::span<float>(*values).subspan(begin, columns)));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t BytesPerValue(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FP32:
    case v1::DATA_TYPE_INT32:
      return 4;
    case v1::DATA_TYPE_FP16:
      return 2;
    case v1::DATA_TYPE_UINT8:
      return 1;
    default:
      return 0;
  }
}

// From the last on: an axis of 0 may stand after large ones.
int64_t SizeOfLast(const v1::TensorInfo& info, int count) {
  int64_t size = 1;
  for (int axis = info.axes_size() - 1; axis >= std::max(info.axes_size() - count, 0); --axis) {
    size *= info.axes(axis).size();
  }
  return size;
}

float FloatFromHalf(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
  if (exponent == 0) {  // zero and subnormals: exact as a product
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign == 0 ? magnitude : -magnitude;
  }
  const uint32_t widened = exponent == 31 ? 0xff : exponent - 15 + 127;
  return std::bit_cast<float>(sign | widened << 23 | fraction << 13);
}

absl::StatusOr<std::vector<float>> Floats(const Tensor& tensor) {
  const v1::TensorInfo& info = tensor.info;
  if (info.dtype() == v1::DATA_TYPE_INT32 || BytesPerValue(info.dtype()) == 0) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", info.name(), "' holds no floats"));
  }
  const int64_t size = SizeOfLast(info, info.axes_size());
  if (size > kMostValues) {
    return absl::ResourceExhaustedError(
        absl::StrCat("tensor '", info.name(), "' has ", size, " values, more than 2^30"));
  }
  std::vector<float> values(size);
  Reader reader(tensor);
  if (info.encoding() == v1::ENCODING_SPARSE_ROWS) {
    RETURN_IF_ERROR(ReadSparse(info, reader, &values));
  } else if (info.dtype() == v1::DATA_TYPE_UINT8) {
    RETURN_IF_ERROR(ReadSlabs(info, reader, &values));
  } else {
    if (!reader.Has(size * BytesPerValue(info.dtype()))) return NotWhole(info);
    for (float& value : values) value = reader.NextFloat();
  }
  return values;
}

std::vector<int32_t> Integers(const Tensor& tensor) {
  if (tensor.info.dtype() != v1::DATA_TYPE_INT32) return {};
  std::vector<int32_t> values(tensor.bytes.size() / sizeof(int32_t));
  std::memcpy(values.data(), tensor.bytes.data(), values.size() * sizeof(int32_t));
  return values;
}

}  // namespace mambascope::cli
