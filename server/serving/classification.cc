#include "server/serving/classification.h"

#include "server/explain/tensor_writer.h"
#include "server/model/sampling.h"

namespace mambascope::serving {

v1::Classification Classify(std::span<const float> logits, const model::ModelConfig& config,
                            int32_t top) {
  constexpr int32_t kDefaultTop = 5;
  v1::Classification classification;
  for (const model::RankedToken& ranked : model::TopTokens(logits, top == 0 ? kDefaultTop : top)) {
    v1::ClassProbability* probability = classification.add_top();
    probability->set_class_id(ranked.id);
    if (!config.class_labels.empty()) probability->set_label(config.class_labels[ranked.id]);
    probability->set_logit(logits[ranked.id]);
    probability->set_log_probability(ranked.log_probability);
  }
  return classification;
}

v1::TensorInfo LogitsInfo(const model::ModelConfig& config) {
  const bool tokens = config.task == model::Task::kNextToken;
  return explain::MakeTensorInfo(
      "logits", {{tokens ? "vocabulary" : "classes", config.outputs(), {}}}, v1::DATA_TYPE_FP32);
}

}  // namespace mambascope::serving
