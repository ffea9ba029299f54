#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mambascope/v1/explanation.pb.h"
#include "server/explain/latim_rows.h"
#include "server/explain/latim_target.h"
#include "server/explain/violations.h"
#include "server/model/config.h"

namespace mambascope::explain {

// What the options come to for a model and an input.
struct LatimSetup {
  LatimSetup(const v1::Explanation& explanation, const model::ModelConfig& config, int64_t length);

  // A row vector goes from the last layer down.
  bool carries() const { return joined && !all_rows; }
  // The rows of the layer that is visited as number `visit`.
  RowRange rows(size_t visit) const {
    // Nothing but the target's row reads the last layer's output.
    const bool target_only = !all_rows && (!joined || visit == 0);
    return target_only ? target : RowRange{0, prefix};
  }

  v1::Latim::Norm norm;  // never UNSPECIFIED
  bool all_rows;
  bool joined;  // over all layers
  int64_t tokens;
  RowRange target;
  int64_t prefix;               // tokens that any row reads
  std::vector<int32_t> layers;  // in the order of the visits
  LatimRows::Want want;
  int32_t stream_stride;
};

// Adds everything that is wrong with LaTIM's options; see Method::Validate.
void CheckLatimOptions(const v1::Explanation& explanation, const model::ModelConfig& config,
                       const std::string& field, Violations& violations);

std::vector<v1::TensorInfo> LatimTensors(const LatimSetup& setup, const model::ModelConfig& config,
                                         v1::DataType dtype);

}  // namespace mambascope::explain
