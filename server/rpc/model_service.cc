#include "server/base/status.h"
#include "server/rpc/services.h"
#include "server/rpc/unary.h"
#include "server/serving/model_info.h"

namespace mambascope::rpc {

grpc::ServerUnaryReactor* ModelService::ListModels(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request,
                                                   grpc::ByteBuffer* response) {
  const auto answer = [this](const v1::ListModelsRequest&, v1::ListModelsResponse* reply,
                             std::string*) {
    for (const auto& served : backend_.repository->models()) {
      *reply->add_models() =
          serving::DescribeModel(*served, backend_.admission->limits().max_input_tokens);
    }
    for (const serving::FailedModel& failed : backend_.repository->failed()) {
      *reply->add_models() = serving::DescribeFailed(failed);
    }
    return absl::OkStatus();
  };
  return ReplyOnce<v1::ListModelsRequest, v1::ListModelsResponse>(backend_, "ListModels", context,
                                                                  *request, response, answer);
}

grpc::ServerUnaryReactor* ModelService::GetModel(grpc::CallbackServerContext* context,
                                                 const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  const auto answer = [this](const v1::GetModelRequest& wanted, v1::GetModelResponse* reply,
                             std::string* model_name) {
    ASSIGN_OR_RETURN(const auto served, backend_.repository->Find(wanted.model()));
    *model_name = served->name;
    ASSIGN_OR_RETURN(
        *reply, serving::DescribeModelWithMethods(*served, wanted.length(),
                                                  backend_.admission->limits().max_input_tokens));
    return absl::OkStatus();
  };
  return ReplyOnce<v1::GetModelRequest, v1::GetModelResponse>(backend_, "GetModel", context,
                                                              *request, response, answer);
}

}  // namespace mambascope::rpc
