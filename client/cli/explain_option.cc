#include "client/cli/explain_option.h"

#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cli/faithfulness_option.h"
#include "client/cli/field_option.h"
#include "client/cli/target_option.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "server/base/status.h"

namespace mambascope::cli {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::OneofDescriptor;

const OneofDescriptor& Methods() {
  return *v1::Explanation::descriptor()->FindOneofByName("method");
}

const Descriptor& Groups() { return *v1::Aggregation::descriptor(); }

// A key with its value; none: the key stood alone.
struct Option {
  absl::string_view key;
  std::optional<absl::string_view> value;
};

std::string CommonKeys() {
  std::vector<std::string> keys = {"target", "contrast", "generated"};
  for (std::string& key : OptionKeys(Groups())) keys.push_back(std::move(key));
  keys.emplace_back("faithfulness");
  for (std::string& key : FaithfulnessKeys()) keys.push_back(std::move(key));
  return absl::StrJoin(keys, ", ");
}

absl::Status NoSuchKey(absl::string_view key, const Descriptor& method) {
  std::vector<std::string> keys = OptionKeys(method);
  keys.insert(keys.begin(), "id");
  return absl::InvalidArgumentError(absl::StrCat("no option '", key, "'; it has ",
                                                 absl::StrJoin(keys, ", "),
                                                 "; and as every method ", CommonKeys()));
}

absl::Status Named(absl::string_view key, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat(key, ": ", status.message()));
}

absl::Status NeedsValue(absl::string_view key) {
  return absl::InvalidArgumentError(absl::StrCat("'", key, "' is not key=value"));
}

absl::Status SetFieldOf(const Option& option, Message* message) {
  if (option.value) return SetField(option.key, *option.value, message);
  if (OptionValues(*message->GetDescriptor(), std::string(option.key)) != "true|false") {
    return NeedsValue(option.key);
  }
  return SetField(option.key, "true", message);
}

// Where and what, of keys that every method has.
absl::Status SetTargetKey(const Option& option, v1::Explanation* explanation) {
  if (!option.value) return NeedsValue(option.key);
  v1::Target* target = explanation->mutable_target();
  if (option.key == "contrast") return Named(option.key, ParseContrast(*option.value, target));
  v1::Target named;
  RETURN_IF_ERROR(Named(option.key, option.key == "generated"
                                        ? ParseGenerated(*option.value, &named)
                                        : ParseTarget(*option.value, &named)));
  if (target->has_generated() || target->has_position() ||
      target->output_case() != v1::Target::OUTPUT_NOT_SET) {
    return absl::InvalidArgumentError("target and generated name the same: give one of them");
  }
  target->MergeFrom(named);
  return absl::OkStatus();
}

absl::Status SetKey(const Option& option, v1::Explanation* explanation, Message* method) {
  const absl::string_view key = option.key;
  if (HasOption(*method->GetDescriptor(), key)) return SetFieldOf(option, method);
  if (HasOption(Groups(), key)) return SetFieldOf(option, explanation->mutable_aggregation());
  if (key == "target" || key == "contrast" || key == "generated") {
    return SetTargetKey(option, explanation);
  }
  if (key == "faithfulness") {
    return Named(key,
                 ParseRemoval(option.value.value_or("zero"), explanation->mutable_faithfulness()));
  }
  if (key != "id" && !IsFaithfulnessKey(key)) return NoSuchKey(key, *method->GetDescriptor());
  if (!option.value) return NeedsValue(key);
  if (key == "id") {
    explanation->set_id(std::string(*option.value));
    return absl::OkStatus();
  }
  return SetFaithfulnessKey(key, *option.value, explanation->mutable_faithfulness());
}

absl::Status ParseOptions(absl::string_view options, v1::Explanation* explanation,
                          Message* method) {
  std::vector<absl::string_view> seen;
  for (const absl::string_view text : absl::StrSplit(options, ',')) {
    const size_t equals = text.find('=');
    if (text.empty() || equals == 0) return NeedsValue(text);
    Option option = {text.substr(0, equals), std::nullopt};
    if (equals != absl::string_view::npos) option.value = text.substr(equals + 1);
    for (const absl::string_view earlier : seen) {
      if (earlier == option.key) {
        return absl::InvalidArgumentError(absl::StrCat(option.key, " is given twice"));
      }
    }
    seen.push_back(option.key);
    RETURN_IF_ERROR(SetKey(option, explanation, method));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::Explanation> ParseExplain(absl::string_view option) {
  const size_t colon = option.find(':');
  const absl::string_view name = option.substr(0, colon);
  v1::Explanation explanation;
  for (int i = 0; i < Methods().field_count(); ++i) {
    const FieldDescriptor* field = Methods().field(i);
    if (field->name() != std::string(name)) continue;
    Message* method = explanation.GetReflection()->MutableMessage(&explanation, field);
    if (colon == absl::string_view::npos) return explanation;
    absl::Status status = ParseOptions(option.substr(colon + 1), &explanation, method);
    if (status.ok()) return explanation;
    return absl::InvalidArgumentError(absl::StrCat("--explain ", name, ": ", status.message()));
  }
  std::vector<std::string> names;
  names.reserve(Methods().field_count());
  for (int i = 0; i < Methods().field_count(); ++i) names.push_back(Methods().field(i)->name());
  return absl::InvalidArgumentError(
      absl::StrCat("--explain: no method '", name, "'; there are ", absl::StrJoin(names, ", ")));
}

std::string ExplainHelp() {
  std::string help = "Methods and their options (--explain METHOD:key=value,...):\n";
  const auto add = [&](const std::string& key, absl::string_view value) {
    absl::StrAppend(&help, "    ", key, value.empty() ? "" : "=", value, "\n");
  };
  for (int i = 0; i < Methods().field_count(); ++i) {
    const Descriptor& method = *Methods().field(i)->message_type();
    absl::StrAppend(&help, "  ", Methods().field(i)->name(), "\n");
    for (const std::string& key : OptionKeys(method)) add(key, OptionValues(method, key));
  }
  absl::StrAppend(&help, "  every method\n");
  add("id", "NAME");
  add("target", "POS[:TOKEN]|gen:K|gen:A-B|class:NUMBER");
  add("contrast", "TOKEN|class:NUMBER");
  add("generated", "K|A-B");
  absl::StrAppend(&help, "  methods of one score a token\n");
  for (const std::string& key : OptionKeys(Groups())) add(key, OptionValues(Groups(), key));
  add("faithfulness", "zero|delete|token:ID");
  for (const std::string& key : FaithfulnessKeys()) {
    add(key, key == "faithfulness_shares" ? "NUMBER[+...]" : "NUMBER");
  }
  return help;
}

}  // namespace mambascope::cli
