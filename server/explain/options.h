#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "google/protobuf/repeated_field.h"
#include "mambascope/v1/explanation.pb.h"
#include "server/explain/violations.h"
#include "server/model/config.h"

namespace mambascope::explain {

// The options that several methods share: what they mean once the defaults stand in them, and every
// way in which they can be wrong. Check functions add to `violations` all that they find; `field`
// is the path of the method's options in the request.

using Ints = google::protobuf::RepeatedField<int32_t>;
using LayerRanges = google::protobuf::RepeatedPtrField<v1::LayerRange>;

// How the maps of a layer's channels become one.
struct ChannelReduction {
  v1::Reduction how = v1::REDUCTION_MEAN;  // never UNSPECIFIED
  std::vector<int32_t> channels;           // of CHANNELS, as they were given
  int32_t top_k = 0;                       // of TOP_K
};
ChannelReduction MakeReduction(v1::Reduction how, const Ints& channels, int32_t top_k,
                               const model::ModelConfig& config);
// Of an options message with the fields reduction, channels and top_k.
template <class Options>
ChannelReduction ReductionOf(const Options& options, const model::ModelConfig& config) {
  return MakeReduction(options.reduction(), options.channels(), options.top_k(), config);
}

// Also refuses channels and top_k that the reduction would ignore: silence would look like consent.
void CheckReduction(v1::Reduction how, const Ints& channels, int32_t max_channels, int32_t top_k,
                    const model::ModelConfig& config, const std::string& field,
                    Violations& violations);

// Each value once and in [0, limit); at most `max_count` of them.
void CheckIndices(const Ints& values, int32_t limit, int32_t max_count, const std::string& field,
                  Violations& violations);

// The layers of the ranges, ascending; all of them for no range.
std::vector<int32_t> LayersOf(const LayerRanges& ranges, const model::ModelConfig& config);
void CheckLayers(const LayerRanges& ranges, const model::ModelConfig& config,
                 const std::string& field, Violations& violations);
void CheckStartLayer(int32_t start_layer, const model::ModelConfig& config,
                     const std::string& field, Violations& violations);

// A token that can stand in the place of another: of the vocabulary; image models have none.
void CheckTokenOfVocabulary(int32_t token, const model::ModelConfig& config,
                            const std::string& path, Violations& violations);

// Adds a violation and returns false if `value` is not one of the enum's.
bool CheckEnum(bool known, int value, absl::string_view path, Violations& violations);

// PAPER where nothing is said.
v1::Variant VariantOf(v1::Variant variant);
inline bool IsCode(v1::Variant variant) {
  return variant == v1::VARIANT_CODE || variant == v1::VARIANT_CODE_QUIRKS;
}
// CODE and CODE_QUIRKS allow MEAN only.
void CheckVariant(v1::Variant variant, v1::Reduction reduction, const std::string& field,
                  Violations& violations);

// The target's position, counted from the start; of an image model its class token's.
int64_t PositionOf(const v1::Explanation& explanation, const model::ModelConfig& config,
                   int64_t tokens);

// How many generated tokens a target spans; 1 for any other target.
int64_t SpanOf(const v1::Target& target);

// Of methods that take a logit apart: no log-probability. `field` is the path of the method's
// options, beside which the target stands.
void CheckLogitTarget(const v1::Explanation& explanation, const std::string& field,
                      Violations& violations);
// The target's path, from that of the method's options.
std::string TargetField(const std::string& field);

// 0, 1, .. count - 1.
std::vector<int32_t> Indices(int64_t count);

}  // namespace mambascope::explain
