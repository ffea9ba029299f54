#include "server/base/status.h"
#include "server/rpc/predict_reactor.h"
#include "server/rpc/services.h"
#include "server/rpc/unary.h"

namespace mambascope::rpc {

grpc::ServerWriteReactor<grpc::ByteBuffer>* PredictionService::Predict(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  return PredictReactor::Start(backend_, *context, *request);
}

grpc::ServerUnaryReactor* PredictionService::Tokenize(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* request,
                                                      grpc::ByteBuffer* response) {
  const auto answer = [this](const v1::TokenizeRequest& wanted, v1::TokenizeResponse* reply,
                             std::string* model_name) {
    ASSIGN_OR_RETURN(*reply, backend_.admission->Tokenize(wanted, model_name));
    return absl::OkStatus();
  };
  return ReplyOnce<v1::TokenizeRequest, v1::TokenizeResponse>(backend_, "Tokenize", context,
                                                              *request, response, answer);
}

}  // namespace mambascope::rpc
