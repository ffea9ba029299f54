#include "server/explain/tensor_writer.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "server/base/check.h"
#include "server/explain/half.h"

namespace mambascope::explain {
namespace {

static_assert(std::endian::native == std::endian::little, "values are sent as they lie in memory");

int64_t ElementBytes(v1::DataType dtype) { return dtype == v1::DATA_TYPE_FP16 ? 2 : 4; }

// Whether the labels say no more than the position does.
bool AreIndices(const std::vector<int32_t>& labels) {
  for (size_t i = 0; i < labels.size(); ++i) {
    if (labels[i] != static_cast<int32_t>(i)) return false;
  }
  return true;
}

std::string Encode(std::span<const float> values, v1::DataType dtype) {
  std::string bytes(values.size() * ElementBytes(dtype), '\0');
  if (dtype == v1::DATA_TYPE_FP32) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  } else {
    for (size_t i = 0; i < values.size(); ++i) {
      const uint16_t half = FloatToHalf(values[i]);
      std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
  }
  return bytes;
}

}  // namespace

v1::TensorInfo MakeTensorInfo(std::string name, std::vector<Axis> axes, v1::DataType dtype) {
  v1::TensorInfo info;
  info.set_name(std::move(name));
  info.set_dtype(dtype);
  int64_t bytes = ElementBytes(dtype);
  for (const Axis& axis : axes) {
    auto* added = info.add_axes();
    added->set_name(axis.name);
    added->set_size(axis.size);
    if (!AreIndices(axis.labels))
      added->mutable_labels()->Add(axis.labels.begin(), axis.labels.end());
    bytes *= axis.size;
  }
  info.set_total_bytes(bytes);
  return info;
}

struct TensorWriter::Stream {
  explicit Stream(v1::TensorInfo tensor) : info(std::move(tensor)), digest(EVP_MD_CTX_new()) {
    MS_CHECK(digest != nullptr && EVP_DigestInit_ex(digest, EVP_sha256(), nullptr) == 1);
  }
  ~Stream() { EVP_MD_CTX_free(digest); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  v1::TensorInfo info;
  int64_t offset = 0;  // bytes sent
  EVP_MD_CTX* digest;
};

TensorWriter::TensorWriter(std::string explanation_id, std::vector<v1::TensorInfo> tensors,
                           int64_t max_chunk_bytes, EventSink* sink)
    : explanation_id_(std::move(explanation_id)), max_chunk_bytes_(max_chunk_bytes), sink_(sink) {
  MS_CHECK(max_chunk_bytes >= 4);  // one element
  for (v1::TensorInfo& tensor : tensors) {
    streams_.push_back(std::make_unique<Stream>(std::move(tensor)));
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
  recorded_ = std::string(tensor);
  record_ = values;
}

void TensorWriter::Write(absl::string_view tensor, std::span<const float> values) {
  if (record_ != nullptr && tensor == recorded_) {
    record_->insert(record_->end(), values.begin(), values.end());
  }
  Stream& stream = Find(tensor);
  const v1::DataType dtype = stream.info.dtype();
  MS_CHECK(dtype == v1::DATA_TYPE_FP32 || dtype == v1::DATA_TYPE_FP16);
  const size_t most = max_chunk_bytes_ / ElementBytes(dtype);  // chunks are cut between elements
  for (size_t begin = 0; begin < values.size(); begin += most) {
    Emit(stream, Encode(values.subspan(begin, std::min(most, values.size() - begin)), dtype));
  }
}

void TensorWriter::Write(absl::string_view tensor, std::span<const int32_t> values) {
  Stream& stream = Find(tensor);
  MS_CHECK(stream.info.dtype() == v1::DATA_TYPE_INT32);
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
    MS_CHECK(stream->offset == stream->info.total_bytes());
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

}  // namespace mambascope::explain
