#pragma once

#include <openssl/sha.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/explain/event_sink.h"
#include "server/explain/options.h"
#include "server/explain/registry.h"
#include "server/explain/tensor_writer.h"
#include "server/model/mamba_model.h"
#include "tests/support/random_model.h"

namespace mambascope::testing {

// Explains a finished forward pass as the server does, and puts the delivered chunks together
// again, checking on the way what every explanation promises.

// A sequence's forward pass with the trace that explanations read.
class Traced {
 public:
  Traced(const model::MambaModel& model, const std::vector<int32_t>& tokens)
      : Traced(model, tokens, {}, static_cast<int64_t>(tokens.size())) {}
  // Of an image model.
  Traced(const model::MambaModel& model, std::vector<float> image)
      : Traced(model, {}, std::move(image), model.config().vision.tokens()) {}

  const model::MambaModel& model() const { return model_; }
  // With the most probable token or class as the target, until somebody sets another.
  explain::Subject SubjectAt(int64_t position) {
    explain::Subject subject;
    subject.model = &model_;
    subject.trace = &trace;
    subject.pool = &pool;
    subject.position = static_cast<int32_t>(position);
    subject.tokens = trace.tokens;
    subject.token_ids = tokens_;
    subject.image = image_;
    const std::vector<float> row = LogitsAt(position);
    explain::Output output;
    output.position = subject.position;
    output.token = static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
    if (token >= 0) output.token = token;
    output.contrast = contrast;
    subject.outputs = {output};
    subject.explained = explain::ValueOf(subject, row);
    return subject;
  }
  // Of all positions, or the one row of a model that pools the mean.
  std::vector<float> LogitsAt(int64_t position) const {
    const int64_t outputs = model_.config().outputs();
    const auto begin = logits_.begin() + (model_.config().mean_pooled() ? 0 : position * outputs);
    return {begin, begin + outputs};
  }

  ThreadPool pool;
  model::SequenceTrace trace;
  int32_t token = -1, contrast = -1;  // of SubjectAt, if not negative

 private:
  Traced(const model::MambaModel& model, std::vector<int32_t> tokens, std::vector<float> image,
         int64_t rows)
      : pool(2),
        trace(model.config(), rows, /*stream_stride=*/1),
        model_(model),
        tokens_(std::move(tokens)),
        image_(std::move(image)) {
    model::RecurrentState state(model.config());
    model::Workspace workspace;
    model::Piece piece;
    piece.tokens = tokens_;
    piece.image = image_;
    piece.state = &state;
    piece.trace = &trace;
    std::vector<int32_t> wanted(rows);
    std::iota(wanted.begin(), wanted.end(), 0);
    piece.logit_rows = wanted;
    if (model.config().mean_pooled()) piece.logit_rows = std::span(wanted).last(1);
    piece.logits = &logits_;
    const absl::Status status =
        model.Forward(pool, workspace, std::span(&piece, 1), [] { return false; });
    if (!status.ok() || piece.nonfinite_layer >= 0) throw std::runtime_error("forward pass failed");
  }

  const model::MambaModel& model_;
  std::vector<int32_t> tokens_;
  std::vector<float> image_;
  std::vector<float> logits_;
};

struct DeliveredTensor {
  v1::TensorInfo info;
  std::string bytes;
  std::vector<float> values;     // of FP32 tensors
  std::vector<int32_t> indices;  // of INT32 tensors
};

struct Explained {
  absl::Status status;
  explain::Plan plan;
  std::vector<DeliveredTensor> tensors;  // in the order of the plan
  v1::Quality quality;
  v1::ExplanationFinished finished;  // what Explaining::Describe adds

