#include "server/observe/log.h"

#include <atomic>
#include <cstdio>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"

namespace mambascope::observe {
namespace {

std::atomic<LogLevel> lowest{LogLevel::kInfo};

const char* Name(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
    case LogLevel::kOff:
      break;
  }
  return "off";
}

}  // namespace

void SetLogLevel(LogLevel level) { lowest = level; }

void Log(LogLevel level, absl::string_view event, const LogFields& fields) {
  if (level < lowest.load()) return;
  nlohmann::ordered_json line;
  line["time"] = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
  line["level"] = Name(level);
  line["event"] = std::string(event.data(), event.size());
  for (const auto& [name, value] : fields) line[name] = value;
  // Bytes that are not UTF-8 are replaced rather than thrown on: a log line must never fail a call.
  std::string text =
      line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  std::fwrite(text.data(), 1, text.size(), stderr);  // one call: stdio locks the stream for it
}

}  // namespace mambascope::observe
