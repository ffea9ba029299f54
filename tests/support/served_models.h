#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/serving/model_repository.h"

namespace mambascope::serving {

// "tiny": golden mamba1-tiny, token ids only. "atlas": the demo model with its tokenizer.
inline const ModelRepository& TestModels() {
  static const ModelRepository* const models = [] {
    const std::string root = MAMBASCOPE_SOURCE_DIR;
    auto loaded = ModelRepository::Load({"tiny=" + root + "/tests/golden/mamba1-tiny",
                                         "atlas=" + root + "/deploy/models/atlas-mamba/1"},
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
