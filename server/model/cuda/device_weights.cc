#include "server/model/cuda/device_weights.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/model/inventory.h"

namespace mambascope::model::cuda {
namespace {

using kernels::ElementType;
using kernels::WeightMatrix;
using kernels::cuda::DeviceArray;
using kernels::cuda::Stream;

constexpr int64_t kRowAlignment = 16;  // bytes, which the tensor cores' copies want

int64_t SizeOf(ElementType type) { return type == ElementType::kBF16 ? 2 : 4; }

// Elements between the rows of a matrix that a GEMM reads.
int64_t GemmStride(const WeightMatrix& matrix) {
  if (matrix.type != ElementType::kBF16) return matrix.cols;
  constexpr int64_t kElements = kRowAlignment / 2;
  return (matrix.cols + kElements - 1) / kElements * kElements;
}

int64_t Count(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

}  // namespace

absl::StatusOr<const void*> DeviceWeights::Add(const std::byte* from, int64_t bytes,
                                               cudaStream_t stream) {
  ASSIGN_OR_RETURN(DeviceArray<std::byte> array, DeviceArray<std::byte>::Create(bytes));
  RETURN_IF_ERROR(array.CopyFrom(from, bytes, stream));
  arrays_.push_back(std::move(array));
  return static_cast<const void*>(arrays_.back().data());
}

absl::Status DeviceWeights::AddNumbers(const float*& numbers, int64_t count, cudaStream_t stream) {
  ASSIGN_OR_RETURN(const void* added, Add(reinterpret_cast<const std::byte*>(numbers),
                                          count * int64_t{sizeof(float)}, stream));
  numbers = static_cast<const float*>(added);
  return absl::OkStatus();
}

absl::Status DeviceWeights::AddMatrix(WeightMatrix& matrix, int64_t stride, cudaStream_t stream) {
  const int64_t size = SizeOf(matrix.type);
  const auto* from = static_cast<const std::byte*>(matrix.data);
  std::vector<std::byte> packed;
  if (stride != matrix.stride) {
    packed.resize(matrix.rows * stride * size);
    for (int64_t row = 0; row < matrix.rows; ++row) {
      std::memcpy(packed.data() + row * stride * size, from + row * matrix.stride * size,
                  matrix.cols * size);
    }
    from = packed.data();
  }
  ASSIGN_OR_RETURN(matrix.data, Add(from, matrix.rows * stride * size, stream));
  matrix.stride = stride;
  return absl::OkStatus();
}

absl::StatusOr<DeviceWeights> DeviceWeights::Upload(const ModelConfig& config,
                                                    const WeightViews& host, const Stream& stream) {
  DeviceWeights weights;
  WeightViews& views = weights.views_;
  const bool tied = host.head.data == host.embeddings.data;
  const std::vector<Expected> tensors = ListTensors(config, /*own_head=*/!tied, views);
  // The inventory points into `views`, whose parts first are those of the host.
  views.embeddings = host.embeddings;
  views.patches = host.patches;
  std::copy(host.layers.begin(), host.layers.end(), views.layers.begin());
  views.norm_f = host.norm_f;
  views.head = host.head;
  views.head_bias = host.head_bias;

  for (const Expected& tensor : tensors) {
    absl::Status status;
    if (tensor.matrix != nullptr) {
      const bool looked_up = tensor.matrix == &views.embeddings;
      const int64_t stride = looked_up ? tensor.matrix->cols : GemmStride(*tensor.matrix);
      status = weights.AddMatrix(*tensor.matrix, stride, stream.get());
    } else if (*tensor.numbers != nullptr) {
      status = weights.AddNumbers(*tensor.numbers, Count(tensor.shape), stream.get());
    }
    if (!status.ok()) {
      return absl::Status(status.code(), absl::StrCat(tensor.name, ": ", status.message()));
    }
  }
  if (tied) {
    if (views.embeddings.stride == GemmStride(host.head)) {
      views.head = views.embeddings;
    } else {  // of bf16 with an odd width
      RETURN_IF_ERROR(weights.AddMatrix(views.head, GemmStride(host.head), stream.get()));
    }
  }
  RETURN_IF_ERROR(stream.Wait());
  return weights;
}

}  // namespace mambascope::model::cuda
