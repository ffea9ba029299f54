#pragma once

#include <cstdint>
#include <vector>

#include "server/model/config.h"

namespace mambascope::explain {

// How much of an input a changed copy of it, a variant, computes.
struct VariantExtent {
  int64_t start = 0;  // its rows before this one are the input's own; below `rows`
  int64_t rows = 0;   // of the variant: fewer than the input's where tokens are deleted
};

// What fits into one forward pass, and how long a slice of it is.
struct PassLimits {
  int64_t rows = 0;
  int64_t variants = 0;     // because each holds a state
  int64_t logit_rows = 0;   // because each holds the vocabulary's logits
  int64_t shared_rows = 0;  // of the unchanged input, beyond `rows`; 0: no prefix is shared
  bool cut = true;          // a variant may go on in the next pass
  int32_t layers = 1;       // of a slice

  // About 2^32 multiply-adds a slice: 1024 rows through one layer of mamba-130m's size, 40 ms on
  // two cores. Of an input of `rows`; `share`: whether variants may start from its state.
  static PassLimits Of(const model::ModelConfig& config, int64_t rows, bool share);
  int32_t SlicesOf(const model::ModelConfig& config) const {
    return (config.layers + layers - 1) / layers;
  }
};

// Which rows of which variants each forward pass computes: a pure function of its arguments, so
// that a plan counts what a run will do.
//
// Variants come in the order of their first change. The unchanged input is computed beside them, a
// piece a pass, and a variant starts from its state at the beginning of the pass that the variant
// enters: it computes no row that comes before the first change of all in that pass. Passes are
// filled to the last row where variants can be cut.
class VariantSchedule {
 public:
  static constexpr int32_t kUnchanged = -1;

  struct Part {
    int32_t variant = 0;         // or kUnchanged
    int64_t begin = 0, end = 0;  // rows of the variant's own sequence
    bool starts = false;         // from the unchanged input's state before this pass
  };
  struct Pass {
    std::vector<Part> parts;
    int64_t rows = 0, logit_rows = 0;
  };

  // `outputs`: the rows whose logits are wanted, counted back from the last one (0), ascending.
  // Several of them need variants as long as the input, of `rows`.
  VariantSchedule(std::vector<VariantExtent> extents, int64_t rows, std::vector<int64_t> outputs,
                  const PassLimits& limits);

  // False when all variants are complete.
  bool Next(Pass& pass);

 private:
  int64_t LogitRows(int64_t variant_rows, int64_t begin, int64_t end) const;
  int64_t Cut(int64_t variant_rows, int64_t begin, int64_t end, int64_t logit_rows) const;
  bool Enter(int32_t variant, int64_t begin, bool starts, Pass& pass);
  void AddUnchanged(Pass& pass);

  std::vector<VariantExtent> extents_;
  int64_t rows_;
  std::vector<int64_t> outputs_;
  PassLimits limits_;
  std::vector<int32_t> order_;
  size_t next_ = 0;        // in order_: the first that has not started
  int32_t open_ = -1;      // a variant that goes on in the next pass, or -1
  int64_t open_row_ = 0;   // from this row
  int64_t unchanged_ = 0;  // rows of the unchanged input that are computed
};

// What a schedule comes to.
struct ScheduleTotals {
  int64_t passes = 0, rows = 0, logit_rows = 0;
  int64_t most_rows = 0, most_parts = 0, most_logit_rows = 0;  // of a pass
};
ScheduleTotals TotalsOf(VariantSchedule schedule);

}  // namespace mambascope::explain
