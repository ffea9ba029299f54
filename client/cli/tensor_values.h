#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/tensors.h"
#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

// What a tensor's bytes say, as explanation.proto describes them.

constexpr int64_t kGridBytes = 8;    // of UINT8: scale and zero before a slab
constexpr int64_t kCountBytes = 4;   // of SPARSE_ROWS: before a row
constexpr int64_t kColumnBytes = 4;  // of SPARSE_ROWS: of an entry, beside its value

// Of one value; 0 for types that this program does not know.
int64_t BytesPerValue(v1::DataType dtype);

// Product of the last `count` axes, of fewer all.
int64_t SizeOfLast(const v1::TensorInfo& info, int count);

float FloatFromHalf(uint16_t half);

// The values of a tensor of floats that is whole and checked (TensorSet), dense: FP16 widened,
// UINT8 put back on its scale, what SPARSE_ROWS leaves out as 0. kInvalidArgument for INT32,
// kDataLoss for columns out of order, kResourceExhausted for more than 2^30 values, which few bytes
// of a sparse tensor can claim.
absl::StatusOr<std::vector<float>> Floats(const Tensor& tensor);

// The values of a tensor of INT32; empty for others.
std::vector<int32_t> Integers(const Tensor& tensor);

}  // namespace mambascope::cli
