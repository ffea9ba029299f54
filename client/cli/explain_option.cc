#include "client/cli/explain_option.h"

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "server/base/status.h"

namespace mambascope::cli {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::OneofDescriptor;
using google::protobuf::Reflection;

// The longest list that a short text like 0-999999999 may become.
constexpr int64_t kMostEntries = 65536;

const OneofDescriptor& Methods() {
  return *v1::Explanation::descriptor()->FindOneofByName("method");
}

// "DataType" -> "DATA_TYPE_".
std::string EnumPrefix(const EnumDescriptor& type) {
  std::string prefix;
  for (const char c : type.name()) {
    if (absl::ascii_isupper(c) && !prefix.empty()) prefix += '_';
    prefix += absl::ascii_toupper(c);
  }
  return prefix + '_';
}

std::string ShortName(const EnumValueDescriptor& value) {
  absl::string_view name = value.name();
  absl::ConsumePrefix(&name, EnumPrefix(*value.type()));
  return absl::AsciiStrToLower(name);
}

std::vector<std::string> ShortNames(const EnumDescriptor& type) {
  std::vector<std::string> names;
  for (int i = 0; i < type.value_count(); ++i) {
    if (std::string name = ShortName(*type.value(i)); name != "unspecified") {
      names.push_back(std::move(name));
    }
  }
  return names;
}

bool IsRange(const Descriptor& type) {
  const auto is_int32 = [](const FieldDescriptor* field) {
    return field != nullptr && !field->is_repeated() &&
           field->cpp_type() == FieldDescriptor::CPPTYPE_INT32;
  };
  return type.field_count() == 2 && is_int32(type.FindFieldByName("begin")) &&
         is_int32(type.FindFieldByName("end"));
}

// Whether one option can say it: messages other than ranges need more than a value.
bool CanBeSet(const FieldDescriptor& field) {
  if (field.is_map()) return false;
  return field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE || IsRange(*field.message_type());
}

std::vector<std::string> Keys(const Descriptor& method) {
  std::vector<std::string> keys = {"id"};
  for (int i = 0; i < method.field_count(); ++i) {
    if (CanBeSet(*method.field(i))) keys.push_back(method.field(i)->name());
  }
  return keys;
}

bool IsInteger(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
    case FieldDescriptor::CPPTYPE_INT64:
    case FieldDescriptor::CPPTYPE_UINT32:
    case FieldDescriptor::CPPTYPE_UINT64:
      return true;
    default:
      return false;
  }
}

absl::Status Bad(absl::string_view value, absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat("'", value, "' is not ", expected));
}

struct Interval {
  int64_t first, last;  // inclusive
};

// "5" or "3-7"; a minus in front belongs to the number.
absl::StatusOr<Interval> ParseInterval(absl::string_view text) {
  Interval interval = {};
  const size_t dash = text.find('-', 1);
  const bool read = dash == absl::string_view::npos
                        ? absl::SimpleAtoi(text, &interval.first)
                        : absl::SimpleAtoi(text.substr(0, dash), &interval.first) &&
                              absl::SimpleAtoi(text.substr(dash + 1), &interval.last);
  if (!read) return Bad(text, "an integer or a range a-b");
  if (dash == absl::string_view::npos) interval.last = interval.first;
  if (interval.last < interval.first) {
    return absl::InvalidArgumentError(absl::StrCat("the range '", text, "' ends before it begins"));
  }
  return interval;
}

absl::Status AddRange(absl::string_view text, const FieldDescriptor& field, Message* message) {
  ASSIGN_OR_RETURN(const Interval interval, ParseInterval(text));
  if (interval.first < 0 || interval.last >= std::numeric_limits<int32_t>::max()) {
    return Bad(text, "a range of numbers from 0 on");
  }
  const Reflection& reflection = *message->GetReflection();
  Message* range = field.is_repeated() ? reflection.AddMessage(message, &field)
                                       : reflection.MutableMessage(message, &field);
  const Descriptor& type = *field.message_type();
  const auto set = [&](const char* name, int64_t value) {
    range->GetReflection()->SetInt32(range, type.FindFieldByName(name),
                                     static_cast<int32_t>(value));
  };
  set("begin", interval.first);
  set("end", interval.last + 1);
  return absl::OkStatus();
}

