#include "server/model/config.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace mambascope::model {
namespace {

using Json = nlohmann::json;

// Limits keep every product of sizes inside 64 bits and every row of activations inside 32; the
// largest published Mamba has d_model 5120, 64 layers and a vocabulary of 65,024.
constexpr int64_t kMaxModelWidth = 1 << 16;
constexpr int64_t kMaxInnerWidth = 1 << 18;
constexpr int64_t kMaxVocabulary = 1 << 22;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxStates = 256;
constexpr int64_t kMaxTaps = 16;
constexpr int64_t kMaxExpand = 64;
constexpr size_t kMaxEndTokens = 64;
constexpr int kMaxDepth = 32;

// A JSON value as an error shows it: ASCII, not too long.
std::string Shown(const Json& value) {
  constexpr size_t kLongest = 60;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

// Reads keys and collects every fault; null counts as absent, as Hugging Face writes it.
class Reader {
 public:
  explicit Reader(const Json& object) : object_(object) {}

  const Json* Find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  // 0 after a fault, so that no fault follows from another.
  int64_t Integer(const char* key, int64_t low, int64_t high, std::optional<int64_t> fallback) {
    const Json* value = Find(key);
    if (value == nullptr) {
      if (!fallback.has_value()) Fault(key, "is missing");
      return fallback.value_or(0);
    }
    const std::optional<int64_t> read = AsInteger(*value);
    if (read.has_value() && *read >= low && *read <= high) return *read;
    Fault(key, absl::StrCat(Shown(*value), " is not an integer in [", low, ", ", high, "]"));
    return 0;
  }

  bool Flag(const char* key, bool fallback) {
    const Json* value = Find(key);
    if (value == nullptr) return fallback;
    if (value->is_boolean()) return value->get<bool>();
    Fault(key, absl::StrCat(Shown(*value), " is not true or false"));
    return fallback;
  }

  void Fault(const char* key, const std::string& what) {
    faults_.push_back(absl::StrCat(key, ": ", what));
  }

  static std::optional<int64_t> AsInteger(const Json& value) {
    if (value.is_number_unsigned()) {
      const uint64_t number = value.get<uint64_t>();
      if (number > INT64_MAX) return std::nullopt;
      return static_cast<int64_t>(number);
    }
    if (value.is_number_integer()) return value.get<int64_t>();
    if (!value.is_number_float()) return std::nullopt;
    const double number = value.get<double>();  // some tools write 2.0
    if (!(std::abs(number) < 1e15) || number != std::floor(number)) return std::nullopt;
    return static_cast<int64_t>(number);
  }

  absl::Status status() const {
    if (faults_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrJoin(faults_, "; "));
  }

 private:
  const Json& object_;
  std::vector<std::string> faults_;
};

int64_t ReadRank(Reader& reader, int64_t d_model) {
  const Json* value = reader.Find("time_step_rank");
  if (value != nullptr && !(value->is_string() && value->get_ref<const std::string&>() == "auto")) {
    const std::optional<int64_t> rank = Reader::AsInteger(*value);
    if (rank.has_value() && *rank >= 1 && *rank <= kMaxModelWidth) return *rank;
    reader.Fault("time_step_rank",
                 absl::StrCat(Shown(*value), " is neither \"auto\" nor an integer in [1, ",
                              kMaxModelWidth, "]"));
    return 0;
  }
  return (d_model + 15) / 16;
}

float ReadEpsilon(Reader& reader) {
  constexpr float kDefault = 1e-5f;
  const Json* value = reader.Find("layer_norm_epsilon");
  if (value == nullptr) return kDefault;
  const float eps = value->is_number() ? static_cast<float>(value->get<double>()) : 0;
  if (eps > 0 && eps <= 1) return eps;
  reader.Fault("layer_norm_epsilon", absl::StrCat(Shown(*value), " is not a number in (0, 1]"));
  return kDefault;
}

kernels::Activation ReadActivation(Reader& reader) {
  const char* key = "conv_activation";
  const Json* value = reader.Find(key);
  if (value == nullptr) value = reader.Find(key = "hidden_act");
  if (value == nullptr) return kernels::Activation::kSilu;
  const std::string name = value->is_string() ? value->get<std::string>() : "";
  if (name == "silu" || name == "swish") return kernels::Activation::kSilu;
  if (name == "relu") return kernels::Activation::kRelu;
  if (name == "identity" || name == "linear") return kernels::Activation::kIdentity;
  reader.Fault(key, absl::StrCat(Shown(*value),
                                 " is not supported; supported: silu (swish), relu, "
                                 "identity (linear)"));
  return kernels::Activation::kSilu;
}

std::vector<int32_t> ReadEndOfText(Reader& reader, int64_t vocabulary) {
  const Json* value = reader.Find("eos_token_id");
  if (value == nullptr) return {};
  const Json list = value->is_array() ? *value : Json::array({*value});
  std::vector<int32_t> ids;
  for (const Json& entry : list) {
    const std::optional<int64_t> id = Reader::AsInteger(entry);
    const bool known = id.has_value() && *id >= 0 && (vocabulary == 0 || *id < vocabulary);
    if (!known || ids.size() == kMaxEndTokens) {
      reader.Fault("eos_token_id", absl::StrCat(Shown(*value),
                                                " is neither a token id below vocab_size nor a "
                                                "list of at most ",
                                                kMaxEndTokens, " of them"));
      return {};
    }
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

absl::Status CheckArchitecture(const Reader& reader) {
  const Json* type = reader.Find("model_type");
  if (type == nullptr) {
    return absl::InvalidArgumentError("model_type: is missing; supported: mamba");
  }
  if (*type != "mamba") {
    const std::string shown =
        type->is_string() ? absl::StrCat("'", type->get<std::string>(), "'") : Shown(*type);
    return absl::InvalidArgumentError(
        absl::StrCat("model_type: ", shown.substr(0, 80), " is not supported; supported: mamba"));
  }
  const Json* architectures = reader.Find("architectures");
  if (architectures != nullptr && architectures->is_array()) {
    for (const Json& name : *architectures) {
      if (name.is_string() &&
          absl::EndsWith(name.get<std::string>(), "ForSequenceClassification")) {
        return absl::InvalidArgumentError(absl::StrCat(
            "architectures: ", Shown(name), " is not supported; supported: MambaForCausalLM"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> ParseConfig(absl::string_view json) {
  bool too_deep = false;
  const Json::parser_callback_t bound = [&](int depth, Json::parse_event_t, Json&) {
    too_deep |= depth > kMaxDepth;
    return !too_deep;  // what lies deeper is dropped while it is parsed
  };
  const Json object = Json::parse(json.begin(), json.end(), bound, /*allow_exceptions=*/false);
  if (too_deep) {
    return absl::InvalidArgumentError(absl::StrCat("nested more than ", kMaxDepth, " levels deep"));
  }
  if (!object.is_object()) return absl::InvalidArgumentError("not a JSON object");

  Reader reader(object);
  if (absl::Status status = CheckArchitecture(reader); !status.ok()) return status;

  ModelConfig config;
  config.family = "mamba";
  const int64_t d_model = reader.Integer("hidden_size", 1, kMaxModelWidth, std::nullopt);
  const int64_t expand = reader.Integer("expand", 1, kMaxExpand, 2);
  const int64_t d_inner = reader.Integer("intermediate_size", 1, kMaxInnerWidth, expand * d_model);
  if (d_inner > kMaxInnerWidth) {
    reader.Fault("expand",
                 absl::StrCat(expand, " x hidden_size ", d_model, " exceeds ", kMaxInnerWidth));
  }
  const int64_t vocabulary = reader.Integer("vocab_size", 1, kMaxVocabulary, std::nullopt);
  config.d_model = static_cast<int32_t>(d_model);
  config.d_inner = static_cast<int32_t>(d_inner);
  config.vocabulary = static_cast<int32_t>(vocabulary);
  config.layers =
      static_cast<int32_t>(reader.Integer("num_hidden_layers", 1, kMaxLayers, std::nullopt));
  config.d_state = static_cast<int32_t>(reader.Integer("state_size", 1, kMaxStates, 16));
  config.d_conv = static_cast<int32_t>(reader.Integer("conv_kernel", 1, kMaxTaps, 4));
  config.dt_rank = static_cast<int32_t>(ReadRank(reader, d_model));
  config.norm_eps = ReadEpsilon(reader);
  config.use_bias = reader.Flag("use_bias", false);
  config.use_conv_bias = reader.Flag("use_conv_bias", true);
  config.tied_embeddings = reader.Flag("tie_word_embeddings", true);
  config.conv_activation = ReadActivation(reader);
  config.end_of_text = ReadEndOfText(reader, vocabulary);
  if (absl::Status status = reader.status(); !status.ok()) return status;
  return config;
}

}  // namespace mambascope::model
