#include "client/cli/render_quality.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "google/protobuf/repeated_field.h"

namespace mambascope::cli {
namespace {

// The largest, or what is no number.
float Worst(const google::protobuf::RepeatedField<float>& errors) {
  return *std::max_element(errors.begin(), errors.end(), [](float a, float b) {
    return !std::isnan(a) && (std::isnan(b) || a < b);
  });
}

std::string Layers(int count) {
  return count == 1 ? "one layer" : absl::StrCat("the worst of ", count, " layers");
}

void AddReconstruction(const v1::Quality& quality, std::vector<std::string>* parts) {
  const v1::Quality::Reconstruction& reconstruction = quality.reconstruction();
  const auto& errors = reconstruction.relative_error_by_layer();
  if (errors.empty()) return;
  parts->push_back(absl::StrFormat(
      "reconstruction error %.3g (%s; %d channels, %d rows compared)", Worst(errors),
      Layers(errors.size()), reconstruction.channels_compared(), reconstruction.rows_compared()));
}

void AddDecomposition(const v1::Quality& quality, std::vector<std::string>* parts) {
  const auto& errors = quality.decomposition().relative_error_by_layer();
  if (errors.empty()) return;
  parts->push_back(
      absl::StrFormat("decomposition error %.3g (%s)", Worst(errors), Layers(errors.size())));
}

void AddCompleteness(const v1::Quality& quality, std::vector<std::string>* parts) {
  if (!quality.has_completeness()) return;
  const v1::Quality::Completeness& completeness = quality.completeness();
  parts->push_back(absl::StrFormat("the parts sum to %.6g of %.6g, an error of %.3g",
                                   completeness.sum(), completeness.expected(),
                                   completeness.relative_error()));
}

void AddBiases(const v1::Quality& quality, std::vector<std::string>* parts) {
  if (!quality.has_bias_relevance()) return;
  std::string part = absl::StrFormat("biases take %.4g", quality.bias_relevance());
  if (quality.has_bias_share()) {
    absl::StrAppendFormat(&part, " (%.3g %% of the target)", 100 * quality.bias_share());
  }
  parts->push_back(std::move(part));
}

// "sparse: came 97.3 % of the mass of map" if anything was left out.
void AddMassKept(const v1::ExplanationFinished& end, std::vector<std::string>* lines) {
  std::vector<std::string> parts;
  for (int i = 0; i < end.mass_kept_size() && i < end.digests_size(); ++i) {
    if (end.mass_kept(i) >= 1) continue;
    parts.push_back(absl::StrFormat("%.4g %% of the mass of %s", 100 * end.mass_kept(i),
                                    end.digests(i).tensor()));
  }
  if (!parts.empty()) {
    lines->push_back(absl::StrCat("sparse: came ", absl::StrJoin(parts, ", ")));
  }
}

}  // namespace

std::vector<std::string> QualityLines(const v1::ExplanationFinished& end) {
  const v1::Quality& quality = end.quality();
  std::vector<std::string> parts, lines;
  AddReconstruction(quality, &parts);
  AddDecomposition(quality, &parts);
  AddCompleteness(quality, &parts);
  AddBiases(quality, &parts);
  if (quality.has_smallest_row_sum()) {
    parts.push_back(absl::StrFormat("smallest row sum %.3g", quality.smallest_row_sum()));
  }
  if (quality.tolerance() > 0) {
    // Of occlusion: the unchanged input was computed again, and nothing else is told of it.
    if (parts.empty()) parts.emplace_back("its own check");
    parts.push_back(absl::StrFormat("%s the tolerance of %.3g",
                                    quality.within_tolerance() ? "within" : "BEYOND",
                                    quality.tolerance()));
  }
  if (!parts.empty()) lines.push_back(absl::StrCat("quality: ", absl::StrJoin(parts, ", ")));
  AddMassKept(end, &lines);
  return lines;
}

}  // namespace mambascope::cli
