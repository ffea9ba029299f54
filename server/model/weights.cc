#include "server/model/weights.h"

#include <ATen/ATen.h>
#include <openssl/evp.h>

#include <array>
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
#include "server/model/config_file.h"
#include "server/model/finite.h"
#include "server/model/safetensors.h"

namespace mambascope::model {
namespace {

constexpr size_t kMostFaults = 20;
constexpr absl::string_view kHead = "lm_head.weight";

enum class Use { kAsIs, kDecay };  // kDecay: A_log, used as A = -exp(A_log), transposed

struct Expected {
  std::string name;
  std::vector<int64_t> shape;
  const float** destination;
  Use use = Use::kAsIs;
};

std::vector<Expected> LayerTensors(const ModelConfig& config, int32_t l, LayerWeights& layer) {
  const int64_t d_model = config.d_model, d_inner = config.d_inner, d_state = config.d_state;
  const std::string prefix = absl::StrCat("backbone.layers.", l, ".");
  const std::string mixer = prefix + "mixer.";
  std::vector<Expected> tensors = {
      {prefix + "norm.weight", {d_model}, &layer.norm},
      {mixer + "in_proj.weight", {2 * d_inner, d_model}, &layer.in_proj},
      {mixer + "conv1d.weight", {d_inner, 1, config.d_conv}, &layer.conv1d},
      {mixer + "x_proj.weight", {config.dt_rank + 2 * d_state, d_inner}, &layer.x_proj},
      {mixer + "dt_proj.weight", {d_inner, config.dt_rank}, &layer.dt_proj},
      {mixer + "dt_proj.bias", {d_inner}, &layer.dt_proj_bias},
      {mixer + "A_log", {d_inner, d_state}, &layer.A, Use::kDecay},
      {mixer + "D", {d_inner}, &layer.D},
      {mixer + "out_proj.weight", {d_model, d_inner}, &layer.out_proj},
  };
  if (config.use_bias) {
    tensors.push_back({mixer + "in_proj.bias", {2 * d_inner}, &layer.in_proj_bias});
    tensors.push_back({mixer + "out_proj.bias", {d_model}, &layer.out_proj_bias});
  }
  if (config.use_conv_bias) {
    tensors.push_back({mixer + "conv1d.bias", {d_inner}, &layer.conv1d_bias});
  }
  return tensors;
}

std::string Shown(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

bool Aligned(const void* data, size_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// A tensor over the mapped bytes; a copy where they lie off the type's boundary.
at::Tensor Borrow(const TensorView& view, at::ScalarType type) {
  const at::TensorOptions options = at::TensorOptions().dtype(type);
  if (Aligned(view.bytes.data(), ByteSize(view.dtype))) {
    return at::from_blob(const_cast<std::byte*>(view.bytes.data()), view.shape, options);
  }
  at::Tensor copy = at::empty(view.shape, options);
  std::memcpy(copy.data_ptr(), view.bytes.data(), view.bytes.size());
  return copy;
}

// SHA-256 over several ranges, one after the other.
class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) {
    MS_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) == 1);
  }
  ~Sha256() { EVP_MD_CTX_free(context_); }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Add(const void* data, size_t bytes) {
    MS_CHECK(EVP_DigestUpdate(context_, data, bytes) == 1);
  }
  std::string Hexadecimal() {
    std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
    unsigned length = 0;
    MS_CHECK(EVP_DigestFinal_ex(context_, digest.data(), &length) == 1);
    return absl::BytesToHexString(
        absl::string_view(reinterpret_cast<const char*>(digest.data()), length));
  }

 private:
  EVP_MD_CTX* const context_;
};

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

}  // namespace

struct Weights::Storage {
  std::unique_ptr<const SafetensorsFile> file;  // null once no tensor lies in it
  std::vector<at::Tensor> tensors;              // borrowing from the file, or their own
};

Weights::Weights() : storage_(std::make_unique<Storage>()) {}
Weights::~Weights() = default;

