#include "server/explain/delivery.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"

namespace mambascope::explain {
namespace {

// Written so that NaN fails too.
void CheckSparse(const v1::Delivery& delivery, Violations& violations) {
  std::string field;
  switch (delivery.sparse_case()) {
    case v1::Delivery::kSparseTopK:
      field = "delivery.sparse_top_k";
      if (delivery.sparse_top_k() < 1) {
        violations.Add(field, absl::StrCat(delivery.sparse_top_k(), " is below 1"));
      }
      break;
    case v1::Delivery::kSparseThreshold:
      field = "delivery.sparse_threshold";
      if (!(delivery.sparse_threshold() > 0) || !std::isfinite(delivery.sparse_threshold())) {
        violations.Add(field,
                       absl::StrCat(delivery.sparse_threshold(), " is not above 0 and finite"));
      }
      break;
    case v1::Delivery::kSparseMass:
      field = "delivery.sparse_mass";
      if (!(delivery.sparse_mass() > 0 && delivery.sparse_mass() <= 1)) {
        violations.Add(field, absl::StrCat(delivery.sparse_mass(), " is outside (0, 1]"));
      }
      break;
    case v1::Delivery::SPARSE_NOT_SET:
      return;
  }
  if (delivery.dtype() == v1::DATA_TYPE_UINT8) {
    violations.Add(field, "does not go with DATA_TYPE_UINT8; FP32 and FP16 can be sparse");
  }
}

bool CanBeSparse(const v1::TensorInfo& info) {
  return info.axes_size() > 0 && info.axes(info.axes_size() - 1).name() == "input_tokens" &&
         info.total_bytes() > 0 &&
         (info.dtype() == v1::DATA_TYPE_FP32 || info.dtype() == v1::DATA_TYPE_FP16);
}

}  // namespace

void CheckDelivery(const v1::Delivery& delivery, Violations& violations) {
  const v1::DataType dtype = FloatTypeOf(delivery);
  if (dtype != v1::DATA_TYPE_FP32 && dtype != v1::DATA_TYPE_FP16 && dtype != v1::DATA_TYPE_UINT8) {
    violations.Add("delivery.dtype", absl::StrCat(static_cast<int>(delivery.dtype()),
                                                  " is none of FP32, FP16 and UINT8"));
  }
  const int32_t chunk = delivery.max_chunk_bytes();
  if (chunk != 0 && (chunk < (1 << 10) || chunk > (1 << 20))) {
    violations.Add("delivery.max_chunk_bytes", absl::StrCat(chunk, " is outside 1024 to 1048576"));
  }
  CheckSparse(delivery, violations);
}

v1::DataType FloatTypeOf(const v1::Delivery& delivery) {
  return delivery.dtype() == v1::DATA_TYPE_UNSPECIFIED ? v1::DATA_TYPE_FP32 : delivery.dtype();
}

void ApplyDelivery(const v1::Delivery& delivery, Plan* plan) {
  for (v1::TensorInfo& tensor : plan->tensors) {
    if (delivery.sparse_case() != v1::Delivery::SPARSE_NOT_SET && CanBeSparse(tensor)) {
      tensor.set_encoding(v1::ENCODING_SPARSE_ROWS);
      tensor.set_total_bytes(TotalBytes(tensor, delivery));
    }
    plan->memory_bytes += WriterBytes(tensor);
  }
}

}  // namespace mambascope::explain
