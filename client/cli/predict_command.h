#pragma once

#include <memory>
#include <ostream>

#include "client/cli/build_request.h"
#include "client/cli/errors.h"
#include "client/cli/terminal.h"
#include "grpcpp/channel.h"
#include "mambascope/v1/prediction.pb.h"

namespace mambascope::cli {

// Where the answer goes.
struct Output {
  std::ostream& out;
  Screen screen;      // of `out`
  std::ostream& err;  // errors and progress
  Screen err_screen;
  bool progress = false;  // whether `err` is a terminal
};

// Sends the request and shows the answer. Everything that arrives is checked against its
// announcement and digest before it is believed: what does not hold is an error (kRefused).
ExitCode Predict(const std::shared_ptr<grpc::Channel>& channel, const v1::PredictRequest& request,
                 const PredictFlags& flags, const Output& output);

}  // namespace mambascope::cli
