#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "mambascope/v1/explanation.pb.h"
#include "mambascope/v1/prediction.pb.h"
#include "server/explain/event_sink.h"

namespace mambascope::explain {

// Builds the description of a tensor; `labels` name an axis's entries when they are not 0..size-1.
struct Axis {
  std::string name;
  int64_t size = 0;
  std::vector<int32_t> labels;
};
v1::TensorInfo MakeTensorInfo(std::string name, std::vector<Axis> axes, v1::DataType dtype);

// Sends the tensors of one explanation as chunks: encodes the values as little-endian FP32, FP16 or
// INT32, cuts them at max_chunk_bytes, counts offsets and hashes what was delivered. Values are
// given in row-major order, as many at a time as are ready.
class TensorWriter {
 public:
  // `explanation_id` empty: tensors of the prediction itself. Borrows `sink`.
  TensorWriter(std::string explanation_id, std::vector<v1::TensorInfo> tensors,
               int64_t max_chunk_bytes, EventSink* sink);
  ~TensorWriter();

  // The next values of a tensor, which must be among the announced ones and not exceed its size
  // (invariants). Floats for FP32/FP16 tensors, int32 for INT32 ones.
  void Write(absl::string_view tensor, std::span<const float> values);
  void Write(absl::string_view tensor, std::span<const int32_t> values);

  // From now on also appends the floats of a tensor, as they are given, to `values`; borrowed.
  void Record(absl::string_view tensor, std::vector<float>* values);

  int64_t bytes_written() const { return bytes_written_; }
  // Digests of all tensors; each must be complete (invariant).
  std::vector<v1::ExplanationFinished::Digest> Finish();

 private:
  struct Stream;
  Stream& Find(absl::string_view tensor);
  void Emit(Stream& stream, std::string data);

  std::string explanation_id_;
  int64_t max_chunk_bytes_;
  EventSink* sink_;
  std::vector<std::unique_ptr<Stream>> streams_;
  int64_t bytes_written_ = 0;
  std::string recorded_;
  std::vector<float>* record_ = nullptr;
};

}  // namespace mambascope::explain
