#include "server/model/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/model/config_file.h"

namespace mambascope::model {
namespace {

using Json = nlohmann::json;

constexpr absl::string_view kWeights = "model.safetensors";
constexpr absl::string_view kIndex = "model.safetensors.index.json";
constexpr size_t kMaxIndexBytes = 16 << 20;
constexpr size_t kMaxShards = 1000;
constexpr int kMaxDepth = 8;

std::string Quoted(absl::string_view name) {
  constexpr size_t kLongest = 200;
  return absl::StrCat("'", absl::Utf8SafeCHexEscape(name.substr(0, kLongest)),
                      name.size() > kLongest ? "..." : "", "'");
}

using WeightMap = std::map<std::string, std::string, std::less<>>;  // tensor -> shard

// A name that can only mean a file of the folder itself.
bool IsPlainFileName(absl::string_view name) {
  return absl::EndsWith(name, ".safetensors") && !absl::StrContains(name, '/') &&
         !absl::StrContains(name, "..") &&
         std::ranges::none_of(name, [](unsigned char c) { return absl::ascii_iscntrl(c); });
}

// Faults without the index's name: the caller adds it.
absl::StatusOr<WeightMap> ParseIndex(const std::string& text) {
  bool too_deep = false;
  std::string section, duplicate;
  std::set<std::string> names;
  const Json::parser_callback_t watch = [&](int depth, Json::parse_event_t event, Json& value) {
    too_deep |= depth > kMaxDepth;
    if (event == Json::parse_event_t::key && depth == 1) section = value.get<std::string>();
    if (event == Json::parse_event_t::key && depth == 2 && section == "weight_map" &&
        !names.insert(value.get<std::string>()).second) {
      duplicate = value.get<std::string>();  // the parsed object would keep the last in silence
    }
    return !too_deep;
  };
  const Json index = Json::parse(text, watch, /*allow_exceptions=*/false);
  if (too_deep) {
    return absl::InvalidArgumentError(
        absl::StrCat("is nested more than ", kMaxDepth, " levels deep"));
  }
  if (!index.is_object()) return absl::InvalidArgumentError("is not a JSON object");
  const auto weight_map = index.find("weight_map");
  if (weight_map == index.end() || !weight_map->is_object()) {
    return absl::InvalidArgumentError("has no object \"weight_map\"");
  }
  if (!duplicate.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("names tensor ", Quoted(duplicate), " twice"));
  }
  WeightMap map;
  for (const auto& [tensor, shard] : weight_map->items()) {
    if (!shard.is_string() || !IsPlainFileName(shard.get_ref<const std::string&>())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "places tensor ", Quoted(tensor), " in ",
          Quoted(shard.is_string() ? shard.get<std::string>() : shard.dump(-1, ' ', true)),
          ", which is not the name of a .safetensors file in its own folder"));
    }
    map.emplace(tensor, shard.get<std::string>());
  }
  return map;
}

std::vector<std::string> ShardsOf(const WeightMap& map) {
  std::vector<std::string> shards;
  for (const auto& [tensor, shard] : map) shards.push_back(shard);
  std::sort(shards.begin(), shards.end());
  shards.erase(std::unique(shards.begin(), shards.end()), shards.end());
  return shards;
}

absl::Status NeitherFile(const std::string& folder) {
  std::string message =
      absl::StrCat(folder, "/", kWeights, ": there is no such file, nor a ", kIndex, " beside it");
  std::error_code error;
  if (std::filesystem::exists(folder + "/pytorch_model.bin", error)) {
    absl::StrAppend(&message,
                    "; pytorch_model.bin is a pickle, which is never loaded: convert the folder "
                    "with python -m mambascope.convert");
  }
  return absl::NotFoundError(message);
}

}  // namespace

absl::StatusOr<std::unique_ptr<const Checkpoint>> Checkpoint::Open(const std::string& folder) {
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint);
  checkpoint->path_ = absl::StrCat(folder, "/", kWeights);
  absl::StatusOr<std::unique_ptr<const SafetensorsFile>> whole =
      SafetensorsFile::Open(checkpoint->path_);
  if (whole.ok()) {
    checkpoint->tensors_ = (*whole)->tensors();
    checkpoint->files_.push_back(*std::move(whole));
    return checkpoint;
  }
  if (!absl::IsNotFound(whole.status())) return whole.status();

  const std::string& path = checkpoint->path_ = absl::StrCat(folder, "/", kIndex);
  const absl::StatusOr<std::string> text = ReadConfigFile(path, kMaxIndexBytes);
  if (absl::IsNotFound(text.status())) return NeitherFile(folder);
  if (!text.ok()) return text.status();
  const auto fault = [&](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", parts...));
  };
  const absl::StatusOr<WeightMap> map = ParseIndex(*text);
  if (!map.ok()) return fault(map.status().message());
  const std::vector<std::string> shards = ShardsOf(*map);
  if (shards.size() > kMaxShards) {
    return fault("names ", shards.size(), " files; at most ", kMaxShards, " are supported");
  }

  std::map<absl::string_view, absl::string_view> found;  // tensor -> shard
  for (const std::string& shard : shards) {
    auto file = SafetensorsFile::Open(absl::StrCat(folder, "/", shard));
    if (absl::IsNotFound(file.status())) {
      return absl::NotFoundError(
          absl::StrCat(file.status().message(), " (", path, " places tensors in it)"));
    }
    if (!file.ok()) return file.status();
    for (const auto& [name, view] : (*file)->tensors()) {
      const auto placed = map->find(name);
      if (placed == map->end()) {
        return fault("does not name tensor ", Quoted(name), " of ", Quoted(shard));
      }
      const auto [position, first] = found.emplace(placed->first, shard);
      if (!first) {
        return fault("tensor ", Quoted(name), " lies in two files, ", Quoted(position->second),
                     " and ", Quoted(shard));
      }
      checkpoint->tensors_.emplace(name, view);
    }
    checkpoint->files_.push_back(*std::move(file));
  }
  for (const auto& [name, shard] : *map) {
    const auto actual = found.find(name);
    if (actual == found.end() || actual->second != shard) {
      return fault("places tensor ", Quoted(name), " in ", Quoted(shard),
                   ", which does not hold it");
    }
  }
  return checkpoint;
}

const TensorView* Checkpoint::Find(absl::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

}  // namespace mambascope::model
