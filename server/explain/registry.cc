#include "server/explain/registry.h"

#include <memory>

namespace mambascope::explain {

#define METHOD(name, factory) std::unique_ptr<const Method> factory();
#include "server/explain/methods.inc"

const std::vector<const Method*>& AllMethods() {
  // A visible table, because linkers drop self-registering objects from static libraries.
  static const std::vector<const Method*>* const methods = new std::vector<const Method*>{
#define METHOD(name, factory) factory().release(),
#include "server/explain/methods.inc"
  };
  return *methods;
}

const Method* FindMethod(absl::string_view name) {
  for (const Method* method : AllMethods()) {
    if (method->name() == name) return method;
  }
  return nullptr;
}

absl::string_view MethodName(const v1::Explanation& explanation) {
  if (explanation.method_case() == v1::Explanation::METHOD_NOT_SET) return "";
  const std::string& name =
      v1::Explanation::descriptor()->FindFieldByNumber(explanation.method_case())->name();
  return absl::string_view(name.data(), name.size());
}

}  // namespace mambascope::explain