// Appends to a repeated field or sets a single one.
#define PUT(Type, value)                                                \
  (field.is_repeated() ? reflection.Add##Type(message, &field, (value)) \
                       : reflection.Set##Type(message, &field, (value)))

absl::Status PutInteger(int64_t value, const FieldDescriptor& field, Message* message) {
  const Reflection& reflection = *message->GetReflection();
  const auto fits = [&](auto limits) {
    using Limits = decltype(limits);
    return value >= static_cast<int64_t>(Limits::min()) &&
           (value < 0 || static_cast<uint64_t>(value) <= static_cast<uint64_t>(Limits::max()));
  };
  const auto out_of_range = [&] { return Bad(absl::StrCat(value), "in the field's range"); };
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      if (!fits(std::numeric_limits<int32_t>())) return out_of_range();
      PUT(Int32, static_cast<int32_t>(value));
      break;
    case FieldDescriptor::CPPTYPE_UINT32:
      if (!fits(std::numeric_limits<uint32_t>())) return out_of_range();
      PUT(UInt32, static_cast<uint32_t>(value));
      break;
    case FieldDescriptor::CPPTYPE_UINT64:
      if (!fits(std::numeric_limits<uint64_t>())) return out_of_range();
      PUT(UInt64, static_cast<uint64_t>(value));
      break;
    default:
      PUT(Int64, value);
  }
  return absl::OkStatus();
}

absl::Status PutIntegers(absl::string_view text, const FieldDescriptor& field, Message* message) {
  ASSIGN_OR_RETURN(const Interval interval, ParseInterval(text));
  if (!field.is_repeated() && interval.first != interval.last) return Bad(text, "one integer");
  const int64_t present =
      field.is_repeated() ? message->GetReflection()->FieldSize(*message, &field) : 0;
  // Unsigned: the length of a range of int64 may not fit in one.
  const uint64_t more =
      static_cast<uint64_t>(interval.last) - static_cast<uint64_t>(interval.first);
  if (more >= static_cast<uint64_t>(kMostEntries - present)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' makes a list of more than ", kMostEntries, " entries"));
  }
  for (int64_t value = interval.first;; ++value) {
    RETURN_IF_ERROR(PutInteger(value, field, message));
    if (value == interval.last) return absl::OkStatus();
  }
}

absl::Status PutEnum(absl::string_view text, const FieldDescriptor& field, Message* message) {
  const Reflection& reflection = *message->GetReflection();
  const EnumDescriptor& type = *field.enum_type();
  for (int i = 0; i < type.value_count(); ++i) {
    if (const std::string name = ShortName(*type.value(i)); name == text && name != "unspecified") {
      PUT(Enum, type.value(i));
      return absl::OkStatus();
    }
  }
  return Bad(text, absl::StrCat("one of ", absl::StrJoin(ShortNames(type), ", ")));
}

// One value, or one entry of a list.
absl::Status PutValue(absl::string_view text, const FieldDescriptor& field, Message* message) {
  const Reflection& reflection = *message->GetReflection();
  if (IsInteger(field)) return PutIntegers(text, field, message);
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_ENUM:
      return PutEnum(text, field, message);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return AddRange(text, field, message);
    case FieldDescriptor::CPPTYPE_BOOL: {
      const bool yes = text == "true" || text == "1";
      if (!yes && text != "false" && text != "0") return Bad(text, "true or false");
      PUT(Bool, yes);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_STRING:
      PUT(String, std::string(text));
      return absl::OkStatus();
    default: {
      double value = 0;
      if (!absl::SimpleAtod(text, &value)) return Bad(text, "a number");
      if (field.cpp_type() == FieldDescriptor::CPPTYPE_FLOAT) {
        PUT(Float, static_cast<float>(value));
      } else {
        PUT(Double, value);
      }
      return absl::OkStatus();
    }
  }
}

#undef PUT

absl::Status SetKey(absl::string_view key, absl::string_view value, Message* method) {
  const FieldDescriptor* field = method->GetDescriptor()->FindFieldByName(std::string(key));
  if (field == nullptr || !CanBeSet(*field)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no option '", key, "'; it has ", absl::StrJoin(Keys(*method->GetDescriptor()), ", ")));
  }
  const std::vector<absl::string_view> entries =
      field->is_repeated() ? absl::StrSplit(value, '+') : std::vector<absl::string_view>{value};
  for (const absl::string_view entry : entries) {
    if (absl::Status status = PutValue(entry, *field, method); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(key, ": ", status.message()));
    }
  }
  return absl::OkStatus();
}

