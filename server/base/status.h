#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns from the enclosing function when `expression` is not OK.
#define RETURN_IF_ERROR(expression)                                               \
  do {                                                                            \
    if (absl::Status ms_status = (expression); !ms_status.ok()) return ms_status; \
  } while (false)

// ASSIGN_OR_RETURN(auto model, LoadModel(folder));
#define ASSIGN_OR_RETURN(declaration, expression) \
  MS_ASSIGN_OR_RETURN_(MS_CONCAT_(ms_status_or_, __LINE__), declaration, expression)

#define MS_CONCAT_INNER_(a, b) a##b
#define MS_CONCAT_(a, b) MS_CONCAT_INNER_(a, b)
#define MS_ASSIGN_OR_RETURN_(holder, declaration, expression) \
  auto holder = (expression);                                 \
  if (!holder.ok()) return holder.status();                   \
  declaration = *std::move(holder)
