#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

struct Tensor {
  v1::TensorInfo info;
  std::string bytes;  // as delivered; empty when only checked
};

// Puts together the tensors of one explanation, or those of the prediction itself, and holds them
// against what was announced. Every status but OK means that the answer cannot be trusted. Memory
// grows with what has arrived, never with what was announced.
class TensorSet {
 public:
  using Infos = google::protobuf::RepeatedPtrField<v1::TensorInfo>;
  using Digests = google::protobuf::RepeatedPtrField<v1::ExplanationFinished::Digest>;

  TensorSet();
  ~TensorSet();
  TensorSet(TensorSet&&) noexcept;
  TensorSet& operator=(TensorSet&&) noexcept;

  // `keep`: whether the bytes are kept, or only counted and hashed. Names must be unique, and
  // total_bytes must be what axes and dtype make; of sparse tensors it may be less than that.
  absl::Status Announce(const Infos& infos, bool keep);
  // Of an announced tensor, at the offset that its last piece ended at, within its total; of a
  // sparse one within its rows, whose counts must fit their columns.
  absl::Status Append(const v1::TensorChunk& chunk);
  // Whether every announced byte has come, of sparse tensors every row.
  absl::Status CheckComplete() const;
  // Whether every tensor's bytes have the given SHA-256; every tensor needs one. Call it once.
  absl::Status CheckDigests(const Digests& digests);

  // In the order of their announcement: the first is the main one.
  const std::vector<Tensor>& tensors() const { return tensors_; }

 private:
  struct Arrival;  // how far a tensor has come, and its hash

  std::vector<Tensor> tensors_;
  std::vector<Arrival> arrivals_;  // parallel to tensors_
  bool keep_ = true;
};

}  // namespace mambascope::cli