absl::Status ParseOptions(absl::string_view options, v1::Explanation* explanation,
                          Message* method) {
  std::vector<absl::string_view> seen;
  for (const absl::string_view option : absl::StrSplit(options, ',')) {
    const size_t equals = option.find('=');
    if (equals == absl::string_view::npos || equals == 0) return Bad(option, "key=value");
    const absl::string_view key = option.substr(0, equals);
    const absl::string_view value = option.substr(equals + 1);
    for (const absl::string_view earlier : seen) {
      if (earlier == key) return absl::InvalidArgumentError(absl::StrCat(key, " is given twice"));
    }
    seen.push_back(key);
    if (key == "id") {
      explanation->set_id(std::string(value));
    } else {
      RETURN_IF_ERROR(SetKey(key, value, method));
    }
  }
  return absl::OkStatus();
}

bool IsId(absl::string_view text, int32_t* id) { return absl::SimpleAtoi(text, id); }

constexpr absl::string_view kClass = "class:";  // a classifier's target

absl::StatusOr<int32_t> ParseClass(absl::string_view flag, absl::string_view text) {
  int32_t id = 0;
  if (absl::SimpleAtoi(text, &id)) return id;
  return absl::InvalidArgumentError(
      absl::StrCat(flag, ": 'class:", text, "' is not class:NUMBER, as class:3"));
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

absl::Status ParseTarget(absl::string_view option, v1::Target* target) {
  if (absl::ConsumePrefix(&option, kClass)) {
    ASSIGN_OR_RETURN(const int32_t id, ParseClass("--target", option));
    target->set_class_id(id);
    return absl::OkStatus();
  }
  const size_t colon = option.find(':');
  int32_t position = 0;
  if (!absl::SimpleAtoi(option.substr(0, colon), &position)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--target: '", option, "' is not POS[:TOKEN], as -1 or 4:1127 or \"-1: Paris\""));
  }
  target->set_position(position);
  if (colon == absl::string_view::npos) return absl::OkStatus();
  const absl::string_view token = option.substr(colon + 1);
  if (token.empty()) return absl::InvalidArgumentError("--target: nothing follows the colon");
  if (int32_t id = 0; IsId(token, &id)) {
    target->set_token_id(id);
  } else {
    target->set_text(std::string(token));
  }
  return absl::OkStatus();
}

absl::Status ParseContrast(absl::string_view option, v1::Target* target) {
  if (absl::ConsumePrefix(&option, kClass)) {
    ASSIGN_OR_RETURN(const int32_t id, ParseClass("--contrast", option));
    target->set_contrast_class_id(id);
    return absl::OkStatus();
  }
  if (option.empty()) return absl::InvalidArgumentError("--contrast: no token");
  if (int32_t id = 0; IsId(option, &id)) {
    target->set_contrast_token_id(id);
  } else {
    target->set_contrast_text(std::string(option));
  }
  return absl::OkStatus();
}

std::string ExplainHelp() {
  std::string help = "Methods and their options (--explain METHOD:key=value,...):\n";
  for (int i = 0; i < Methods().field_count(); ++i) {
    const Descriptor& method = *Methods().field(i)->message_type();
    absl::StrAppend(&help, "  ", Methods().field(i)->name(), "\n    id=NAME\n");
    for (int k = 0; k < method.field_count(); ++k) {
      const FieldDescriptor& field = *method.field(k);
      if (!CanBeSet(field)) continue;
      std::string value = "NUMBER";
      if (field.cpp_type() == FieldDescriptor::CPPTYPE_ENUM) {
        value = absl::StrJoin(ShortNames(*field.enum_type()), "|");
      } else if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        value = "A-B";
      } else if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
        value = "TEXT";
      } else if (field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
        value = "true|false";
      }
      absl::StrAppend(&help, "    ", field.name(), "=", value, field.is_repeated() ? "[+...]" : "",
                      "\n");
    }
  }
  return help;
}

}  // namespace mambascope::cli
