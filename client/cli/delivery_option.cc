#include "client/cli/delivery_option.h"

#include <cstdint>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace mambascope::cli {

absl::Status ParseDeliveryType(absl::string_view option, v1::Delivery* delivery) {
  if (option == "fp32") {
    delivery->set_dtype(v1::DATA_TYPE_FP32);
  } else if (option == "fp16") {
    delivery->set_dtype(v1::DATA_TYPE_FP16);
  } else if (option == "uint8") {
    delivery->set_dtype(v1::DATA_TYPE_UINT8);
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("'", option, "' is not one of fp32, fp16, uint8"));
  }
  return absl::OkStatus();
}

absl::Status ParseSparse(absl::string_view option, v1::Delivery* delivery) {
  const size_t colon = option.find(':');
  const absl::string_view rule = option.substr(0, colon);
  const absl::string_view value =
      colon == absl::string_view::npos ? absl::string_view() : option.substr(colon + 1);
  int32_t count = 0;
  float bound = 0;
  if (rule == "top_k" && absl::SimpleAtoi(value, &count)) {
    delivery->set_sparse_top_k(count);
  } else if (rule == "threshold" && absl::SimpleAtof(value, &bound)) {
    delivery->set_sparse_threshold(bound);
  } else if (rule == "mass" && absl::SimpleAtof(value, &bound)) {
    delivery->set_sparse_mass(bound);
  } else {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", option, "' is not one of top_k:N, threshold:X, mass:X, as top_k:8 or mass:0.95"));
  }
  return absl::OkStatus();
}

}  // namespace mambascope::cli
