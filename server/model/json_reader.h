#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace mambascope::model {

// An object from outside: nested at most 32 levels, never thrown over. Python's bare Infinity,
// -Infinity and NaN, which published configs hold, are read as the strings of that name.
absl::StatusOr<nlohmann::json> ParseJsonObject(absl::string_view text);

// A JSON value as an error shows it: ASCII, not too long.
std::string Shown(const nlohmann::json& value);

// Reads keys and collects every fault; null counts as absent, as Hugging Face writes it. A faulty
// value reads as 0, so that no fault follows from another.
class JsonReader {
 public:
  explicit JsonReader(const nlohmann::json& object) : object_(object) {}  // borrowed

  const nlohmann::json* Find(const char* key) const;
  int64_t Integer(const char* key, int64_t low, int64_t high, std::optional<int64_t> fallback);
  bool Flag(const char* key, bool fallback);
  float Epsilon(const char* key, float fallback);  // in (0, 1]

  void Fault(const char* key, const std::string& what);
  // kInvalidArgument with every fault.
  absl::Status status() const;

  static std::optional<int64_t> AsInteger(const nlohmann::json& value);

 private:
  const nlohmann::json& object_;
  std::vector<std::string> faults_;
};

}  // namespace mambascope::model
