#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mambascope/v1/prediction.pb.h"

namespace mambascope::cli {

// The flags of `predict` as they were given; nullopt and empty lists: not given, so that the
// proto's defaults hold.
struct PredictFlags {
  std::optional<std::string> text, tokens, image;  // tokens: "1,2,3"; image: a file's path
  std::vector<std::string> explain;
  // Of all explanations, where they say nothing else.
  std::optional<std::string> target, contrast, target_value;
  // Of all explanations that give one score a token: zero, delete or token:ID; empty: not asked
  // for.
  std::string faithfulness;
  std::optional<std::string> faithfulness_draws, faithfulness_seed, faithfulness_shares,
      faithfulness_points;
  std::optional<int32_t> max_tokens, top_k, top_logprobs;
  std::optional<float> temperature, top_p;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  bool ignore_eos = false;
  bool logits = false;
  std::string delivery;  // as delivery_option.h says; empty: not given
  std::string sparse;
  std::string request_id;
  std::vector<std::string> labels;  // "key=value"
  double timeout = 0;
  bool json = false;
  std::string output;
};

// The request that the flags ask for, but for the model. kInvalidArgument says which flag is wrong;
// ranges are left to the server, which knows them and names all violations at once.
absl::StatusOr<v1::PredictRequest> BuildRequest(const PredictFlags& flags);

}  // namespace mambascope::cli
