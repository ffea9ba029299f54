#include "server/serving/model_repository.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "server/base/status.h"
#include "server/model/config_file.h"
#include "server/observe/log.h"

namespace mambascope::serving {
namespace {

namespace fs = std::filesystem;

bool IsVersion(const std::string& text) {
  int64_t number = 0;
  return absl::SimpleAtoi(text, &number) && number >= 0;
}

// Names travel in `name@version` and in labels, so they are plain.
bool IsPlainName(const std::string& name) {
  return !name.empty() && name.size() <= 128 &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return std::isalnum(c) || c == '-' || c == '_' || c == '.';
         });
}

// The folders directly below, without exceptions: a link that leads nowhere is no folder.
std::vector<fs::path> FoldersIn(const fs::path& folder, std::error_code& error) {
  std::vector<fs::path> folders;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (it->is_directory(ignored)) folders.push_back(it->path());
  }
  return folders;
}

absl::StatusOr<std::vector<ModelSource>> ListRepository(const std::string& folder) {
  std::vector<ModelSource> sources;
  std::error_code error;
  for (const fs::path& model : FoldersIn(folder, error)) {
    std::error_code inner;
    for (const fs::path& version : FoldersIn(model, inner)) {
      if (!IsVersion(version.filename())) continue;
      if (!IsPlainName(model.filename())) {
        return absl::InvalidArgumentError(
            absl::StrCat("model_repository: '", model.filename().string(),
                         "': names are letters, digits, '-', '_', '.'"));
      }
      sources.push_back({model.filename(), version.filename(), version});
    }
  }
  if (error) {
    return absl::NotFoundError(absl::StrCat("model_repository '", folder, "': ", error.message()));
  }
  if (sources.empty()) {
    return absl::NotFoundError(absl::StrCat(
        "model_repository '", folder, "': no <model>/<version>/ folders with numeric versions"));
  }
  return sources;
}

absl::Status Annotate(const ModelSource& source, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("model '", source.name, "' in '", source.folder,
                                                  "': ", status.message()));
}

bool IsAbsent(const fs::path& file) {
  std::error_code error;
  return fs::symlink_status(file, error).type() == fs::file_type::not_found;
}

absl::Status LoadTokenizer(const std::string& folder, ServedModel& served) {
  const fs::path file = fs::path(folder) / "tokenizer.json";
  if (IsAbsent(file)) {
    served.tokenizer_note = "it has no tokenizer.json";
    return absl::OkStatus();
  }
  auto read = model::Tokenizer::Load(file);
  if (absl::IsUnimplemented(read.status())) {
    served.tokenizer_note = "this server was built without the tokenizer";
    return absl::OkStatus();
  }
  if (!read.ok()) return read.status();
  const int32_t vocabulary = served.model->config().vocabulary;
  if ((*read)->vocabulary_size() > vocabulary) {
    return absl::InvalidArgumentError(absl::StrCat("tokenizer.json: ", (*read)->vocabulary_size(),
                                                   " tokens exceed the model's vocab_size ",
                                                   vocabulary));
  }
  served.tokenizer = *std::move(read);
  return absl::OkStatus();
}

absl::Status LoadPreprocessing(const std::string& folder, ServedModel& served) {
  const fs::path file = fs::path(folder) / "preprocessor_config.json";
  std::string json;
  if (!IsAbsent(file)) {
    ASSIGN_OR_RETURN(json, model::ReadConfigFile(file));
  }
  auto read = model::ReadImagePreprocessing(json, served.model->config().vision.image_size);
  if (!read.ok()) {
    return absl::Status(read.status().code(),
                        absl::StrCat("preprocessor_config.json: ", read.status().message()));
  }
  served.preprocessing = *std::move(read);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const ServedModel>> LoadOne(const ModelSource& source,
                                                           const model::Device& device,
                                                           ThreadPool* pool) {
  const absl::Time begin = absl::Now();
  auto served = std::make_shared<ServedModel>();
  served->name = source.name;
  served->version = source.version;
  auto loaded = model::MambaModel::Load(source.folder, device);
  if (!loaded.ok()) return Annotate(source, loaded.status());
  served->model = *std::move(loaded);

  const absl::Status status = served->model->config().family == model::Family::kVim
                                  ? LoadPreprocessing(source.folder, *served)
                                  : LoadTokenizer(source.folder, *served);
  if (!status.ok()) return Annotate(source, status);
  if (pool != nullptr) served->speed = explain::Speed::Measure(*pool, *served->model);
  served->load_seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  return served;
}

// Newest first: by number where both are numbers.
bool IsNewer(const std::string& a, const std::string& b) {
  int64_t left = 0, right = 0;
  if (absl::SimpleAtoi(a, &left) && absl::SimpleAtoi(b, &right)) return left > right;
  return a > b;
}

}  // namespace

