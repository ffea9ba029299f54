#include "server/model/json_reader.h"

#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace mambascope::model {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 32;

// Puts Python's names of numbers that JSON does not have into quotes, outside of strings.
std::string QuoteNonFinite(absl::string_view text) {
  std::string quoted;
  quoted.reserve(text.size() + 16);
  bool in_string = false;
  for (size_t i = 0; i < text.size();) {
    if (in_string) {
      if (text[i] == '\\' && i + 1 < text.size()) {  // what it escapes ends no string
        quoted += text[i++];
      } else {
        in_string = text[i] != '"';
      }
      quoted += text[i++];
      continue;
    }
    absl::string_view name;
    for (const absl::string_view candidate : {"-Infinity", "Infinity", "NaN"}) {
      if (absl::StartsWith(text.substr(i), candidate)) name = candidate;
    }
    if (!name.empty()) {
      absl::StrAppend(&quoted, "\"", name, "\"");
      i += name.size();
      continue;
    }
    in_string = text[i] == '"';
    quoted += text[i++];
  }
  return quoted;
}

}  // namespace

absl::StatusOr<Json> ParseJsonObject(absl::string_view text) {
  const std::string quoted = QuoteNonFinite(text);
  bool too_deep = false;
  const Json::parser_callback_t bound = [&](int depth, Json::parse_event_t, Json&) {
    too_deep |= depth > kMaxDepth;
    return !too_deep;  // what lies deeper is dropped while it is parsed
  };
  Json object = Json::parse(quoted, bound, /*allow_exceptions=*/false);
  if (too_deep) {
    return absl::InvalidArgumentError(absl::StrCat("nested more than ", kMaxDepth, " levels deep"));
  }
  if (!object.is_object()) return absl::InvalidArgumentError("not a JSON object");
  return object;
}

std::string Shown(const Json& value) {
  constexpr size_t kLongest = 60;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

const Json* JsonReader::Find(const char* key) const {
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

int64_t JsonReader::Integer(const char* key, int64_t low, int64_t high,
                            std::optional<int64_t> fallback) {
  const Json* value = Find(key);
  if (value == nullptr) {
    if (!fallback.has_value()) Fault(key, "is missing");
    return fallback.value_or(0);
  }
  const std::optional<int64_t> read = AsInteger(*value);
  if (read.has_value() && *read >= low && *read <= high) return *read;
  Fault(key, absl::StrCat(Shown(*value), " is not an integer in [", low, ", ", high, "]"));
  return 0;
}

bool JsonReader::Flag(const char* key, bool fallback) {
  const Json* value = Find(key);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  Fault(key, absl::StrCat(Shown(*value), " is not true or false"));
  return fallback;
}

float JsonReader::Epsilon(const char* key, float fallback) {
  const Json* value = Find(key);
  if (value == nullptr) return fallback;
  const float eps = value->is_number() ? static_cast<float>(value->get<double>()) : 0;
  if (eps > 0 && eps <= 1) return eps;
  Fault(key, absl::StrCat(Shown(*value), " is not a number in (0, 1]"));
  return fallback;
}

void JsonReader::Fault(const char* key, const std::string& what) {
  faults_.push_back(absl::StrCat(key, ": ", what));
}

absl::Status JsonReader::status() const {
  if (faults_.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(faults_, "; "));
}

std::optional<int64_t> JsonReader::AsInteger(const Json& value) {
  if (value.is_number_unsigned()) {
    const uint64_t number = value.get<uint64_t>();
    if (number > INT64_MAX) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const double number = value.get<double>();  // some tools write 2.0
  if (!(std::abs(number) < 1e15) || number != std::floor(number)) return std::nullopt;
  return static_cast<int64_t>(number);
}

}  // namespace mambascope::model
