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

// Bytes of the whole tensor as it travels; of sparse rows the most that may come. A tensor without
// elements has none. `delivery` says what sparse rows hold.
int64_t TotalBytes(const v1::TensorInfo& info, const v1::Delivery& delivery);

// The most that a writer holds of a tensor: an unfinished row or slab, and a row while it is
// encoded.
int64_t WriterBytes(const v1::TensorInfo& info);

// Sends the tensors of one explanation as chunks: encodes the values as their infos say
// (little-endian FP32, FP16, INT32 or UINT8, dense or as sparse rows), cuts them at
// max_chunk_bytes, counts offsets and hashes what was delivered. Values are given in row-major
// order, as many at a time as are ready: what a Write completes is sent with it, of sparse tensors
// whole rows and of UINT8 ones whole slabs.
class TensorWriter {
 public:
  // `explanation_id` empty: tensors of the prediction itself. Borrows `sink`. `delivery`: how infos
  // of sparse rows were made (ApplyDelivery).
  TensorWriter(std::string explanation_id, std::vector<v1::TensorInfo> tensors,
               int64_t max_chunk_bytes, EventSink* sink, const v1::Delivery& delivery = {});
  ~TensorWriter();

  // Also appends every value of a float tensor to `values` as it is written, before any rounding.
  // Borrows `values` until the writer is destroyed; at most one for a tensor.
  void Record(absl::string_view tensor, std::vector<float>* values);

  // The next values of a tensor, which must be among the announced ones and not exceed its size
  // (invariants). Floats for FP32/FP16 tensors, int32 for INT32 ones.
  void Write(absl::string_view tensor, std::span<const float> values);
  void Write(absl::string_view tensor, std::span<const int32_t> values);

  int64_t bytes_written() const { return bytes_written_; }
  // Digests of all tensors; each must be complete (invariant).
  std::vector<v1::ExplanationFinished::Digest> Finish();
  // Of every tensor the share of its mass that was delivered: 1 unless it is sparse.
  std::vector<float> mass_kept() const;

 private:
  struct Stream;
  Stream& Find(absl::string_view tensor);
  void WriteDense(Stream& stream, std::span<const float> values);
  void WriteUnits(Stream& stream, std::span<const float> values);
  void AppendUnit(Stream& stream, std::span<const float> unit, std::string& bytes);
  void AppendSlab(Stream& stream, std::span<const float> slab, std::string& bytes);
  void EmitFullChunks(Stream& stream, std::string& bytes);
  void Emit(Stream& stream, std::string data);

  std::string explanation_id_;
  int64_t max_chunk_bytes_;
  EventSink* sink_;
  std::vector<std::unique_ptr<Stream>> streams_;
  int64_t bytes_written_ = 0;
};

}  // namespace mambascope::explain
