#pragma once

#include <cstdint>

#include "mambascope/v1/explanation.pb.h"
#include "server/base/thread_pool.h"

namespace mambascope::explain {

// Adds what a layer's map [tokens, tokens] looks like (methods.md, section 8). A map without mass:
// all 0. The bits do not depend on the thread count.
void AddStatistics(ThreadPool& pool, int32_t layer, const float* map, int64_t tokens,
                   v1::MapStatistics* statistics);

}  // namespace mambascope::explain
