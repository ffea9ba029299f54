#include "server/serving/model_info.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/explain/registry.h"
#include "server/explain/violations.h"

namespace mambascope::serving {
namespace {

// An explanation that asks for the method with its default options.
v1::Explanation DefaultOptions(const explain::Method& method) {
  v1::Explanation options;
  const std::string name(method.name());
  const auto* field = v1::Explanation::descriptor()->FindFieldByName(name);
  v1::Explanation::GetReflection()->MutableMessage(&options, field);
  return options;
}

v1::Task ToProto(model::Task task) {
  switch (task) {
    case model::Task::kNextToken:
      return v1::TASK_NEXT_TOKEN;
    case model::Task::kTextClass:
      return v1::TASK_TEXT_CLASS;
    case model::Task::kImageClass:
      return v1::TASK_IMAGE_CLASS;
  }
  return v1::TASK_UNSPECIFIED;
}

void DescribeVision(const model::VisionConfig& vision, v1::Vision* out) {
  out->set_image_size(vision.image_size);
  out->set_patch_size(vision.patch_size);
  out->set_stride(vision.stride);
  out->set_tokens(vision.tokens());
  out->set_class_position(vision.class_position());
}

}  // namespace

v1::Model DescribeModel(const ServedModel& served, int32_t max_input_tokens) {
  const model::ModelConfig& config = served.model->config();
  const model::Weights& weights = served.model->weights();
  v1::Model out;
  out.set_name(served.name);
  out.set_version(served.version);
  out.set_state(v1::MODEL_STATE_READY);
  out.set_family(std::string(model::Name(config.family)));
  out.set_digest(weights.digest());
  out.set_max_input_tokens(max_input_tokens);
  out.set_has_tokenizer(served.tokenizer != nullptr);
  out.set_task(ToProto(config.task));
  for (const std::string& label : config.class_labels) out.add_class_labels(label);
  if (config.family == model::Family::kVim) DescribeVision(config.vision, out.mutable_vision());
  v1::ModelSizes* sizes = out.mutable_sizes();
  sizes->set_parameters(weights.parameters());
  sizes->set_layers(config.layers);
  sizes->set_d_model(config.d_model);
  sizes->set_d_inner(config.d_inner);
  sizes->set_d_state(config.d_state);
  sizes->set_d_conv(config.d_conv);
  sizes->set_dt_rank(config.dt_rank);
  sizes->set_vocabulary(config.vocabulary);
  sizes->set_classes(config.classes);
  if (config.family == model::Family::kMamba2) {
    sizes->set_heads(config.heads);
    sizes->set_head_dim(config.head_dim);
    sizes->set_groups(config.groups);
  }
  sizes->set_weight_dtype(weights.stored_dtype());
  sizes->set_weight_bytes(weights.stored_bytes());
  return out;
}

v1::Model DescribeFailed(const FailedModel& failed) {
  v1::Model out;
  out.set_name(failed.name);
  out.set_version(failed.version);
  out.set_state(v1::MODEL_STATE_FAILED);
  out.set_state_message(failed.message);
  return out;
}

absl::StatusOr<v1::GetModelResponse> DescribeModelWithMethods(const ServedModel& served,
                                                              int32_t length,
                                                              int32_t max_input_tokens) {
  if (length < 0 || length > max_input_tokens) {
    explain::Violations violations;
    violations.Add("length", absl::StrCat(length, " is outside 1 to ", max_input_tokens));
    return violations.ToStatus();
  }
  const model::ModelConfig& config = served.model->config();
  const bool image = config.family == model::Family::kVim;
  const int64_t tokens = image ? config.vision.tokens() : length == 0 ? 128 : length;
  v1::GetModelResponse response;
  *response.mutable_model() = DescribeModel(served, max_input_tokens);
  for (const explain::Method* method : explain::AllMethods()) {
    if (!method->Supports(config)) continue;
    const explain::Plan plan =
        method->MakePlan(DefaultOptions(*method), config, tokens, v1::DATA_TYPE_FP32);
    v1::MethodInfo* info = response.add_methods();
    info->set_name(std::string(method->name()));
    for (const v1::TensorInfo& tensor : plan.tensors) {
      info->set_result_bytes(info->result_bytes() + tensor.total_bytes());
    }
    const int32_t stride = plan.streams ? model::SequenceTrace::StreamStride(config, tokens) : 0;
    info->set_memory_bytes(plan.memory_bytes + model::SequenceTrace::Bytes(config, tokens, stride));
    info->set_seconds(served.speed.Seconds(plan.work));
  }
  return response;
}

}  // namespace mambascope::serving
