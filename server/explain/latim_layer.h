#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "mambascope/v1/explanation.pb.h"
#include "server/base/array.h"
#include "server/explain/subject.h"
#include "server/kernels/activation.h"
#include "server/model/layer_activations.h"

namespace mambascope::explain {

// GATE where nothing is said.
v1::Latim::Activation ActivationOf(v1::Latim::Activation activation);

// What the rows of one layer's mixer read of each input token before out_proj (methods.md, section
// 5; LaTIM, arXiv 2502.15612), for a block of neighbouring rows at a time:
//   T_i(x_j) = W_out Inputs(i, j),   const_i = W_out constant(i) + b_out
// A row is an adjoint scan and a transposed convolution, so its length enters linearly.
//
// Of the sequence only the first `tokens` take part: all that the rows read. Bits depend neither on
// threads nor on which rows stand in a block. Owned by one thread.
class LatimLayer {
 public:
  LatimLayer(const model::ModelConfig& config, v1::Latim::Activation activation, int64_t tokens);
  // Rows of one block, of at most `rows`: about one slice's work of scans.
  int64_t BlockRows(int64_t rows) const;
  // Upper bound of what is allocated here for blocks of up to `rows` rows.
  int64_t MemoryBytes(int64_t rows) const;

  // Turns to a layer, computing once more what it computed. `stream` [tokens, d_model] enters it.
  void Open(const Subject& subject, int32_t layer, const float* stream);
  // Turns to the rows [first, first + count); `weights` [count] multiply them, null: 1.
  void OpenRows(int64_t first, int64_t count, const float* weights);

  // Row i reads the tokens [0, ReadTo(i)).
  int64_t ReadTo(int64_t i) const { return both_ways() ? tokens_ : i + 1; }
  // out (+)= Inputs(i, j) for an open row i and j in [begin, end), which it reads: [end - begin,
  // d_inner]. From any thread.
  void Inputs(int64_t i, int64_t begin, int64_t end, bool accumulate, float* out) const;
  // out (+)= constant(i), [d_inner].
  void Constant(int64_t i, bool accumulate, float* out) const;

  const model::LayerActivations& activations() const { return activations_; }
  const model::LayerWeights& weights() const { return *weights_; }

 private:
  // A direction's scan, with what one group of Mamba-2's heads has of it at a time.
  struct Branch {
    std::vector<float> weight;     // [taps, d_inner]
    std::vector<float> bias;       // [d_inner] what the convolution's bias gives a row's sum
    Array<float> delta, A;         // of groups, side by side: [groups, tokens, heads of a group]
    Array<float> rows;             // [rows, row_floats], as much as a block's last row reads
    Array<float> sums;             // [rows, d_inner]
    kernels::ScanParameters scan;  // of the layer
    int64_t first = 0;             // of the open rows, in the scan's own order
    int64_t row_floats = 0;        // first + rows tokens of d_inner
  };

  bool both_ways() const { return config_.directions() == 2; }
  void OpenBranch(int32_t direction);
  // The scan of one group's maps.
  kernels::ScanParameters ScanOfGroup(const Branch& branch, int64_t group) const;
  // `scale_of`: of the r-th row in the scan's own order, [d_inner].
  void OpenGroup(int32_t direction, int64_t group, int64_t count,
                 absl::FunctionRef<const float*(int64_t)> scale_of);
  // [d_inner] what the gate and the frozen norm make of row i, times `weight`.
  std::vector<float> ScaleOf(int64_t i, float weight) const;

  const model::ModelConfig config_;
  const v1::Latim::Activation activation_;
  const int64_t tokens_;
  ThreadPool* pool_ = nullptr;
  const model::LayerWeights* weights_ = nullptr;
  model::LayerActivations activations_;
  Branch branches_[2];
  Array<float> alpha_;  // Mamba-2: a group's rows, [rows, tokens, heads of a group]
};

}  // namespace mambascope::explain
