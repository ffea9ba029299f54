#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/errors.h"
#include "client/cli/terminal.h"
#include "grpcpp/channel.h"
#include "mambascope/v1/prediction.pb.h"

namespace mambascope::cli {

// The flags of `predict` as they were given; nullopt and empty lists: not given, so that the
// proto's defaults hold.
struct PredictFlags {
  std::optional<std::string> text, tokens, image;  // tokens: "1,2,3"; image: a file's path
  std::vector<std::string> explain;
  std::optional<std::string> target, contrast;
  std::optional<int32_t> max_tokens, top_k, top_logprobs;
  std::optional<float> temperature, top_p;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  bool ignore_eos = false;
  bool logits = false;
  std::string dtype;  // "", "fp32" or "fp16"
  std::string request_id;
  std::vector<std::string> labels;  // "key=value"
  double timeout = 0;
  bool json = false;
  std::string output;
};

// The request that the flags ask for, but for the model. kInvalidArgument says which flag is wrong;
// ranges are left to the server, which knows them and names all violations at once.
absl::StatusOr<v1::PredictRequest> BuildRequest(const PredictFlags& flags);

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
