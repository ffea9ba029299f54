#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace mambascope::explain {

// Collects everything that is wrong with a request, so that its sender learns all of it at once.
class Violations {
 public:
  // `field` is the path in the request, "explanations[1].hidden_attention.top_k"; `description` the
  // value and the limit.
  void Add(std::string field, std::string description) {
    list_.emplace_back(std::move(field), std::move(description));
  }
  bool empty() const { return list_.empty(); }
  const std::vector<std::pair<std::string, std::string>>& list() const { return list_; }

  // OK when empty; else kInvalidArgument whose message lists all (bounded) and whose payload is a
  // google.rpc.BadRequest under its type URL.
  absl::Status ToStatus() const;

 private:
  std::vector<std::pair<std::string, std::string>> list_;
};

}  // namespace mambascope::explain
