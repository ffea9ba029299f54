#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/array.h"
#include "server/explain/method.h"
#include "server/explain/options.h"
#include "server/explain/subject.h"
#include "server/explain/tensor_writer.h"

namespace mambascope::explain {

// What the two lenses have in common: vectors of d_model through the model's head, of which the
// best outputs are kept. Cells (a layer and a position) are read some at a time, because each costs
// outputs x d_model multiply-adds.
constexpr int32_t kMaxLensPositions = 256;

// As asked for, or 5, or all of fewer outputs.
int32_t LensTop(int32_t top, const model::ModelConfig& config);
void CheckLensTop(int32_t top, const model::ModelConfig& config, const std::string& field,
                  Violations& violations);

class LensHead {
 public:
  // `biased`: with the head's bias.
  LensHead(const model::ModelConfig& config, int32_t top, bool biased)
      : outputs_(config.outputs()), d_model_(config.d_model), top_(top), biased_(biased) {}

  int64_t CellsPerSlice() const;
  int64_t Slices(int64_t cells) const;
  // Upper bound of what is allocated here for `cells` cells of one layer.
  int64_t MemoryBytes(int64_t cells) const;

  // Adds the best outputs of `rows` [cells, d_model] to what is kept. kInternal, naming method and
  // layer, if a value is not finite.
  absl::Status Read(const Subject& subject, absl::string_view method, int32_t layer,
                    const float* rows, int64_t cells);
  // Writes what is kept, and begins anew.
  void Write(TensorWriter& writer, absl::string_view method);

 private:
  const int64_t outputs_, d_model_, top_;
  const bool biased_;
  Array<float> logits_;
  std::vector<float> values_;
  std::vector<int32_t> ids_;
};

// [layers, `positions`, top]: the method's own tensor, and `ids` in int32.
std::vector<v1::TensorInfo> LensTensors(absl::string_view method,
                                        const std::vector<int32_t>& layers, Axis positions,
                                        int32_t top, v1::DataType dtype);

}  // namespace mambascope::explain
