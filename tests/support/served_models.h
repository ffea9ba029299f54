#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/serving/model_repository.h"

namespace mambascope::serving {

// "tiny": golden mamba1-tiny, token ids only. "atlas": the demo model with its tokenizer. "heads":
// golden mamba2-tiny. "class": a text classifier, "mean": one that pools the mean, "vim": of
// images.
inline const ModelRepository& TestModels() {
  static const ModelRepository* const models = [] {
    const std::string root = MAMBASCOPE_SOURCE_DIR;
    const std::string golden = root + "/tests/golden/";
    auto loaded = ModelRepository::Load(
        {"tiny=" + golden + "mamba1-tiny", "atlas=" + root + "/deploy/models/atlas-mamba/1",
         "heads=" + golden + "mamba2-tiny", "class=" + golden + "mamba2-classifier-tiny",
         "mean=" + golden + "mamba1-classifier-tiny", "vim=" + golden + "vim-tiny"},
        "");
    if (!loaded.ok()) ADD_FAILURE() << loaded.status();
    return loaded.ok() ? loaded->release() : nullptr;
  }();
  return *models;
}

inline std::shared_ptr<const ServedModel> TestModel(const std::string& name) {
  return *TestModels().Find(name);
}

}  // namespace mambascope::serving
