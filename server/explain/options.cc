#include "server/explain/options.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace mambascope::explain {
namespace {

constexpr int32_t kDefaultTopK = 4;

std::string Outside(int64_t value, int64_t limit) {
  return absl::StrCat(value, " is outside [0, ", limit, ")");
}

int32_t End(const v1::LayerRange& range, const model::ModelConfig& config) {
  return range.end() == 0 ? config.layers : range.end();
}

std::string Spell(const v1::LayerRange& range, const model::ModelConfig& config) {
  return absl::StrCat("[", range.begin(), ", ", End(range, config), ")");
}

}  // namespace

ChannelReduction MakeReduction(v1::Reduction how, const Ints& channels, int32_t top_k,
                               const model::ModelConfig& config) {
  ChannelReduction reduction;
  if (how != v1::REDUCTION_UNSPECIFIED) reduction.how = how;
  if (how == v1::REDUCTION_CHANNELS) reduction.channels.assign(channels.begin(), channels.end());
  if (how == v1::REDUCTION_TOP_K) {
    reduction.top_k = top_k != 0 ? top_k : std::min(kDefaultTopK, config.maps());
  }
  return reduction;
}

void CheckReduction(v1::Reduction how, const Ints& channels, int32_t max_channels, int32_t top_k,
                    const model::ModelConfig& config, const std::string& field,
                    Violations& violations) {
  const bool known = CheckEnum(v1::Reduction_IsValid(how), how, field + ".reduction", violations);
  const auto refuse = [&](const char* name, const char* reduction) {
    violations.Add(field + name, absl::StrCat("is for ", reduction, " only"));
  };
  CheckIndices(channels, config.maps(), max_channels, field + ".channels", violations);
  if (known && how == v1::REDUCTION_CHANNELS && channels.empty()) {
    violations.Add(field + ".channels", absl::StrCat("is empty, at least 1 of the model's ",
                                                     config.maps(), " channels must be named"));
  }
  if (known && how != v1::REDUCTION_CHANNELS && !channels.empty()) {
    refuse(".channels", "REDUCTION_CHANNELS");
  }
  if (top_k < 0 || top_k > config.maps()) {
    violations.Add(field + ".top_k", absl::StrCat(top_k, " is outside [1, ", config.maps(), "]"));
  }
  if (known && how != v1::REDUCTION_TOP_K && top_k != 0) refuse(".top_k", "REDUCTION_TOP_K");
}

void CheckIndices(const Ints& values, int32_t limit, int32_t max_count, const std::string& field,
                  Violations& violations) {
  if (values.size() > max_count) {
    violations.Add(field, absl::StrCat(values.size(), " are more than ", max_count));
  }
  std::map<int32_t, int> first;
  // No further than the limit: the answer to a request of megabytes stays small.
  for (int i = 0; i < std::min(values.size(), max_count); ++i) {
    const std::string path = absl::StrCat(field, "[", i, "]");
    if (values[i] < 0 || values[i] >= limit) violations.Add(path, Outside(values[i], limit));
    const auto [earlier, inserted] = first.try_emplace(values[i], i);
    if (!inserted) {
      violations.Add(path, absl::StrCat(values[i], " repeats entry ", earlier->second));
    }
  }
}

std::vector<int32_t> LayersOf(const LayerRanges& ranges, const model::ModelConfig& config) {
  std::vector<int32_t> layers;
  for (const v1::LayerRange& range : ranges) {
    for (int32_t l = range.begin(); l < End(range, config); ++l) layers.push_back(l);
  }
  if (ranges.empty()) return Indices(config.layers);
  std::sort(layers.begin(), layers.end());
  return layers;
}

