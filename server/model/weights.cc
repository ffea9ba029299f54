#include "server/model/weights.h"

#include <ATen/ATen.h>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/check.h"
#include "server/base/status.h"
#include "server/model/checkpoint.h"
#include "server/model/config_file.h"
#include "server/model/finite.h"
#include "server/model/inventory.h"
#include "server/model/sha256.h"

namespace mambascope::model {
namespace {

constexpr size_t kMostFaults = 20;

std::string Shown(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

bool Aligned(const void* data, size_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

at::ScalarType TypeOf(DType dtype) {
  return dtype == DType::kF32 ? at::kFloat : dtype == DType::kBF16 ? at::kBFloat16 : at::kHalf;
}

// A tensor over the mapped bytes; a copy where they lie off the type's boundary.
at::Tensor Borrow(const TensorView& view) {
  const at::TensorOptions options = at::TensorOptions().dtype(TypeOf(view.dtype));
  if (Aligned(view.bytes.data(), ByteSize(view.dtype))) {
    return at::from_blob(const_cast<std::byte*>(view.bytes.data()), view.shape, options);
  }
  at::Tensor copy = at::empty(view.shape, options);
  std::memcpy(copy.data_ptr(), view.bytes.data(), view.bytes.size());
  return copy;
}

bool IsFinite(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kFloat) {
    return AllFinite(tensor.data_ptr<float>(), tensor.numel());
  }
  const auto* bits = static_cast<const uint16_t*>(tensor.data_ptr());
  const uint16_t exponent = tensor.scalar_type() == at::kBFloat16 ? 0x7f80 : 0x7c00;
  return AllFinite16(bits, tensor.numel(), exponent);
}

// A thread that is joined on every way out.
class Background {
 public:
  template <typename Work>
  explicit Background(Work work) : thread_(std::move(work)) {}
  ~Background() { Join(); }
  void Join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

// The memory behind the weights: mapped bytes where they can be used as they lie, else tensors of
// their own.
class Materials {
 public:
  // What is wrong with the tensor, or nothing.
  std::string Take(const Expected& wanted, const TensorView& view) {
    if (view.dtype != DType::kF32 && view.dtype != DType::kBF16 && view.dtype != DType::kF16) {
      return absl::StrCat("has dtype ", Name(view.dtype), "; supported: F32, BF16, F16");
    }
    if (view.shape != wanted.shape) {
      return absl::StrCat("has shape ", Shown(view.shape), ", the config asks for ",
                          Shown(wanted.shape));
    }
    dtypes_.insert(view.dtype);
    at::Tensor tensor = Borrow(view);
    if (!IsFinite(tensor)) return "has a value that is not finite";
    const bool keep_narrow = wanted.use == Use::kMatrix && view.dtype == DType::kBF16;
    if (!keep_narrow) tensor = tensor.to(at::kFloat);
    if (wanted.use == Use::kDecay) {
      tensor = at::neg(at::exp(tensor));
      if (tensor.dim() == 2) tensor = tensor.t().contiguous();
      if (!IsFinite(tensor)) return "has a value whose exponential is not finite";
    }
    if (wanted.use == Use::kMatrix) {
      const int64_t rows = wanted.shape.front(), cols = tensor.numel() / rows;
      *wanted.matrix = {tensor.data_ptr(),
                        keep_narrow ? kernels::ElementType::kBF16 : kernels::ElementType::kF32,
                        rows, cols, cols};
    } else {
      *wanted.numbers = tensor.data_ptr<float>();
    }
    borrowed_ |= tensor.data_ptr() == static_cast<const void*>(view.bytes.data());
    parameters_ += tensor.numel();
    tensors_.push_back(std::move(tensor));
    return "";
  }

  bool borrowed() const { return borrowed_; }  // whether any tensor is used where it was mapped
  int64_t parameters() const { return parameters_; }
  std::string dtype() const {
    return dtypes_.size() == 1 ? std::string(Name(*dtypes_.begin())) : "mixed";
  }
  std::vector<at::Tensor> TakeTensors() { return std::move(tensors_); }

 private:
  std::vector<at::Tensor> tensors_;
  std::set<DType> dtypes_;
  int64_t parameters_ = 0;
  bool borrowed_ = false;
};

std::string Joined(std::vector<std::string> faults) {
  const size_t more = faults.size() > kMostFaults ? faults.size() - kMostFaults : 0;
  faults.resize(faults.size() - more);
  if (more > 0) faults.push_back(absl::StrCat("and ", more, " more"));
  return absl::StrJoin(faults, "; ");
}

}  // namespace

struct Weights::Storage {
  std::unique_ptr<const Checkpoint> checkpoint;  // null once no tensor lies in it
  std::vector<at::Tensor> tensors;               // borrowing from the files, or their own
};

Weights::Weights() : storage_(std::make_unique<Storage>()) {}
Weights::~Weights() = default;

absl::StatusOr<std::unique_ptr<const Weights>> Weights::Load(const std::string& folder,
                                                             const ModelConfig& config) {
  ASSIGN_OR_RETURN(const std::string config_bytes, ReadConfigFile(folder + "/config.json"));
  std::unique_ptr<Weights> weights(new Weights);
  Storage& storage = *weights->storage_;
  ASSIGN_OR_RETURN(storage.checkpoint, Checkpoint::Open(folder));
  const Checkpoint& checkpoint = *storage.checkpoint;

  // The bytes are read once for the digest; the check for finite values follows behind it.
  Background digest([&] {
    Sha256 sha256;
    sha256.Add(config_bytes.data(), config_bytes.size());
    for (const auto& file : checkpoint.files()) {
      sha256.Add(file->file().data(), file->file().size());
    }
    weights->digest_ = sha256.Hexadecimal();
  });

  // Some tools drop a head that equals the embeddings without saying so in the config, and others
  // keep one that is tied: Hugging Face reads both as tied.
  const bool own_head = checkpoint.Find(kLanguageHead) != nullptr;
  std::set<absl::string_view> known;
  if (config.task == Task::kNextToken) known.insert(kLanguageHead);
  std::vector<std::string> faults;
  Materials materials;
  const std::vector<Expected> expected = ListTensors(config, own_head, weights->views_);
  for (const Expected& wanted : expected) {
    known.insert(wanted.name);
    const TensorView* view = checkpoint.Find(wanted.name);
    if (view == nullptr && wanted.optional) continue;
    const std::string fault = view == nullptr ? "is missing" : materials.Take(wanted, *view);
    if (!fault.empty()) faults.push_back(absl::StrCat(wanted.name, ": ", fault));
  }
  for (const auto& [name, view] : checkpoint.tensors()) {
    weights->stored_bytes_ += static_cast<int64_t>(view.bytes.size());
    if (known.count(name) == 0) {
      faults.push_back(
          absl::StrCat(absl::Utf8SafeCHexEscape(absl::string_view(name).substr(0, 200)),
                       ": is not a tensor of this model"));
    }
  }
  if (!faults.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(checkpoint.path(), ": ", Joined(faults)));
  }
  if (weights->views_.head.data == nullptr) weights->views_.head = weights->views_.embeddings;
  weights->stored_dtype_ = materials.dtype();
  weights->parameters_ = materials.parameters();
  storage.tensors = materials.TakeTensors();
  digest.Join();
  // Where all was widened, mapped pages would count as resident.
  if (!materials.borrowed()) storage.checkpoint.reset();
  return weights;
}

}  // namespace mambascope::model
