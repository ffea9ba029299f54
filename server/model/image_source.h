#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace mambascope::model {

// An encoded picture, read row by row by libpng or libjpeg. Errors are kInvalidArgument.

// What is wrong with an image.
absl::Status ImageFault(const auto&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("image ", parts...));
}

// Room of the libraries beside what is counted: tables, a row or a stripe of them, zlib's window.
inline constexpr int64_t kImageLibraryBytes = 8 << 20;

using RowSink = absl::FunctionRef<void(const uint8_t*)>;  // RGB; may not throw or own anything

// One encoded picture. First ReadHeader, then ReadRows, once each.
class ImageSource {
 public:
  virtual ~ImageSource() = default;
  virtual absl::Status ReadHeader() = 0;
  // All rows from the top, each [width, 3].
  virtual absl::Status ReadRows(RowSink sink) = 0;

  int64_t width = 0, height = 0;
  int64_t held_bytes = 0;  // of the whole picture, where the format wants it held

 protected:
  bool SizeIsSound() const;
  absl::Status CheckSize() const;
};

// A PNG or JPEG, told by its first bytes, with its header read and inside the limits of image.h.
// Borrows `bytes`.
absl::StatusOr<std::unique_ptr<ImageSource>> OpenImage(absl::string_view bytes);

}  // namespace mambascope::model
