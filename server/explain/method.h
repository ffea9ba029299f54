#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "mambascope/v1/explanation.pb.h"
#include "server/explain/subject.h"
#include "server/explain/tensor_writer.h"
#include "server/explain/violations.h"
#include "server/model/config.h"

namespace mambascope::explain {

// What an explanation computes, in units whose speed is measured when a model is loaded.
struct Work {
  double forward_tokens = 0;  // tokens through all layers, without the head; backward alike
  double gemm = 0;            // multiply-adds of matrix products beyond those
  double map = 0;             // multiply-adds of the map kernels
  double scan = 0;            // token x channel x state steps of scans beyond the passes'

  Work& operator+=(const Work& other) {
    forward_tokens += other.forward_tokens;
    gemm += other.gemm;
    map += other.map;
    scan += other.scan;
    return *this;
  }
  friend Work operator*(double times, const Work& work) {
    return {times * work.forward_tokens, times * work.gemm, times * work.map, times * work.scan};
  }
};

// As many threads are reckoned with, where each has scratch of its own: a plan knows no pool.
constexpr int64_t kPlannedThreads = 16;

// What an explanation will send and hold, known before any work.
struct Plan {
  std::vector<v1::TensorInfo> tensors;  // the first is the main one
  int64_t memory_bytes = 0;             // upper bound of what it allocates beyond the trace
  int64_t slices = 1;                   // steps of about equal work, one or more for each layer
  bool streams = false;                 // whether it reads the trace's residual streams
  Work work;                            // what its time is estimated from
};

// One explanation under way, cut into slices so that predictions, cancellation and slow readers can
// come in between. Owned and stepped by one thread at a time.
class Explaining {
 public:
  virtual ~Explaining() = default;
  // Runs the next slice and writes the tensor values that it completed. Called exactly Plan::slices
  // times; after an error no more.
  virtual absl::Status Step(TensorWriter& writer) = 0;
  // After the last Step.
  virtual v1::Quality quality() const = 0;
  // After the last Step: adds what else the method has to say.
  virtual void Describe(v1::ExplanationFinished* /*finished*/) const {}
};

// An explanation method. Stateless; one object for the life of the process, used from any thread.
// Its options are its message in explanation.proto.
class Method {
 public:
  virtual ~Method() = default;
  // The field of Explanation.method, as "hidden_attention".
  virtual absl::string_view name() const = 0;
  // Whether it can explain models of this kind; the calls below require it.
  virtual bool Supports(const model::ModelConfig& /*config*/) const { return true; }
  // Adds everything that is wrong with the options for this model and input; `field` is the path of
  // the options in the request. The other calls require that nothing was added.
  virtual void Validate(const v1::Explanation& options, const model::ModelConfig& config,
                        int64_t tokens, const std::string& field, Violations& violations) const = 0;
  // `dtype`: how float tensors are delivered.
  virtual Plan MakePlan(const v1::Explanation& options, const model::ModelConfig& config,
                        int64_t tokens, v1::DataType dtype) const = 0;
  virtual std::unique_ptr<Explaining> Start(const v1::Explanation& options,
                                            const Subject& subject) const = 0;
};

}  // namespace mambascope::explain