  const std::vector<float>& values() const { return tensors.at(0).values; }
};

class CollectingSink : public explain::EventSink {
 public:
  void Send(v1::PredictEvent event) override { events.push_back(std::move(event)); }
  std::vector<v1::PredictEvent> events;
};

inline std::string Sha256(const std::string& bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
  std::string text;
  for (const unsigned char byte : digest) {
    char hex[3];
    std::snprintf(hex, sizeof(hex), "%02x", byte);
    text += hex;
  }
  return text;
}

// Joins the chunks of `tensors` from `events`; a fault of their order or size is a test failure.
inline std::vector<DeliveredTensor> Join(const std::vector<v1::TensorInfo>& tensors,
                                         const std::vector<v1::PredictEvent>& events,
                                         int64_t max_chunk_bytes) {
  std::vector<DeliveredTensor> delivered;
  for (const v1::TensorInfo& info : tensors) delivered.push_back({info, {}, {}, {}});
  for (const v1::PredictEvent& event : events) {
    EXPECT_TRUE(event.has_tensor_chunk());
    const v1::TensorChunk& chunk = event.tensor_chunk();
    for (DeliveredTensor& tensor : delivered) {
      if (tensor.info.name() != chunk.tensor()) continue;
      EXPECT_EQ(chunk.byte_offset(), static_cast<int64_t>(tensor.bytes.size()));
      EXPECT_GT(chunk.data().size(), 0u);
      EXPECT_LE(static_cast<int64_t>(chunk.data().size()), max_chunk_bytes);
      tensor.bytes += chunk.data();
    }
  }
  for (DeliveredTensor& tensor : delivered) {
    EXPECT_EQ(static_cast<int64_t>(tensor.bytes.size()), tensor.info.total_bytes());
    int64_t elements = 1;
    for (const auto& axis : tensor.info.axes()) {
      elements *= axis.size();
      EXPECT_TRUE(axis.labels().empty() || axis.labels_size() == axis.size());
    }
    const int64_t element_bytes = tensor.info.dtype() == v1::DATA_TYPE_FP16 ? 2 : 4;
    EXPECT_EQ(elements * element_bytes, tensor.info.total_bytes());
    if (tensor.info.dtype() == v1::DATA_TYPE_FP32) {
      tensor.values.resize(elements);
      std::copy_n(tensor.bytes.data(), tensor.bytes.size(),
                  reinterpret_cast<char*>(tensor.values.data()));
    } else if (tensor.info.dtype() == v1::DATA_TYPE_INT32) {
      tensor.indices.resize(elements);
      std::copy_n(tensor.bytes.data(), tensor.bytes.size(),
                  reinterpret_cast<char*>(tensor.indices.data()));
    }
  }
  return delivered;
}

inline Explained ExplainSubject(const explain::Subject& subject, const v1::Explanation& explanation,
                                v1::DataType dtype = v1::DATA_TYPE_FP32,
                                int64_t max_chunk_bytes = 1024) {
  const explain::Method* method = explain::FindMethod(explain::MethodName(explanation));
  if (method == nullptr) throw std::runtime_error("no method");
  const model::ModelConfig& config = subject.model->config();
  const int64_t tokens = subject.tokens;
  explain::Violations violations;
  method->Validate(explanation, config, tokens, "explanation", violations);
  EXPECT_TRUE(violations.empty()) << violations.ToStatus();

  Explained explained;
  explained.plan = method->MakePlan(explanation, config, tokens, dtype);
  if (!explanation.has_parameters()) {  // whose tensors bear the names of what they hold
    EXPECT_EQ(explained.plan.tensors.at(0).name(), std::string(method->name()));
  }
  CollectingSink sink;
  explain::TensorWriter writer("id", explained.plan.tensors, max_chunk_bytes, &sink);
  const auto explaining = method->Start(explanation, subject);
  for (int32_t slice = 0; slice < explained.plan.slices && explained.status.ok(); ++slice) {
    explained.status = explaining->Step(writer);
  }
  if (!explained.status.ok()) return explained;
  explained.quality = explaining->quality();
  explaining->Describe(&explained.finished);
  explained.tensors = Join(explained.plan.tensors, sink.events, max_chunk_bytes);
  const auto digests = writer.Finish();
  EXPECT_EQ(digests.size(), explained.tensors.size());
  int64_t bytes = 0;
  for (size_t t = 0; t < digests.size(); ++t) {
    EXPECT_EQ(digests[t].tensor(), explained.tensors[t].info.name());
    EXPECT_EQ(digests[t].sha256(), Sha256(explained.tensors[t].bytes));
    bytes += static_cast<int64_t>(explained.tensors[t].bytes.size());
  }
  EXPECT_EQ(writer.bytes_written(), bytes);
  return explained;
}

inline Explained Explain(Traced& traced, const v1::Explanation& explanation,
                         v1::DataType dtype = v1::DATA_TYPE_FP32, int64_t max_chunk_bytes = 1024) {
  const int64_t position =
      explain::PositionOf(explanation, traced.model().config(), traced.trace.tokens);
  return ExplainSubject(traced.SubjectAt(position), explanation, dtype, max_chunk_bytes);
}

inline std::unique_ptr<const model::MambaModel> LoadModel(const std::string& folder) {
  auto model = model::MambaModel::Load(folder);
  if (!model.ok()) throw std::runtime_error(model.status().ToString());
  return *std::move(model);
}

// A random model in a folder of its own, which is gone once the model is loaded.
inline std::unique_ptr<const model::MambaModel> LoadRandomModel(const RandomModel& random) {
  const std::string folder = ::testing::TempDir() + "/explain_" +
                             ::testing::UnitTest::GetInstance()->current_test_info()->name();
  WriteRandomModel(folder, random);
  auto loaded = LoadModel(folder);
  std::filesystem::remove_all(folder);
  return loaded;
}

inline std::vector<int32_t> RandomTokens(const model::MambaModel& model, int64_t count,
                                         uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % model.config().vocabulary);
  return tokens;
}

}  // namespace mambascope::testing
