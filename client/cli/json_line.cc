#include "client/cli/json_line.h"

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/util/json_util.h"
#include "google/rpc/status.pb.h"
#include "mambascope/v1/prediction.pb.h"

namespace mambascope::cli {
namespace {

// Protobuf cannot print an Any whose type is not linked in, and then prints nothing at all.
void DropUnknownDetails(google::rpc::Status* status) {
  const auto* pool = google::protobuf::DescriptorPool::generated_pool();
  for (int i = status->details_size() - 1; i >= 0; --i) {
    const std::string& url = status->details(i).type_url();
    if (pool->FindMessageTypeByName(url.substr(url.rfind('/') + 1)) == nullptr) {
      status->mutable_details()->DeleteSubrange(i, 1);
    }
  }
}

google::protobuf::util::Status ToJson(const google::protobuf::Message& message, std::string* line) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  line->clear();
  return google::protobuf::util::MessageToJsonString(message, line, options);
}

}  // namespace

absl::Status WriteJsonLine(const google::protobuf::Message& message, std::ostream& out) {
  std::string line;
  auto status = ToJson(message, &line);
  if (!status.ok()) {
    const std::unique_ptr<google::protobuf::Message> copy(message.New());
    copy->CopyFrom(message);
    if (auto* event = dynamic_cast<v1::PredictEvent*>(copy.get()); event != nullptr) {
      if (event->has_finished()) DropUnknownDetails(event->mutable_finished()->mutable_status());
      if (event->has_explanation_finished()) {
        DropUnknownDetails(event->mutable_explanation_finished()->mutable_status());
      }
    }
    status = ToJson(*copy, &line);
  }
  if (!status.ok()) {
    return absl::InternalError(
        absl::StrCat("no JSON for an event: ", std::string(status.message())));
  }
  out << line << "\n" << std::flush;
  return out ? absl::OkStatus() : absl::UnavailableError("the output could not be written");
}

}  // namespace mambascope::cli
