#include "client/cli/tensors.h"

#include <openssl/evp.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <optional>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/cli/tensor_values.h"

namespace mambascope::cli {
namespace {

// Tensors travel as little-endian bytes and are copied as they are.
static_assert(std::endian::native == std::endian::little);

bool IsSparse(const v1::TensorInfo& info) { return info.encoding() == v1::ENCODING_SPARSE_ROWS; }

// The most bytes that a tensor of these axes takes; of dense ones exactly that many. Negative: no
// int64 holds it, or no such shape exists.
int64_t MostBytes(const v1::TensorInfo& info) {
  const bool sparse = IsSparse(info), slabs = info.dtype() == v1::DATA_TYPE_UINT8;
  const int together = std::min(info.axes_size(), sparse ? 1 : 2);  // axes of a row or slab
  int64_t bytes = BytesPerValue(info.dtype()) + (sparse ? kColumnBytes : 0);
  bool fits = true;
  for (int leading = info.axes_size(); leading >= 0; --leading) {
    if (info.axes_size() - leading == together) {
      const int64_t head = sparse ? kCountBytes : slabs && bytes > 0 ? kGridBytes : 0;
      fits = fits && !__builtin_add_overflow(bytes, head, &bytes);
    }
    if (leading == 0) break;
    const int64_t size = info.axes(leading - 1).size();
    fits = fits && size >= 0 && !__builtin_mul_overflow(bytes, size, &bytes);
  }
  return fits ? bytes : -1;
}

absl::Status CheckType(const v1::TensorInfo& info) {
  if (BytesPerValue(info.dtype()) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", info.name(),
                     "' has a type unknown to this program: ", static_cast<int>(info.dtype())));
  }
  if (!IsSparse(info)) {
    if (info.encoding() <= v1::ENCODING_DENSE) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor '", info.name(),
        "' has an encoding unknown to this program: ", static_cast<int>(info.encoding())));
  }
  if (info.axes_size() > 0 &&
      (info.dtype() == v1::DATA_TYPE_FP32 || info.dtype() == v1::DATA_TYPE_FP16)) {
    return absl::OkStatus();
  }
  return absl::DataLossError(
      absl::StrCat("tensor '", info.name(), "' is sparse without rows of floats"));
}

absl::Status CheckInfo(const v1::TensorInfo& info) {
  if (absl::Status status = CheckType(info); !status.ok()) return status;
  const int64_t bytes = MostBytes(info);
  if (bytes < 0) {
    return absl::DataLossError(absl::StrCat("tensor '", info.name(), "' has an impossible shape"));
  }
  const bool fits = IsSparse(info) ? info.total_bytes() >= 0 && info.total_bytes() <= bytes
                                   : info.total_bytes() == bytes;
  if (!fits) {
    return absl::DataLossError(absl::StrCat("tensor '", info.name(), "' is announced with ",
                                            info.total_bytes(), " bytes, but its shape makes ",
                                            bytes));
  }
  return absl::OkStatus();
}

// Where in a sparse tensor the bytes have come to.
class RowCounter {
 public:
  explicit RowCounter(const v1::TensorInfo& info)
      : columns_(info.axes(info.axes_size() - 1).size()),
        entry_bytes_(kColumnBytes + BytesPerValue(info.dtype())) {
    // From the last on: MostBytes has seen to it that these products fit.
    for (int axis = info.axes_size() - 2; axis >= 0; --axis) rows_left_ *= info.axes(axis).size();
  }

  // False: more rows than there are, or more entries in one than columns.
  bool Take(absl::string_view bytes) {
    while (!bytes.empty()) {
      if (entries_left_ > 0) {
        const auto taken = std::min<uint64_t>(entries_left_, bytes.size());
        entries_left_ -= taken;
        bytes.remove_prefix(taken);
        continue;
      }
      if (rows_left_ == 0) return false;
      reinterpret_cast<char*>(&count_)[count_bytes_++] = bytes[0];
      bytes.remove_prefix(1);
      if (count_bytes_ < kCountBytes) continue;
      if (count_ > columns_) return false;
      entries_left_ = uint64_t{count_} * entry_bytes_;
      count_bytes_ = 0;
      --rows_left_;
    }
    return true;
  }
  bool complete() const { return rows_left_ == 0 && entries_left_ == 0 && count_bytes_ == 0; }

 private:
  const int64_t columns_;
  const uint64_t entry_bytes_;
  int64_t rows_left_ = 1;
  uint64_t entries_left_ = 0;  // bytes of the entries of the row under way
  uint32_t count_ = 0;
  int64_t count_bytes_ = 0;  // of `count_` that have come
};

}  // namespace

struct TensorSet::Arrival {
  int64_t bytes = 0;
  std::optional<RowCounter> rows;  // of a sparse tensor
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
    Arrival& arrival = arrivals_.emplace_back();
    if (IsSparse(info)) arrival.rows.emplace(info);
    if (EVP_DigestInit_ex(arrival.hash.get(), EVP_sha256(), nullptr) != 1) {
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
    if (arrival.rows && !arrival.rows->Take(chunk.data())) {
      return absl::DataLossError(
          absl::StrCat("tensor '", chunk.tensor(), "': its rows do not hold together"));
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
    if (arrivals_[i].rows) {
      if (arrivals_[i].rows->complete()) continue;
      return absl::DataLossError(absl::StrCat("tensor '", info.name(), "': rows are missing"));
    }
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

}  // namespace mambascope::cli
