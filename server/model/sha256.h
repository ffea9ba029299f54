#pragma once

#include <openssl/evp.h>

#include <array>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "server/base/check.h"

namespace mambascope::model {

// SHA-256 over several ranges, one after the other.
class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) {
    MS_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) == 1);
  }
  ~Sha256() { EVP_MD_CTX_free(context_); }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Add(const void* data, size_t bytes) {
    MS_CHECK(EVP_DigestUpdate(context_, data, bytes) == 1);
  }
  std::string Hexadecimal() {
    std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
    unsigned length = 0;
    MS_CHECK(EVP_DigestFinal_ex(context_, digest.data(), &length) == 1);
    return absl::BytesToHexString(
        absl::string_view(reinterpret_cast<const char*>(digest.data()), length));
  }

 private:
  EVP_MD_CTX* const context_;
};

}  // namespace mambascope::model
