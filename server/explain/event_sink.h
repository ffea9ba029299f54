#pragma once

#include "mambascope/v1/prediction.pb.h"

namespace mambascope::explain {

// Where the events of one request go, in order. Never blocks: a sink that is full accepts what a
// slice in progress still brings, and its owner starts no further slice before there is room again.
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void Send(v1::PredictEvent event) = 0;
};

}  // namespace mambascope::explain