absl::StatusOr<std::unique_ptr<const Weights>> Weights::Load(const std::string& folder,
                                                             const ModelConfig& config) {
  ASSIGN_OR_RETURN(const std::string config_bytes, ReadConfigFile(folder + "/config.json"));
  std::unique_ptr<Weights> weights(new Weights);
  Storage& storage = *weights->storage_;
  ASSIGN_OR_RETURN(storage.file, SafetensorsFile::Open(folder + "/model.safetensors"));
  const SafetensorsFile& file = *storage.file;

  // The bytes are read once for the digest; the check for finite values follows behind it.
  Background digest([&] {
    Sha256 sha256;
    sha256.Add(config_bytes.data(), config_bytes.size());
    sha256.Add(file.file().data(), file.file().size());
    weights->digest_ = sha256.Hexadecimal();
  });

  weights->layers_.resize(config.layers);
  std::vector<Expected> expected = {
      {"backbone.embeddings.weight", {config.vocabulary, config.d_model}, &weights->embeddings_},
      {"backbone.norm_f.weight", {config.d_model}, &weights->norm_f_},
  };
  for (int32_t l = 0; l < config.layers; ++l) {
    for (Expected& tensor : LayerTensors(config, l, weights->layers_[l])) {
      expected.push_back(std::move(tensor));
    }
  }
  // Some tools drop a head that equals the embeddings without saying so in the config, and others
  // keep one that is tied: Hugging Face reads both as tied.
  if (!config.tied_embeddings && file.Find(kHead) != nullptr) {
    expected.push_back({std::string(kHead), {config.vocabulary, config.d_model}, &weights->head_});
  }

  bool borrowed = false;  // whether any tensor is used where it lies in the file
  std::vector<std::string> faults;
  std::set<absl::string_view> known = {kHead};
  std::set<DType> dtypes;
  for (const Expected& wanted : expected) {
    known.insert(wanted.name);
    const TensorView* view = file.Find(wanted.name);
    const auto fault = [&](auto... parts) {
      faults.push_back(absl::StrCat(wanted.name, ": ", parts...));
    };
    if (view == nullptr) {
      fault("is missing");
      continue;
    }
    if (view->dtype != DType::kF32 && view->dtype != DType::kBF16 && view->dtype != DType::kF16) {
      fault("has dtype ", Name(view->dtype), "; supported: F32, BF16, F16");
      continue;
    }
    if (view->shape != wanted.shape) {
      fault("has shape ", Shown(view->shape), ", the config asks for ", Shown(wanted.shape));
      continue;
    }
    dtypes.insert(view->dtype);

    at::Tensor tensor;
    if (view->dtype == DType::kF32) {
      tensor = Borrow(*view, at::kFloat);
    } else {
      tensor =
          Borrow(*view, view->dtype == DType::kBF16 ? at::kBFloat16 : at::kHalf).to(at::kFloat);
    }
    if (!AllFinite(tensor.data_ptr<float>(), tensor.numel())) {
      fault("has a value that is not finite");
      continue;
    }
    if (wanted.use == Use::kDecay) {
      tensor = at::neg(at::exp(tensor)).t().contiguous();
      if (!AllFinite(tensor.data_ptr<float>(), tensor.numel())) {
        fault("has a value whose exponential is not finite");
        continue;
      }
    }
    *wanted.destination = tensor.data_ptr<float>();
    borrowed |= tensor.data_ptr() == static_cast<const void*>(view->bytes.data());
    weights->parameters_ += tensor.numel();
    storage.tensors.push_back(std::move(tensor));
  }
  for (const auto& [name, view] : file.tensors()) {
    weights->stored_bytes_ += static_cast<int64_t>(view.bytes.size());
    if (known.count(name) == 0) {
      faults.push_back(
          absl::StrCat(absl::Utf8SafeCHexEscape(absl::string_view(name).substr(0, 200)),
                       ": is not a tensor of this model"));
    }
  }
  if (!faults.empty()) {
    const size_t more = faults.size() > kMostFaults ? faults.size() - kMostFaults : 0;
    faults.resize(faults.size() - more);
    if (more > 0) faults.push_back(absl::StrCat("and ", more, " more"));
    return absl::InvalidArgumentError(absl::StrCat(file.path(), ": ", absl::StrJoin(faults, "; ")));
  }
  if (weights->head_ == nullptr) weights->head_ = weights->embeddings_;
  weights->stored_dtype_ = dtypes.size() == 1 ? std::string(Name(*dtypes.begin())) : "mixed";
  digest.Join();
  if (!borrowed) storage.file.reset();  // all was widened: its pages would count as resident
  return weights;
}

}  // namespace mambascope::model
