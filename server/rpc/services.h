#pragma once

#include <grpcpp/grpcpp.h>

#include <string>

#include "mambascope/v1/model.grpc.pb.h"
#include "mambascope/v1/prediction.grpc.pb.h"
#include "server/base/clock.h"
#include "server/observe/metrics.h"
#include "server/rpc/open_streams.h"
#include "server/serving/admission.h"
#include "server/serving/completion.h"
#include "server/serving/executor.h"
#include "server/serving/model_repository.h"

namespace mambascope::rpc {

// What the services hand their calls to. Borrowed; outlives them.
struct Backend {
  const serving::ModelRepository* repository = nullptr;
  const serving::Admission* admission = nullptr;
  serving::Executor* executor = nullptr;
  const serving::Completion* completion = nullptr;
  observe::Metrics* metrics = nullptr;
  const Clock* clock = nullptr;
  OpenStreams* open_streams = nullptr;  // filled in by RpcServer
};

// Both take raw bytes (see wire.h) and are thread-safe.
class PredictionService final
    : public v1::PredictionService::WithRawCallbackMethod_Predict<
          v1::PredictionService::WithRawCallbackMethod_Tokenize<v1::PredictionService::Service>> {
 public:
  explicit PredictionService(const Backend& backend) : backend_(backend) {}
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Predict(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;

 private:
  const Backend backend_;
};

class ModelService final
    : public v1::ModelService::WithRawCallbackMethod_ListModels<
          v1::ModelService::WithRawCallbackMethod_GetModel<v1::ModelService::Service>> {
 public:
  explicit ModelService(const Backend& backend) : backend_(backend) {}
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;

 private:
  const Backend backend_;
};

}  // namespace mambascope::rpc
