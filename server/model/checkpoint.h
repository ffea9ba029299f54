#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/model/safetensors.h"

namespace mambascope::model {

// The weights of a checkpoint's folder as Hugging Face lays them out: one model.safetensors, or
// model.safetensors.index.json, whose "weight_map" says in which file ("shard") each tensor lies.
// Where a folder holds both, model.safetensors is read and the index is not looked at. Files are
// memory-mapped; views live as long as the Checkpoint. Threads: const after Open.
//
// An index is believed in nothing: a shard must be named as a file of the folder itself (no '/', no
// "..", no control character) and end in ".safetensors", and index and shards must agree on every
// tensor in both directions. Limits: 1,000 shards, 16 MiB of index, 8 levels of nesting.
class Checkpoint {
 public:
  // kNotFound: the folder holds neither file, or a shard is missing. kInvalidArgument: any other
  // fault. The message names the file, and the tensor and the limit where there is one.
  static absl::StatusOr<std::unique_ptr<const Checkpoint>> Open(const std::string& folder);

  const TensorView* Find(absl::string_view name) const;  // null if there is none
  const std::map<std::string, TensorView, std::less<>>& tensors() const { return tensors_; }
  // In the order of their names: the digest goes over their bytes.
  std::span<const std::unique_ptr<const SafetensorsFile>> files() const { return files_; }
  const std::string& path() const { return path_; }  // the file, or the index: what errors name

 private:
  Checkpoint() = default;

  std::string path_;
  std::vector<std::unique_ptr<const SafetensorsFile>> files_;
  std::map<std::string, TensorView, std::less<>> tensors_;  // of all files
};

}  // namespace mambascope::model
