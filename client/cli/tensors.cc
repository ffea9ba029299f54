#include "client/cli/tensors.h"

#include <openssl/evp.h>

#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace mambascope::cli {
namespace {

// Tensors travel as little-endian bytes and are copied as they are.
static_assert(std::endian::native == std::endian::little);

int64_t BytesPerValue(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FP32:
    case v1::DATA_TYPE_INT32:
      return 4;
    case v1::DATA_TYPE_FP16:
      return 2;
    default:
      return 0;
  }
}

absl::Status CheckInfo(const v1::TensorInfo& info) {
  int64_t bytes = BytesPerValue(info.dtype());
  if (bytes == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", info.name(),
                     "' has a type unknown to this program: ", static_cast<int>(info.dtype())));
  }
  for (const v1::TensorInfo::Axis& axis : info.axes()) {
    if (axis.size() < 0 || __builtin_mul_overflow(bytes, axis.size(), &bytes)) {
      return absl::DataLossError(
          absl::StrCat("tensor '", info.name(), "' has an impossible shape"));
    }
  }
  if (bytes != info.total_bytes()) {
    return absl::DataLossError(absl::StrCat("tensor '", info.name(), "' is announced with ",
                                            info.total_bytes(), " bytes, but its shape makes ",
                                            bytes));
  }
  return absl::OkStatus();
}

}  // namespace

struct TensorSet::Arrival {
  int64_t bytes = 0;
  std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> hash{EVP_MD_CTX_new(), &EVP_MD_CTX_free};
};

TensorSet::TensorSet() = default;
TensorSet::~TensorSet() = default;
TensorSet::TensorSet(TensorSet&&) noexcept = default;
TensorSet& TensorSet::operator=(TensorSet&&) noexcept = default;

absl::Status TensorSet::Announce(const Infos& infos, bool keep) {
  keep_ = keep;
  for (const v1::TensorInfo& info : infos) {
    if (absl::Status status = CheckInfo(info); !status.ok()) return status;
    for (const Tensor& earlier : tensors_) {
      if (earlier.info.name() == info.name()) {
        return absl::DataLossError(absl::StrCat("tensor '", info.name(), "' is announced twice"));
      }
    }
    tensors_.push_back({info, ""});
    if (EVP_DigestInit_ex(arrivals_.emplace_back().hash.get(), EVP_sha256(), nullptr) != 1) {
      return absl::InternalError("SHA-256 is not available");
    }
  }
  return absl::OkStatus();
}

absl::Status TensorSet::Append(const v1::TensorChunk& chunk) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    Tensor& tensor = tensors_[i];
    if (tensor.info.name() != chunk.tensor()) continue;
    Arrival& arrival = arrivals_[i];
    if (chunk.byte_offset() != arrival.bytes) {
      return absl::DataLossError(absl::StrCat("tensor '", chunk.tensor(),
                                              "': a piece begins at byte ", chunk.byte_offset(),
                                              ", but ", arrival.bytes, " have come"));
    }
    const auto size = static_cast<int64_t>(chunk.data().size());
    if (size > tensor.info.total_bytes() - arrival.bytes) {
      return absl::DataLossError(absl::StrCat("tensor '", chunk.tensor(),
                                              "': more than the announced ",
                                              tensor.info.total_bytes(), " bytes came"));
    }
    EVP_DigestUpdate(arrival.hash.get(), chunk.data().data(), chunk.data().size());
    arrival.bytes += size;
    if (keep_) tensor.bytes.append(chunk.data());
    return absl::OkStatus();
  }
  return absl::DataLossError(
      absl::StrCat("a piece came of tensor '", chunk.tensor(), "', which was not announced"));
}

absl::Status TensorSet::CheckComplete() const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const v1::TensorInfo& info = tensors_[i].info;
    if (arrivals_[i].bytes != info.total_bytes()) {
      return absl::DataLossError(absl::StrCat("tensor '", info.name(), "': ", arrivals_[i].bytes,
                                              " of ", info.total_bytes(), " bytes came"));
    }
  }
  return absl::OkStatus();
}

absl::Status TensorSet::CheckDigests(const Digests& digests) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const std::string& name = tensors_[i].info.name();
    char hash[32];
    EVP_DigestFinal_ex(arrivals_[i].hash.get(), reinterpret_cast<unsigned char*>(hash), nullptr);
    const std::string expected = absl::BytesToHexString(absl::string_view(hash, sizeof(hash)));
    bool found = false;
    for (const auto& digest : digests) {
      if (digest.tensor() != name) continue;
      found = true;
      if (digest.sha256() != expected) {
        return absl::DataLossError(absl::StrCat("tensor '", name,
                                                "': the bytes that came have SHA-256 ", expected,
                                                ", the server sent ", digest.sha256()));
      }
    }
    if (!found) {
      return absl::DataLossError(absl::StrCat("tensor '", name, "' came without its digest"));
    }
  }
  return absl::OkStatus();
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
  std::vector<float> values;
  if (tensor.info.dtype() == v1::DATA_TYPE_FP32) {
    values.resize(tensor.bytes.size() / sizeof(float));
    std::memcpy(values.data(), tensor.bytes.data(), values.size() * sizeof(float));
  } else if (tensor.info.dtype() == v1::DATA_TYPE_FP16) {
    values.resize(tensor.bytes.size() / sizeof(uint16_t));
    for (size_t i = 0; i < values.size(); ++i) {
      uint16_t half;
      std::memcpy(&half, tensor.bytes.data() + i * sizeof(half), sizeof(half));
      values[i] = FloatFromHalf(half);
    }
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", tensor.info.name(), "' holds no floats"));
  }
  return values;
}

}  // namespace mambascope::cli
