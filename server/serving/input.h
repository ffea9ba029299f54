#pragma once

#include <cstdint>
#include <vector>

#include "mambascope/v1/prediction.pb.h"
#include "server/explain/violations.h"
#include "server/serving/model_repository.h"

namespace mambascope::serving {

// What a request gives the model to read: tokens, or an image.
struct Input {
  std::vector<v1::Token> tokens;
  std::vector<float> image;  // [3, S, S] normalised
  int64_t length = 0;        // in tokens, an image's patches and class token too
};

struct InputLimits {
  int32_t max_tokens = 0;
  int64_t max_text_bytes = 0;
};

// Adds to `violations` whatever is wrong with the input.
Input ReadInput(const v1::PredictRequest& request, const ServedModel& model,
                const InputLimits& limits, explain::Violations& violations);
std::vector<v1::Token> ReadText(const std::string& text, const ServedModel& model,
                                const InputLimits& limits, explain::Violations& violations);

// How much memory reading it takes at most; 0 for what will be refused anyway.
int64_t ReadingBytes(const v1::PredictRequest& request, const ServedModel& model,
                     const InputLimits& limits);
int64_t TokenizingBytes(int64_t text_bytes, const InputLimits& limits);

}  // namespace mambascope::serving