absl::StatusOr<ModelSource> ParseModelSource(const std::string& text) {
  ModelSource source;
  const size_t equals = text.find('=');
  source.folder = equals == std::string::npos ? text : text.substr(equals + 1);
  const fs::path folder = fs::path(source.folder).lexically_normal();
  const fs::path leaf = folder.has_filename() ? folder : folder.parent_path();  // "a/b/" is a/b
  const bool in_version = IsVersion(leaf.filename());
  source.version = in_version ? leaf.filename().string() : "1";
  if (equals != std::string::npos) {
    source.name = text.substr(0, equals);
  } else {
    source.name = in_version ? leaf.parent_path().filename() : leaf.filename();
  }
  if (source.folder.empty() || !IsPlainName(source.name)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model '", text, "': give name=DIR; names are letters, digits, '-', '_', '.'"));
  }
  return source;
}

namespace {

absl::Status CheckGivenOnce(const std::vector<ModelSource>& sources) {
  std::set<std::pair<std::string, std::string>> seen;
  for (const ModelSource& source : sources) {
    if (seen.emplace(source.name, source.version).second) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("model '", source.name, "@", source.version, "' is given twice"));
  }
  return absl::OkStatus();
}

// What clients may read of a failure.
std::string WithoutPath(const ModelSource& source, const absl::Status& status) {
  return absl::StrReplaceAll(status.message(), {{absl::StrCat(" in '", source.folder, "'"), ""},
                                                {absl::StrCat(source.folder, "/"), ""}});
}

}  // namespace

absl::StatusOr<std::unique_ptr<const ModelRepository>> ModelRepository::Load(
    const std::vector<std::string>& sources, const std::string& repository_folder,
    const model::Device& device, ThreadPool* pool) {
  std::vector<ModelSource> all;
  for (const std::string& text : sources) {
    ASSIGN_OR_RETURN(all.emplace_back(), ParseModelSource(text));
  }
  if (!repository_folder.empty()) {
    ASSIGN_OR_RETURN(std::vector<ModelSource> listed, ListRepository(repository_folder));
    all.insert(all.end(), listed.begin(), listed.end());
  }
  if (all.empty()) {
    return absl::InvalidArgumentError("no model: give --model name=DIR or --model_repository DIR");
  }
  RETURN_IF_ERROR(CheckGivenOnce(all));
  auto repository = std::make_unique<ModelRepository>();
  absl::Status first_failure;
  for (const ModelSource& source : all) {
    auto served = LoadOne(source, device, pool);
    if (served.ok()) {
      repository->models_.push_back(*std::move(served));
      continue;
    }
    first_failure.Update(served.status());
    repository->failed_.push_back(
        {source.name, source.version, WithoutPath(source, served.status())});
  }
  if (repository->models_.empty()) return first_failure;
  for (const FailedModel& failed : repository->failed_) {
    observe::Log(observe::LogLevel::kError, "model failed to load",
                 {{"model", failed.name}, {"version", failed.version}, {"reason", failed.message}});
  }
  std::sort(repository->models_.begin(), repository->models_.end(),
            [](const auto& a, const auto& b) {
              return a->name != b->name ? a->name < b->name : IsNewer(a->version, b->version);
            });
  return repository;
}

absl::StatusOr<std::shared_ptr<const ServedModel>> ModelRepository::Find(
    absl::string_view name) const {
  const size_t at = name.find('@');
  const absl::string_view base = name.substr(0, at);
  const absl::string_view version = at == absl::string_view::npos ? "" : name.substr(at + 1);
  for (const auto& served : models_) {
    if (served->name == base && (at == absl::string_view::npos || served->version == version)) {
      return served;
    }
  }
  for (const FailedModel& failed : failed_) {
    if (failed.name == base && (at == absl::string_view::npos || failed.version == version)) {
      return absl::FailedPreconditionError(failed.message);
    }
  }
  const std::string existing =
      absl::StrJoin(models_, ", ", [](std::string* out, const auto& served) {
        absl::StrAppend(out, served->name, "@", served->version);
      });
  return absl::NotFoundError(
      absl::StrCat("model '", name.substr(0, 256), "' is not served; there is: ", existing));
}

}  // namespace mambascope::serving
