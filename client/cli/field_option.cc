#include "client/cli/field_option.h"

#include <cstdint>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
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

const FieldDescriptor* Find(const Descriptor& type, absl::string_view key) {
  return type.FindFieldByName(std::string(key));
}

bool IsRange(const Descriptor& type) {
  const auto is_number = [](const FieldDescriptor* field) {
    return field != nullptr && !field->is_repeated() &&
           (field->cpp_type() == FieldDescriptor::CPPTYPE_INT32 ||
            field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32);
  };
  return type.field_count() == 2 && is_number(type.FindFieldByName("begin")) &&
         is_number(type.FindFieldByName("end"));
}

bool IsList(const Descriptor& type) {
  return type.field_count() == 1 && type.field(0)->is_repeated() &&
         type.field(0)->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE;
}

bool CanBeSet(const FieldDescriptor& field) {
  if (field.is_map()) return false;
  if (field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) return true;
  return IsRange(*field.message_type()) || (IsList(*field.message_type()) && !field.is_repeated());
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

absl::Status PutInteger(int64_t value, const FieldDescriptor& field, Message* message);

absl::Status AddRange(absl::string_view text, const FieldDescriptor& field, Message* message) {
  std::pair<int64_t, int64_t> interval;
  RETURN_IF_ERROR(ParseInterval(text, &interval));
  if (interval.first < 0 || interval.second >= std::numeric_limits<int32_t>::max()) {
    return Bad(text, "a range of numbers from 0 on");
  }
  const Reflection& reflection = *message->GetReflection();
  Message* range = field.is_repeated() ? reflection.AddMessage(message, &field)
                                       : reflection.MutableMessage(message, &field);
  const Descriptor& type = *field.message_type();
  RETURN_IF_ERROR(PutInteger(interval.first, *Find(type, "begin"), range));
  return PutInteger(interval.second + 1, *Find(type, "end"), range);
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
  std::pair<int64_t, int64_t> interval;
  RETURN_IF_ERROR(ParseInterval(text, &interval));
  if (!field.is_repeated() && interval.first != interval.second) return Bad(text, "one integer");
  const int64_t present =
      field.is_repeated() ? message->GetReflection()->FieldSize(*message, &field) : 0;
  // Unsigned: the length of a range of int64 may not fit in one.
  const uint64_t more =
      static_cast<uint64_t>(interval.second) - static_cast<uint64_t>(interval.first);
  if (more >= static_cast<uint64_t>(kMostEntries - present)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' makes a list of more than ", kMostEntries, " entries"));
  }
  for (int64_t value = interval.first;; ++value) {
    RETURN_IF_ERROR(PutInteger(value, field, message));
    if (value == interval.second) return absl::OkStatus();
  }
}

absl::Status PutEnum(absl::string_view text, const FieldDescriptor& field, Message* message) {
  const Reflection& reflection = *message->GetReflection();
  const EnumDescriptor& type = *field.enum_type();
  for (int i = 0; i < type.value_count(); ++i) {
    if (const std::string name = ShortName(*type.value(i));
        name == absl::AsciiStrToLower(text) && name != "unspecified") {
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

// Of a list joined by + every entry, else the value as it is.
absl::Status PutEntries(absl::string_view value, const FieldDescriptor& field, Message* message) {
  const std::vector<absl::string_view> entries =
      field.is_repeated() ? absl::StrSplit(value, '+') : std::vector<absl::string_view>{value};
  for (const absl::string_view entry : entries) {
    RETURN_IF_ERROR(PutValue(entry, field, message));
  }
  return absl::OkStatus();
}

absl::Status CheckAlone(const FieldDescriptor& field, const Message& message) {
  const OneofDescriptor* oneof = field.real_containing_oneof();
  if (oneof == nullptr) return absl::OkStatus();
  const FieldDescriptor* set = message.GetReflection()->GetOneofFieldDescriptor(message, oneof);
  if (set == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("does not go with ", set->name()));
}

}  // namespace

absl::Status ParseInterval(absl::string_view text, std::pair<int64_t, int64_t>* interval) {
  const size_t dash = text.find('-', 1);
  const bool read = dash == absl::string_view::npos
                        ? absl::SimpleAtoi(text, &interval->first)
                        : absl::SimpleAtoi(text.substr(0, dash), &interval->first) &&
                              absl::SimpleAtoi(text.substr(dash + 1), &interval->second);
  if (!read) return Bad(text, "an integer or a range a-b");
  if (dash == absl::string_view::npos) interval->second = interval->first;
  if (interval->second < interval->first) {
    return absl::InvalidArgumentError(absl::StrCat("the range '", text, "' ends before it begins"));
  }
  return absl::OkStatus();
}

absl::Status SetField(absl::string_view key, absl::string_view value, Message* message) {
  const FieldDescriptor& field = *Find(*message->GetDescriptor(), key);
  absl::Status status = CheckAlone(field, *message);
  if (status.ok() && field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE &&
      IsList(*field.message_type())) {
    status = PutEntries(value, *field.message_type()->field(0),
                        message->GetReflection()->MutableMessage(message, &field));
  } else if (status.ok()) {
    status = PutEntries(value, field, message);
  }
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat(key, ": ", status.message()));
}

bool HasOption(const Descriptor& type, absl::string_view key) {
  const FieldDescriptor* field = Find(type, key);
  return field != nullptr && CanBeSet(*field);
}

std::vector<std::string> OptionKeys(const Descriptor& type) {
  std::vector<std::string> keys;
  for (int i = 0; i < type.field_count(); ++i) {
    if (CanBeSet(*type.field(i))) keys.push_back(type.field(i)->name());
  }
  return keys;
}

std::string OptionValues(const Descriptor& type, const std::string& key) {
  const FieldDescriptor& field = *Find(type, key);
  std::string value = "NUMBER";
  bool repeated = field.is_repeated();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_ENUM:
      value = absl::StrJoin(ShortNames(*field.enum_type()), "|");
      break;
    case FieldDescriptor::CPPTYPE_MESSAGE:
      repeated = repeated || IsList(*field.message_type());
      if (IsRange(*field.message_type())) value = "A-B";
      break;
    case FieldDescriptor::CPPTYPE_STRING:
      value = "TEXT";
      break;
    case FieldDescriptor::CPPTYPE_BOOL:
      value = "true|false";
      break;
    default:
      break;
  }
  return repeated ? absl::StrCat(value, "[+...]") : value;
}

}  // namespace mambascope::cli
