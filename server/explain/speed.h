#pragma once

#include "server/base/thread_pool.h"
#include "server/explain/method.h"
#include "server/model/mamba_model.h"

namespace mambascope::explain {

// What the units of Work take on this machine, in seconds; measured, so that a request's time can
// be told before it is spent. A short prefill, one step and small runs of the kernels stand for all
// others: an estimate within a factor of about two, not a bound.
struct Speed {
  double forward_token = 0;  // of a prefill, without the head
  double step = 0;           // one generated token, alone
  double gemm = 0;           // one multiply-add
  double map = 0;            // one multiply-add of the map kernels
  double scan = 0;           // one token x channel x state step

  // For a model on this pool; a few tens of milliseconds, of large models a second.
  static Speed Measure(ThreadPool& pool, const model::MambaModel& model);

  double Seconds(const Work& work) const;
};

}  // namespace mambascope::explain
