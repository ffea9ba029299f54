#include "server/model/config.h"

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/status.h"
#include "server/model/json_reader.h"

namespace mambascope::model {
namespace {

using Json = nlohmann::json;

// Limits keep every product of sizes inside 64 bits and every row of activations inside 32; the
// largest published Mamba has d_model 5120, 64 layers and a vocabulary of 65,024.
constexpr int64_t kMaxModelWidth = 1 << 16;
constexpr int64_t kMaxInnerWidth = 1 << 18;
constexpr int64_t kMaxVocabulary = 1 << 22;
constexpr int64_t kMaxClasses = 1 << 20;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxStates = 256;
constexpr int64_t kMaxTaps = 16;
constexpr int64_t kMaxExpand = 64;
constexpr int64_t kMaxImage = 4096;
constexpr int64_t kMaxPatches = 1 << 16;
constexpr int64_t kMaxPatchNumbers = 1 << 28;  // patches as rows: 1 GiB, 1 M at 224 / 16
constexpr size_t kMaxEndTokens = 64;

constexpr std::array<Family, 4> kFamilies = {Family::kMamba, Family::kFalconMamba, Family::kMamba2,
                                             Family::kVim};

std::string FamilyNames() {
  return absl::StrJoin(kFamilies, ", ",
                       [](std::string* out, Family family) { absl::StrAppend(out, Name(family)); });
}

absl::StatusOr<Family> ReadFamily(const JsonReader& reader) {
  const Json* type = reader.Find("model_type");
  if (type == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("model_type: is missing; supported: ", FamilyNames()));
  }
  for (const Family family : kFamilies) {
    if (*type == std::string(Name(family))) return family;
  }
  const std::string shown =
      type->is_string() ? absl::StrCat("'", type->get<std::string>(), "'") : Shown(*type);
  return absl::InvalidArgumentError(absl::StrCat("model_type: ", shown.substr(0, 80),
                                                 " is not supported; supported: ", FamilyNames()));
}

bool IsTextClassifier(const JsonReader& reader) {
  const Json* architectures = reader.Find("architectures");
  if (architectures == nullptr || !architectures->is_array()) return false;
  for (const Json& name : *architectures) {
    if (name.is_string() && absl::EndsWith(name.get<std::string>(), "ForSequenceClassification")) {
      return true;
    }
  }
  return false;
}

int64_t ReadRank(JsonReader& reader, const char* key, int64_t d_model) {
  const Json* value = reader.Find(key);
  if (value != nullptr && !(value->is_string() && value->get_ref<const std::string&>() == "auto")) {
    const std::optional<int64_t> rank = JsonReader::AsInteger(*value);
    if (rank.has_value() && *rank >= 1 && *rank <= kMaxModelWidth) return *rank;
    reader.Fault(key, absl::StrCat(Shown(*value), " is neither \"auto\" nor an integer in [1, ",
                                   kMaxModelWidth, "]"));
    return 0;
  }
  return (d_model + 15) / 16;
}

kernels::Activation ReadActivation(JsonReader& reader) {
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

std::vector<int32_t> ReadEndOfText(JsonReader& reader, int64_t vocabulary) {
  const Json* value = reader.Find("eos_token_id");
  if (value == nullptr) return {};
  const Json list = value->is_array() ? *value : Json::array({*value});
  std::vector<int32_t> ids;
  for (const Json& entry : list) {
    const std::optional<int64_t> id = JsonReader::AsInteger(entry);
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

// A bound of time_step_limit: a number, "Infinity" as read from the bare word, or
// {"__float__": "Infinity"}.
std::optional<float> ReadLimit(const Json& value) {
  const Json* inner = &value;
  if (value.is_object()) {
    const auto found = value.find("__float__");
    if (found == value.end()) return std::nullopt;
    inner = &*found;
  }
  if (inner->is_string()) {
    const std::string& name = inner->get_ref<const std::string&>();
    if (name == "Infinity" || name == "inf") return std::numeric_limits<float>::infinity();
    return std::nullopt;
  }
  if (!inner->is_number()) return std::nullopt;
  return static_cast<float>(inner->get<double>());
}

void ReadTimeStepLimit(JsonReader& reader, ModelConfig& config) {
  const Json* value = reader.Find("time_step_limit");
  if (value == nullptr) return;
  if (value->is_array() && value->size() == 2) {
    const std::optional<float> low = ReadLimit((*value)[0]), high = ReadLimit((*value)[1]);
    if (low.has_value() && high.has_value() && *low >= 0 && std::isfinite(*low) && *low <= *high) {
      config.delta_min = *low;
      config.delta_max = *high;
      return;
    }
  }
  reader.Fault("time_step_limit",
               absl::StrCat(Shown(*value), " is not a pair 0 <= low <= high, low finite"));
}

// Classes and their names: num_labels, else as many as id2label has, else Hugging Face's two.
void ReadClasses(JsonReader& reader, ModelConfig& config) {
  const Json* labels = reader.Find("id2label");
  if (labels != nullptr && !labels->is_object()) {
    reader.Fault("id2label", absl::StrCat(Shown(*labels), " is not an object"));
    labels = nullptr;
  }
  const int64_t named = labels == nullptr ? 2 : static_cast<int64_t>(labels->size());
  config.classes = static_cast<int32_t>(reader.Integer("num_labels", 1, kMaxClasses, named));
  if (named < 1 || named > kMaxClasses) {
    reader.Fault("id2label", absl::StrCat(named, " entries are outside 1 to ", kMaxClasses));
    return;
  }
  if (labels == nullptr || named != config.classes) return;
  std::vector<std::string> names(named);
  for (const auto& [key, name] : labels->items()) {
    int32_t id = -1;
    if (!absl::SimpleAtoi(key, &id) || id < 0 || id >= named || !name.is_string()) {
      reader.Fault("id2label", absl::StrCat("does not name the classes 0 to ", named - 1));
      return;
    }
    names[id] = name.get<std::string>();
  }
  config.class_labels = std::move(names);
}

void ReadTask(JsonReader& reader, ModelConfig& config) {
  if (!IsTextClassifier(reader)) return;
  config.task = Task::kTextClass;
  ReadClasses(reader, config);
  const Json* pooling = reader.Find("pooling");
  if (pooling == nullptr || *pooling == "last") return;
  if (*pooling == "mean") {
    config.pooling = Pooling::kMean;
  } else {
    reader.Fault("pooling", absl::StrCat(Shown(*pooling), " is neither \"last\" nor \"mean\""));
  }
}

void ReadInnerWidth(JsonReader& reader, const char* own_key, ModelConfig& config) {
  const int64_t expand = reader.Integer("expand", 1, kMaxExpand, 2);
  const int64_t by_expand = expand * config.d_model;
  const int64_t d_inner =
      own_key == nullptr ? by_expand : reader.Integer(own_key, 1, kMaxInnerWidth, by_expand);
  if (d_inner > kMaxInnerWidth) {
    reader.Fault("expand", absl::StrCat(expand, " x the model's width ", config.d_model,
                                        " exceeds ", kMaxInnerWidth));
  }
  config.d_inner = static_cast<int32_t>(d_inner);
}

void ReadHeads(JsonReader& reader, ModelConfig& config) {
  config.head_dim = static_cast<int32_t>(reader.Integer("head_dim", 1, kMaxStates, 64));
  config.heads = static_cast<int32_t>(reader.Integer("num_heads", 1, kMaxInnerWidth, 128));
  config.groups = static_cast<int32_t>(reader.Integer("n_groups", 1, kMaxInnerWidth, 8));
  if (config.head_dim == 0 || config.heads == 0 || config.groups == 0) return;
  const int64_t width = int64_t{config.heads} * config.head_dim;
  if (width != config.d_inner) {
    reader.Fault("num_heads", absl::StrCat(config.heads, " x head_dim ", config.head_dim, " is ",
                                           width, ", not expand x hidden_size ", config.d_inner));
  }
  if (config.heads % config.groups != 0) {
    reader.Fault("n_groups",
                 absl::StrCat(config.groups, " does not divide num_heads ", config.heads));
  }
  if (int64_t{config.groups} * config.d_state > kMaxInnerWidth) {
    reader.Fault("n_groups", absl::StrCat(config.groups, " x state_size ", config.d_state,
                                          " exceeds ", kMaxInnerWidth));
  }
  if (!reader.Flag("rms_norm", true)) {
    reader.Fault("rms_norm", "false is not supported; the mixer's gated norm is needed");
  }
  if (reader.Flag("norm_before_gate", false)) {
    reader.Fault("norm_before_gate", "true is not supported; the gate comes before the norm");
  }
}

void ReadText(JsonReader& reader, ModelConfig& config) {
  config.d_model =
      static_cast<int32_t>(reader.Integer("hidden_size", 1, kMaxModelWidth, std::nullopt));
  const bool mamba2 = config.family == Family::kMamba2;
  ReadInnerWidth(reader, mamba2 ? nullptr : "intermediate_size", config);
  config.vocabulary =
      static_cast<int32_t>(reader.Integer("vocab_size", 1, kMaxVocabulary, std::nullopt));
  config.layers =
      static_cast<int32_t>(reader.Integer("num_hidden_layers", 1, kMaxLayers, std::nullopt));
  config.d_state =
      static_cast<int32_t>(reader.Integer("state_size", 1, kMaxStates, mamba2 ? 128 : 16));
  config.d_conv = static_cast<int32_t>(reader.Integer("conv_kernel", 1, kMaxTaps, 4));
  config.norm_eps = reader.Epsilon("layer_norm_epsilon", 1e-5f);
  config.use_bias = reader.Flag("use_bias", false);
  config.use_conv_bias = reader.Flag("use_conv_bias", true);
  config.tied_embeddings = reader.Flag("tie_word_embeddings", !mamba2);
  config.conv_activation = ReadActivation(reader);
  config.end_of_text = ReadEndOfText(reader, config.vocabulary);
  if (mamba2) {
    ReadHeads(reader, config);
    ReadTimeStepLimit(reader, config);
  } else {
    config.dt_rank = static_cast<int32_t>(ReadRank(reader, "time_step_rank", config.d_model));
  }
  if (config.family == Family::kFalconMamba) {
    config.mixer_rms_eps = reader.Epsilon("mixer_rms_eps", 1e-6f);
  }
  ReadTask(reader, config);
}

// Switches of the published Vim that this implementation knows one value of.
void RequireVimSwitches(JsonReader& reader) {
  for (const char* key : {"rms_norm", "if_cls_token"}) {
    if (!reader.Flag(key, true)) reader.Fault(key, "false is not supported");
  }
  const Json* type = reader.Find("bimamba_type");
  if (type != nullptr && *type != "v2") {
    reader.Fault("bimamba_type", absl::StrCat(Shown(*type), " is not supported; supported: v2"));
  }
  for (const char* key : {"if_rope", "if_bidirectional", "use_double_cls_token"}) {
    if (reader.Flag(key, false)) reader.Fault(key, "true is not supported");
  }
}

void ReadVision(JsonReader& reader, ModelConfig& config) {
  config.task = Task::kImageClass;
  config.tied_embeddings = false;
  config.d_model =
      static_cast<int32_t>(reader.Integer("embed_dim", 1, kMaxModelWidth, std::nullopt));
  ReadInnerWidth(reader, nullptr, config);
  config.layers = static_cast<int32_t>(reader.Integer("depth", 1, kMaxLayers, std::nullopt));
  config.d_state = static_cast<int32_t>(reader.Integer("d_state", 1, kMaxStates, 16));
  config.d_conv = static_cast<int32_t>(reader.Integer("d_conv", 1, kMaxTaps, 4));
  config.dt_rank = static_cast<int32_t>(ReadRank(reader, "dt_rank", config.d_model));
  config.norm_eps = reader.Epsilon("norm_epsilon", 1e-5f);
  config.use_bias = reader.Flag("use_bias", false);
  config.use_conv_bias = reader.Flag("use_conv_bias", true);
  config.conv_activation = ReadActivation(reader);
  const int64_t classes = reader.Integer("num_classes", 1, kMaxClasses, std::nullopt);
  const Json* labels = reader.Find("id2label");
  if (labels != nullptr) ReadClasses(reader, config);
  if (config.class_labels.size() != static_cast<size_t>(classes)) config.class_labels.clear();
  config.classes = static_cast<int32_t>(classes);
  reader.Integer("channels", 3, 3, 3);
  RequireVimSwitches(reader);

  VisionConfig& vision = config.vision;
  vision.image_size = static_cast<int32_t>(reader.Integer("img_size", 1, kMaxImage, std::nullopt));
  vision.patch_size =
      static_cast<int32_t>(reader.Integer("patch_size", 1, kMaxImage, std::nullopt));
  vision.stride = static_cast<int32_t>(reader.Integer("stride", 1, kMaxImage, vision.patch_size));
  vision.middle_class_token = reader.Flag("use_middle_cls_token", true);
  vision.absolute_positions = reader.Flag("if_abs_pos_embed", true);
  vision.divide_out = reader.Flag("if_divide_out", true);
  if (vision.image_size == 0 || vision.patch_size == 0 || vision.stride == 0) return;
  if (vision.patch_size > vision.image_size) {
    reader.Fault("patch_size",
                 absl::StrCat(vision.patch_size, " exceeds img_size ", vision.image_size));
    return;
  }
  const int64_t side = vision.patches_per_side(), patches = side * side;
  if (patches > kMaxPatches) {
    reader.Fault("stride", absl::StrCat("gives more than ", kMaxPatches, " patches"));
  } else if (patches * 3 * vision.patch_size * vision.patch_size > kMaxPatchNumbers) {
    reader.Fault("stride", absl::StrCat("gives patches that overlap to more than ",
                                        kMaxPatchNumbers, " numbers"));
  }
}

}  // namespace

absl::string_view Name(Family family) {
  switch (family) {
    case Family::kMamba:
      return "mamba";
    case Family::kFalconMamba:
      return "falcon_mamba";
    case Family::kMamba2:
      return "mamba2";
    case Family::kVim:
      return "vim";
  }
  return "";
}

absl::StatusOr<ModelConfig> ParseConfig(absl::string_view json) {
  ASSIGN_OR_RETURN(const Json object, ParseJsonObject(json));
  JsonReader reader(object);
  ModelConfig config;
  ASSIGN_OR_RETURN(config.family, ReadFamily(reader));
  if (config.family == Family::kVim) {
    ReadVision(reader, config);
  } else {
    ReadText(reader, config);
  }
  RETURN_IF_ERROR(reader.status());
  return config;
}

}  // namespace mambascope::model
