#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace mambascope::cli {

// Fields of a message as options, by what its descriptor holds. Values by the field's type:
//   enum            its value without the prefix, in either case: reduction=abs_mean
//   ranges          (messages of `begin` and `end`) a-b inclusive, or one number: layers=0-3+5
//   lists           (messages of one repeated field) as repeated
//   repeated        joined by +; integers also as a-b: channels=1+2+8-15
//   bool            true, false, 1, 0
// Other messages and maps need more than a value and are no options.

// Sets or, of a repeated field, appends. kInvalidArgument names the key and says what its value may
// be, or which other one of its oneof is set already. The field must be an option of the message.
absl::Status SetField(absl::string_view key, absl::string_view value,
                      google::protobuf::Message* message);

bool HasOption(const google::protobuf::Descriptor& type, absl::string_view key);
// Names of the fields that are options, in their order.
std::vector<std::string> OptionKeys(const google::protobuf::Descriptor& type);
// How the values of an option look, for --help: "mean|abs_mean", "A-B[+...]".
std::string OptionValues(const google::protobuf::Descriptor& type, const std::string& key);

// First and last, inclusive, of "5" or "3-7"; a minus in front belongs to the number.
absl::Status ParseInterval(absl::string_view text, std::pair<int64_t, int64_t>* interval);

}  // namespace mambascope::cli
