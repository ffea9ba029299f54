#include "server/serving/input.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/finite.h"
#include "server/model/image.h"

namespace mambascope::serving {
namespace {

using explain::Violations;

constexpr int64_t kTokenizeBytesPerByte = 250;  // measured on text that becomes one token a byte

v1::Token ToProto(const model::Token& token) {
  v1::Token out;
  out.set_id(token.id);
  out.set_piece(token.piece);
  out.set_begin_byte(token.begin_byte);
  out.set_end_byte(token.end_byte);
  out.set_special(token.special);
  out.set_partial(token.partial);
  return out;
}

void CheckLength(size_t tokens, const std::string& field, const ServedModel& model, int32_t limit,
                 Violations& violations) {
  if (tokens == 0) violations.Add(field, "no tokens; at least 1 is needed");
  if (tokens > static_cast<size_t>(limit)) {
    violations.Add(field,
                   absl::StrCat(tokens, " tokens exceed model '", model.name, "' limit ", limit));
  }
}

std::vector<v1::Token> ReadIds(const v1::TokenIds& ids, const ServedModel& model,
                               const InputLimits& limits, Violations& violations) {
  CheckLength(ids.ids_size(), "token_ids", model, limits.max_tokens, violations);
  const int32_t vocabulary = model.model->config().vocabulary;
  constexpr int kNamed = 10;  // of the wrong ids
  int wrong = 0;
  std::vector<v1::Token> tokens;
  tokens.reserve(ids.ids_size());
  for (int i = 0; i < ids.ids_size(); ++i) {
    const int32_t id = ids.ids(i);
    if (id < 0 || id >= vocabulary) {
      if (++wrong <= kNamed) {
        violations.Add(absl::StrCat("token_ids.ids[", i, "]"),
                       absl::StrCat(id, " is outside 0 to ", vocabulary - 1));
      }
      continue;
    }
    v1::Token token;
    token.set_id(id);
    if (model.tokenizer != nullptr) {
      token.set_piece(model.tokenizer->Piece(id));
      token.set_special(model.tokenizer->IsSpecial(id));
    }
    tokens.push_back(std::move(token));
  }
  if (wrong > kNamed)
    violations.Add("token_ids.ids", absl::StrCat(wrong - kNamed, " more are outside"));
  return tokens;
}

bool IsVision(const ServedModel& model) {
  return model.model->config().family == model::Family::kVim;
}

std::vector<float> ReadTensor(const v1::ImageTensor& tensor, int32_t size, Violations& violations) {
  static_assert(std::endian::native == std::endian::little);
  const std::string field = "image.tensor";
  if (tensor.height() != size || tensor.width() != size) {
    violations.Add(field, absl::StrCat("3 x ", tensor.height(), " x ", tensor.width(),
                                       " is not the model's 3 x ", size, " x ", size));
    return {};
  }
  const size_t bytes = sizeof(float) * 3 * size * size;
  if (tensor.values().size() != bytes) {
    violations.Add(field + ".values",
                   absl::StrCat(tensor.values().size(), " bytes are not the ", bytes, " of 3 x ",
                                size, " x ", size, " float32"));
    return {};
  }
  std::vector<float> values(bytes / sizeof(float));
  std::memcpy(values.data(), tensor.values().data(), bytes);
  if (!model::AllFinite(values.data(), static_cast<int64_t>(values.size()))) {
    violations.Add(field + ".values", "holds a value that is not finite");
  }
  return values;
}

std::vector<float> ReadImage(const v1::Image& image, const ServedModel& model,
                             Violations& violations) {
  switch (image.data_case()) {
    case v1::Image::kEncoded: {
      auto decoded = model::DecodeImage(image.encoded(), model.preprocessing);
      if (decoded.ok()) return *std::move(decoded);
      violations.Add("image.encoded", std::string(decoded.status().message()));
      return {};
    }
    case v1::Image::kTensor:
      return ReadTensor(image.tensor(), model.model->config().vision.image_size, violations);
    case v1::Image::DATA_NOT_SET:
      break;
  }
  violations.Add("image", "neither encoded nor tensor is given");
  return {};
}

}  // namespace

std::vector<v1::Token> ReadText(const std::string& text, const ServedModel& model,
                                const InputLimits& limits, Violations& violations) {
  const auto refuse = [&](std::string description) {
    violations.Add("text", std::move(description));
    return std::vector<v1::Token>();
  };
  if (model.tokenizer == nullptr) {
    return refuse(
        absl::StrCat("model '", model.name, "' takes token_ids only: ", model.tokenizer_note));
  }
  if (text.empty()) return refuse("empty; at least 1 byte is needed");
  if (static_cast<int64_t>(text.size()) > limits.max_text_bytes) {
    return refuse(absl::StrCat(text.size(), " bytes exceed the limit ", limits.max_text_bytes));
  }
  auto encoded = model.tokenizer->Encode(text);
  if (!encoded.ok()) return refuse(std::string(encoded.status().message()));
  CheckLength(encoded->size(), "text", model, limits.max_tokens, violations);
  std::vector<v1::Token> tokens;
  tokens.reserve(encoded->size());
  for (const model::Token& token : *encoded) tokens.push_back(ToProto(token));
  return tokens;
}

Input ReadInput(const v1::PredictRequest& request, const ServedModel& model,
                const InputLimits& limits, Violations& violations) {
  Input input;
  const bool vision = IsVision(model);
  const auto input_case = request.input_case();
  if (input_case == v1::PredictRequest::INPUT_NOT_SET) {
    violations.Add("input", vision ? "no image is given" : "neither text nor token_ids is given");
    return input;
  }
  if (vision != (input_case == v1::PredictRequest::kImage)) {
    violations.Add(vision ? "input" : "image",
                   absl::StrCat("model '", model.name, "' takes ",
                                vision ? "an image only" : "text or token_ids, no image"));
    return input;
  }
  if (vision) {
    input.image = ReadImage(request.image(), model, violations);
    input.length = model.model->config().vision.tokens();
    if (input.length > limits.max_tokens) {
      violations.Add("image",
                     absl::StrCat(input.length, " tokens exceed the limit ", limits.max_tokens));
    }
    return input;
  }
  input.tokens = input_case == v1::PredictRequest::kText
                     ? ReadText(request.text(), model, limits, violations)
                     : ReadIds(request.token_ids(), model, limits, violations);
  input.length = static_cast<int64_t>(input.tokens.size());
  return input;
}

int64_t TokenizingBytes(int64_t text_bytes, const InputLimits& limits) {
  return kTokenizeBytesPerByte * std::min(text_bytes, limits.max_text_bytes);
}

int64_t ReadingBytes(const v1::PredictRequest& request, const ServedModel& model,
                     const InputLimits& limits) {
  if (!IsVision(model)) {
    return TokenizingBytes(static_cast<int64_t>(request.text().size()), limits);
  }
  const auto bytes = model::ImageDecodeBytes(request.image().encoded(), model.preprocessing);
  return bytes.ok() ? *bytes : 0;
}

}  // namespace mambascope::serving
