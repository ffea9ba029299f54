#include "server/explain/tensor_writer.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "absl/strings/escaping.h"
#include "server/base/check.h"
#include "server/explain/half.h"
#include "server/explain/quantize.h"
#include "server/explain/sparse.h"

namespace mambascope::explain {
namespace {

static_assert(std::endian::native == std::endian::little, "values are sent as they lie in memory");

constexpr int64_t kGridBytes = 8;  // scale and zero before a slab

int64_t ElementBytes(v1::DataType dtype) {
  if (dtype == v1::DATA_TYPE_UINT8) return 1;
  return dtype == v1::DATA_TYPE_FP16 ? 2 : 4;
}

bool IsSparse(const v1::TensorInfo& info) { return info.encoding() == v1::ENCODING_SPARSE_ROWS; }

// Product of the last `count` axes, of fewer all.
int64_t SizeOfLast(const v1::TensorInfo& info, int count) {
  int64_t size = 1;
  for (int a = std::max(info.axes_size() - count, 0); a < info.axes_size(); ++a) {
    size *= info.axes(a).size();
  }
  return size;
}

int64_t SizeOf(const v1::TensorInfo& info) { return SizeOfLast(info, info.axes_size()); }

// Values that are encoded together: a row, a slab, or each by itself.
int64_t UnitOf(const v1::TensorInfo& info) {
  if (IsSparse(info)) return SizeOfLast(info, 1);
  return info.dtype() == v1::DATA_TYPE_UINT8 ? SizeOfLast(info, 2) : 1;
}

// Whether the labels say no more than the position does.
bool AreIndices(const std::vector<int32_t>& labels) {
  for (size_t i = 0; i < labels.size(); ++i) {
    if (labels[i] != static_cast<int32_t>(i)) return false;
  }
  return true;
}

std::string Encode(std::span<const float> values, v1::DataType dtype) {
  std::string bytes;
  if (dtype == v1::DATA_TYPE_FP32) {
    bytes.assign(reinterpret_cast<const char*>(values.data()), values.size_bytes());
  } else {
    AppendHalves(values, bytes);
  }
  return bytes;
}

}  // namespace

v1::TensorInfo MakeTensorInfo(std::string name, std::vector<Axis> axes, v1::DataType dtype) {
  v1::TensorInfo info;
  info.set_name(std::move(name));
  info.set_dtype(dtype);
  info.set_encoding(v1::ENCODING_DENSE);
  for (const Axis& axis : axes) {
    auto* added = info.add_axes();
    added->set_name(axis.name);
    added->set_size(axis.size);
    if (!AreIndices(axis.labels))
      added->mutable_labels()->Add(axis.labels.begin(), axis.labels.end());
  }
  info.set_total_bytes(TotalBytes(info, {}));
  return info;
}

int64_t TotalBytes(const v1::TensorInfo& info, const v1::Delivery& delivery) {
  const int64_t size = SizeOf(info);
  if (size == 0) return 0;
  const int64_t units = size / UnitOf(info);
  if (IsSparse(info)) {
    return units * SparseRowEncoder::MaxRowBytes(delivery, SizeOfLast(info, 1));
  }
  return size * ElementBytes(info.dtype()) +
         (info.dtype() == v1::DATA_TYPE_UINT8 ? units * kGridBytes : 0);
}

int64_t WriterBytes(const v1::TensorInfo& info) {
  const int64_t unit = UnitOf(info);
  if (IsSparse(info)) return unit * (4 + SparseRowEncoder::kHeldBytes);
  return unit > 1 ? unit * 4 : 0;
}

struct TensorWriter::Stream {
  Stream(v1::TensorInfo tensor, const v1::Delivery& delivery)
      : info(std::move(tensor)),
        unit(UnitOf(info)),
        missing(SizeOf(info)),
        digest(EVP_MD_CTX_new()) {
    MS_CHECK(digest != nullptr && EVP_DigestInit_ex(digest, EVP_sha256(), nullptr) == 1);
    if (IsSparse(info)) sparse = std::make_unique<SparseRowEncoder>(delivery);
  }
  ~Stream() { EVP_MD_CTX_free(digest); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  v1::TensorInfo info;
  int64_t unit;        // values that are encoded together
  int64_t missing;     // values still to come
  int64_t offset = 0;  // bytes sent
  EVP_MD_CTX* digest;
  std::unique_ptr<SparseRowEncoder> sparse;  // of sparse tensors
  std::vector<float> held;                   // the beginning of a unit
  std::vector<float>* record = nullptr;
};

TensorWriter::TensorWriter(std::string explanation_id, std::vector<v1::TensorInfo> tensors,
                           int64_t max_chunk_bytes, EventSink* sink, const v1::Delivery& delivery)
    : explanation_id_(std::move(explanation_id)), max_chunk_bytes_(max_chunk_bytes), sink_(sink) {
  MS_CHECK(max_chunk_bytes >= 4);  // one element
  for (v1::TensorInfo& tensor : tensors) {
    streams_.push_back(std::make_unique<Stream>(std::move(tensor), delivery));
  }
}

TensorWriter::~TensorWriter() = default;

TensorWriter::Stream& TensorWriter::Find(absl::string_view tensor) {
  const auto found = std::find_if(streams_.begin(), streams_.end(), [&](const auto& stream) {
    return absl::string_view(stream->info.name()) == tensor;
  });
  MS_CHECK(found != streams_.end());
  return **found;
}

void TensorWriter::Record(absl::string_view tensor, std::vector<float>* values) {
  Stream& stream = Find(tensor);
  MS_CHECK(stream.record == nullptr && stream.info.dtype() != v1::DATA_TYPE_INT32);
  stream.record = values;
}

void TensorWriter::Write(absl::string_view tensor, std::span<const float> values) {
  Stream& stream = Find(tensor);
  MS_CHECK(stream.info.dtype() != v1::DATA_TYPE_INT32);
  stream.missing -= static_cast<int64_t>(values.size());
  MS_CHECK(stream.missing >= 0);
  if (stream.record != nullptr) {
    stream.record->insert(stream.record->end(), values.begin(), values.end());
  }
  if (stream.unit == 1 && !IsSparse(stream.info) && stream.info.dtype() != v1::DATA_TYPE_UINT8) {
    WriteDense(stream, values);
  } else {
    WriteUnits(stream, values);
  }
}

void TensorWriter::WriteDense(Stream& stream, std::span<const float> values) {
  const v1::DataType dtype = stream.info.dtype();
  const size_t most = max_chunk_bytes_ / ElementBytes(dtype);  // chunks are cut between elements
  for (size_t begin = 0; begin < values.size(); begin += most) {
    Emit(stream, Encode(values.subspan(begin, std::min(most, values.size() - begin)), dtype));
  }
}

void TensorWriter::WriteUnits(Stream& stream, std::span<const float> values) {
  std::string bytes;
  while (!values.empty()) {
    const auto held = static_cast<int64_t>(stream.held.size());
    const auto next = values.first(std::min<size_t>(stream.unit - held, values.size()));
    values = values.subspan(next.size());
    if (static_cast<int64_t>(next.size()) == stream.unit) {  // whole, and nothing is held
      AppendUnit(stream, next, bytes);
      continue;
    }
    if (stream.held.empty()) stream.held.reserve(stream.unit);
    stream.held.insert(stream.held.end(), next.begin(), next.end());
    if (static_cast<int64_t>(stream.held.size()) < stream.unit) break;
    AppendUnit(stream, stream.held, bytes);
    stream.held.clear();
  }
  if (!bytes.empty()) Emit(stream, std::move(bytes));
}

void TensorWriter::AppendUnit(Stream& stream, std::span<const float> unit, std::string& bytes) {
  if (stream.sparse == nullptr) {
    AppendSlab(stream, unit, bytes);
  } else {
    stream.sparse->Append(unit, bytes);
    EmitFullChunks(stream, bytes);
  }
}

// Piece by piece: a slab can be as large as a layer's map.
void TensorWriter::AppendSlab(Stream& stream, std::span<const float> slab, std::string& bytes) {
  const Grid grid = GridOf(slab);
  const float pair[] = {grid.scale, grid.zero};
  static_assert(sizeof(pair) == kGridBytes);
  bytes.append(reinterpret_cast<const char*>(pair), sizeof(pair));
  EmitFullChunks(stream, bytes);
  for (const float value : slab) {
    bytes.push_back(static_cast<char>(Quantize(value, grid)));
    if (static_cast<int64_t>(bytes.size()) >= max_chunk_bytes_) EmitFullChunks(stream, bytes);
  }
}

// Leaves less than a chunk.
void TensorWriter::EmitFullChunks(Stream& stream, std::string& bytes) {
  size_t begin = 0;
  for (const size_t most = max_chunk_bytes_; bytes.size() - begin >= most; begin += most) {
    Emit(stream, bytes.substr(begin, most));
  }
  bytes.erase(0, begin);
}

void TensorWriter::Write(absl::string_view tensor, std::span<const int32_t> values) {
  Stream& stream = Find(tensor);
  MS_CHECK(stream.info.dtype() == v1::DATA_TYPE_INT32);
  stream.missing -= static_cast<int64_t>(values.size());
  MS_CHECK(stream.missing >= 0);
  const size_t most = max_chunk_bytes_ / 4;
  for (size_t begin = 0; begin < values.size(); begin += most) {
    const auto part = values.subspan(begin, std::min(most, values.size() - begin));
    Emit(stream, std::string(reinterpret_cast<const char*>(part.data()), part.size_bytes()));
  }
}

void TensorWriter::Emit(Stream& stream, std::string data) {
  const auto bytes = static_cast<int64_t>(data.size());
  MS_CHECK(stream.offset + bytes <= stream.info.total_bytes());
  MS_CHECK(EVP_DigestUpdate(stream.digest, data.data(), data.size()) == 1);
  v1::PredictEvent event;
  v1::TensorChunk* chunk = event.mutable_tensor_chunk();
  chunk->set_explanation_id(explanation_id_);
  chunk->set_tensor(stream.info.name());
  chunk->set_byte_offset(stream.offset);
  chunk->set_data(std::move(data));
  stream.offset += bytes;
  bytes_written_ += bytes;
  sink_->Send(std::move(event));
}

std::vector<v1::ExplanationFinished::Digest> TensorWriter::Finish() {
  std::vector<v1::ExplanationFinished::Digest> digests;
  for (const auto& stream : streams_) {
    MS_CHECK(stream->missing == 0);
    MS_CHECK(stream->sparse != nullptr || stream->offset == stream->info.total_bytes());
    std::array<unsigned char, EVP_MAX_MD_SIZE> value;
    unsigned size = 0;
    MS_CHECK(EVP_DigestFinal_ex(stream->digest, value.data(), &size) == 1);
    v1::ExplanationFinished::Digest& digest = digests.emplace_back();
    digest.set_tensor(stream->info.name());
    digest.set_sha256(absl::BytesToHexString(
        absl::string_view(reinterpret_cast<const char*>(value.data()), size)));
  }
  return digests;
}

std::vector<float> TensorWriter::mass_kept() const {
  std::vector<float> kept;
  for (const auto& stream : streams_) {
    kept.push_back(stream->sparse == nullptr ? 1.0f
                                             : static_cast<float>(stream->sparse->mass_kept()));
  }
  return kept;
}

}  // namespace mambascope::explain
