#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/cli/errors.h"
#include "client/cli/predict_command.h"
#include "grpcpp/channel.h"

namespace mambascope::cli {

// Each makes one call (or one a model), prints its answer as a table or, with `json`, as one line
// of protobuf JSON, and returns the exit code. `timeout` in seconds; not positive: none.

struct TokenizeFlags {
  std::string model;
  std::string text;
  double timeout = 0;
  bool json = false;
};
ExitCode Tokenize(const std::shared_ptr<grpc::Channel>& channel, const TokenizeFlags& flags,
                  const Output& output);

struct ModelsFlags {
  std::vector<std::string> models;  // empty: a list of all; else the details of each
  int32_t length = 0;               // that methods are priced for; 0: the server's default
  double timeout = 0;
  bool json = false;
};
ExitCode Models(const std::shared_ptr<grpc::Channel>& channel, const ModelsFlags& flags,
                const Output& output);

struct HealthFlags {
  std::string service;
  double timeout = 0;
};
// kDone only if the answer is SERVING.
ExitCode Health(const std::shared_ptr<grpc::Channel>& channel, const HealthFlags& flags,
                const Output& output);

}  // namespace mambascope::cli
