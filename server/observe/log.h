#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace mambascope::observe {

enum class LogLevel { kInfo, kWarning, kError, kOff };

// Structured log: one JSON object a line on stderr, with time, level, event and the given fields.
// Prompts and generated texts are never logged. Threads: any; lines never interleave.
using LogFields = std::vector<std::pair<std::string, std::string>>;
void Log(LogLevel level, absl::string_view event, const LogFields& fields);

// Lines below this level are dropped; kInfo at first.
void SetLogLevel(LogLevel level);

}  // namespace mambascope::observe
