#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/thread_pool.h"
#include "server/explain/speed.h"
#include "server/model/image.h"
#include "server/model/mamba_model.h"
#include "server/model/tokenizer.h"

namespace mambascope::serving {

// One version of a model, ready to serve. Immutable; calls hold it for as long as they run.
struct ServedModel {
  std::string name;
  std::string version;
  std::unique_ptr<const model::MambaModel> model;
  std::unique_ptr<const model::Tokenizer> tokenizer;  // null: token ids only
  std::string tokenizer_note;                         // why it is null
  model::ImagePreprocessing preprocessing;            // of image models
  explain::Speed speed;                               // measured when it was loaded, or all 0
  double load_seconds = 0;
};

// "name=DIR", or DIR alone: the folder's name, or its parent's if the folder is a version number.
struct ModelSource {
  std::string name, version, folder;
};
absl::StatusOr<ModelSource> ParseModelSource(const std::string& text);

// One that could not be loaded, and why, without the paths of this machine.
struct FailedModel {
  std::string name, version, message;
};

// The models of this process. Threads: const after Load.
class ModelRepository {
 public:
  // Loads the sources and everything in `repository_folder` ("" = none), which is laid out as
  // <model>/<version>/ with a Hugging Face folder in each. One that fails is logged and listed and
  // harms no other; if all do, the first failure is returned, naming the model. They run on
  // `device`. On `pool`, if given, their speed is measured.
  static absl::StatusOr<std::unique_ptr<const ModelRepository>> Load(
      const std::vector<std::string>& sources, const std::string& repository_folder,
      const model::Device& device = {}, ThreadPool* pool = nullptr);

  // `name` (its newest version) or `name@version`; kNotFound names what exists, kFailedPrecondition
  // says why a model could not be loaded.
  absl::StatusOr<std::shared_ptr<const ServedModel>> Find(absl::string_view name) const;
  // By name, newest version first.
  const std::vector<std::shared_ptr<const ServedModel>>& models() const { return models_; }
  const std::vector<FailedModel>& failed() const { return failed_; }

 private:
  std::vector<std::shared_ptr<const ServedModel>> models_;
  std::vector<FailedModel> failed_;
};

}  // namespace mambascope::serving