void CheckLayers(const LayerRanges& ranges, const model::ModelConfig& config,
                 const std::string& field, Violations& violations) {
  const auto path = [&](int i) { return absl::StrCat(field, ".layers[", i, "]"); };
  if (ranges.size() > config.layers) {
    violations.Add(field + ".layers",
                   absl::StrCat(ranges.size(), " are more than the model's ", config.layers));
  }
  std::map<int32_t, int> sorted;  // those that are ranges, by where they begin
  for (int i = 0; i < std::min(ranges.size(), config.layers); ++i) {
    const v1::LayerRange& range = ranges[i];
    if (range.begin() < 0 || range.begin() >= config.layers) {
      violations.Add(path(i) + ".begin", Outside(range.begin(), config.layers));
    }
    if (range.end() < 0 || range.end() > config.layers) {
      violations.Add(path(i) + ".end",
                     absl::StrCat(range.end(), " is outside [0, ", config.layers, "]"));
    } else if (range.begin() >= End(range, config) && range.begin() < config.layers) {
      violations.Add(path(i), absl::StrCat(Spell(range, config), " holds no layer"));
    } else if (range.begin() >= 0 && range.begin() < config.layers) {
      const auto [earlier, inserted] = sorted.try_emplace(range.begin(), i);
      if (!inserted) {
        violations.Add(path(i), absl::StrCat(Spell(range, config), " overlaps ",
                                             Spell(ranges[earlier->second], config)));
      }
    }
  }
  int32_t reached = 0;
  int widest = -1;  // the range that reaches furthest so far
  for (const auto& [begin, i] : sorted) {
    if (widest >= 0 && begin < reached) {
      violations.Add(path(i), absl::StrCat(Spell(ranges[i], config), " overlaps ",
                                           Spell(ranges[widest], config)));
    }
    if (End(ranges[i], config) > reached) {
      reached = End(ranges[i], config);
      widest = i;
    }
  }
}

void CheckStartLayer(int32_t start_layer, const model::ModelConfig& config,
                     const std::string& field, Violations& violations) {
  if (start_layer < 0 || start_layer >= config.layers) {
    violations.Add(field + ".start_layer", Outside(start_layer, config.layers));
  }
}

void CheckTokenOfVocabulary(int32_t token, const model::ModelConfig& config,
                            const std::string& path, Violations& violations) {
  if (config.family == model::Family::kVim) {
    violations.Add(path, "image models have no tokens to put in the place of others");
  } else if (token < 0 || token >= config.vocabulary) {
    violations.Add(path, Outside(token, config.vocabulary));
  }
}

bool CheckEnum(bool known, int value, absl::string_view path, Violations& violations) {
  if (!known) {
    violations.Add(std::string(path.data(), path.size()),
                   absl::StrCat(value, " is not one of the enum's values"));
  }
  return known;
}

v1::Variant VariantOf(v1::Variant variant) {
  return variant == v1::VARIANT_UNSPECIFIED ? v1::VARIANT_PAPER : variant;
}

void CheckVariant(v1::Variant variant, v1::Reduction reduction, const std::string& field,
                  Violations& violations) {
  CheckEnum(v1::Variant_IsValid(variant), variant, field + ".variant", violations);
  if (IsCode(variant) && v1::Reduction_IsValid(reduction) &&
      reduction != v1::REDUCTION_UNSPECIFIED && reduction != v1::REDUCTION_MEAN) {
    violations.Add(field + ".reduction",
                   absl::StrCat(v1::Reduction_Name(reduction), " does not go with ",
                                v1::Variant_Name(variant), ", which allows REDUCTION_MEAN only"));
  }
}

int64_t PositionOf(const v1::Explanation& explanation, const model::ModelConfig& config,
                   int64_t tokens) {
  if (config.family == model::Family::kVim) return config.vision.class_position();
  const int64_t position =
      explanation.target().has_position() ? explanation.target().position() : -1;
  // Checked where targets are; clamped here so that a plan is never for more than the input.
  return std::clamp<int64_t>(position < 0 ? tokens + position : position, 0, tokens - 1);
}

int64_t SpanOf(const v1::Target& target) {
  if (!target.has_generated() || !target.has_generated_end()) return 1;
  return std::max<int64_t>(1, int64_t{target.generated_end()} - target.generated());
}

std::string TargetField(const std::string& field) {
  const size_t dot = field.rfind('.');
  return (dot == std::string::npos ? "" : field.substr(0, dot + 1)) + "target";
}

void CheckLogitTarget(const v1::Explanation& explanation, const std::string& field,
                      Violations& violations) {
  if (explanation.target().value() != v1::OUTPUT_VALUE_LOG_PROBABILITY) return;
  violations.Add(TargetField(field) + ".value",
                 "OUTPUT_VALUE_LOG_PROBABILITY: contributions are parts of a logit, which "
                 "OUTPUT_VALUE_LOGIT explains; of log-probabilities there is gradient_x_input");
}

std::vector<int32_t> Indices(int64_t count) {
  std::vector<int32_t> indices(count);
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

}  // namespace mambascope::explain
