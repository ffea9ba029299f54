#include "server/model/image_source.h"

#include <png.h>
// jpeglib.h asks for these before it.
#include <cstddef>
#include <cstdio>
// clang-format off
#include <jpeglib.h>
#include <jerror.h>
// clang-format on

#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <vector>

#include "absl/strings/match.h"
#include "server/base/status.h"
#include "server/model/image.h"

namespace mambascope::model {
namespace {

constexpr int64_t kChannels = 3;

// libpng and libjpeg leave an error by longjmp. Calls `step`; false if it was left so. Nothing with
// a destructor may live in `step` or below it: the jump would skip it. What a step changes, it
// changes through references to objects of an outer frame, which the jump does not touch; hence
// never inlined.
[[gnu::noinline]] bool Caught(std::jmp_buf& jump, absl::FunctionRef<void()> step) {
  if (setjmp(jump) != 0) return false;
  step();
  return true;
}

class Png final : public ImageSource {
 public:
  explicit Png(absl::string_view bytes) : bytes_(bytes) {}
  ~Png() override { png_destroy_read_struct(&png_, &info_, nullptr); }

  absl::Status ReadHeader() override {
    if (!Caught(jump_, [this] { OpenAndReadInfo(); })) return Broken();
    RETURN_IF_ERROR(CheckSize());
    if (interlaced_) held_bytes = width * height * kChannels;
    return absl::OkStatus();
  }

  absl::Status ReadRows(RowSink sink) override {
    std::vector<uint8_t> pixels((interlaced_ ? height : 1) * width * kChannels);
    if (!Caught(jump_, [&] { Decode(pixels.data(), sink); })) return Broken();
    return absl::OkStatus();
  }

 private:
  absl::Status Broken() const { return ImageFault("is a broken PNG: ", message_); }

  void OpenAndReadInfo() {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, &OnError, &OnWarning);
    info_ = png_ == nullptr ? nullptr : png_create_info_struct(png_);
    if (info_ == nullptr) OnErrorOf(*this, "out of memory");
    png_set_read_fn(png_, this, &OnRead);
    // Chunks that tell nothing about the pixels are passed over: texts and colour profiles inflate.
    png_set_keep_unknown_chunks(png_, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
    png_set_user_limits(png_, kMaxImageSide, kMaxImageSide);
    readable_ = bytes_.size();
    // IHDR comes first; its size is looked at before libpng looks, for the better message.
    constexpr size_t kEnd = 24;  // signature 8, length 4, "IHDR", width 4, height 4
    if (bytes_.size() >= kEnd && bytes_.substr(12, 4) == "IHDR") {
      width = NumberAt(16);
      height = NumberAt(20);
      if (!SizeIsSound()) return;
    }
    png_read_info(png_, info_);
    width = png_get_image_width(png_, info_);
    height = png_get_image_height(png_, info_);
    interlaced_ = png_get_interlace_type(png_, info_) != PNG_INTERLACE_NONE;
  }

  int64_t NumberAt(size_t at) const {
    int64_t number = 0;
    for (size_t i = 0; i < 4; ++i) number = number << 8 | static_cast<uint8_t>(bytes_[at + i]);
    return number;
  }

  // To 8 bits of RGB. No call is made for gAMA, so values stay as they are stored.
  void Decode(uint8_t* pixels, RowSink sink) {
    const size_t stored_row = png_get_rowbytes(png_, info_);
    png_set_strip_16(png_);
    png_set_palette_to_rgb(png_);
    if (png_get_color_type(png_, info_) == PNG_COLOR_TYPE_GRAY) {
      png_set_expand_gray_1_2_4_to_8(png_);
    }
    png_set_gray_to_rgb(png_);
    png_set_strip_alpha(png_);
    const int passes = png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    const size_t row = width * kChannels;
    if (png_get_rowbytes(png_, info_) != row) png_error(png_, "unknown pixel format");

    for (int pass = 0; pass < passes; ++pass) {
      for (int64_t y = 0; y < height; ++y) {
        // After the last row libpng inflates and drops whatever data follow, up to a thousand times
        // the file's size. No row needs more bytes of the file than this.
        readable_ = 2 * stored_row + kSpareBytes;
        png_read_row(png_, interlaced_ ? pixels + y * row : pixels, nullptr);
        if (!interlaced_) sink(pixels);
      }
    }
    readable_ = bytes_.size();
    png_read_end(png_, nullptr);  // a file that ends before its end is truncated
    if (interlaced_) {
      for (int64_t y = 0; y < height; ++y) sink(pixels + y * row);
    }
  }

  static void OnRead(png_structp png, png_bytep to, size_t count) {
    Png& self = *static_cast<Png*>(png_get_io_ptr(png));
    if (count > self.bytes_.size() - self.at_) png_error(png, "it is truncated");
    if (count > self.readable_) png_error(png, "it holds more data than pixels");
    std::memcpy(to, self.bytes_.data() + self.at_, count);
    self.at_ += count;
    self.readable_ -= count;
  }
  [[noreturn]] static void OnError(png_structp png, png_const_charp message) {
    OnErrorOf(*static_cast<Png*>(png_get_error_ptr(png)), message);
  }
  [[noreturn]] static void OnErrorOf(Png& self, const char* message) {
    std::snprintf(self.message_, sizeof self.message_, "%s", message);
    std::longjmp(self.jump_, 1);
  }
  static void OnWarning(png_structp, png_const_charp) {}

  static constexpr size_t kSpareBytes = 64 << 10;

  const absl::string_view bytes_;
  size_t at_ = 0;        // read so far
  size_t readable_ = 0;  // that may be read before it is too much
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  bool interlaced_ = false;
  std::jmp_buf jump_;
  char message_[160] = "";
};

class Jpeg final : public ImageSource {
 public:
  explicit Jpeg(absl::string_view bytes) : bytes_(bytes) {
    jpeg_.err = jpeg_std_error(&errors_);
    errors_.error_exit = &OnError;
    errors_.emit_message = &OnMessage;
    jpeg_.client_data = this;
    progress_.progress_monitor = &OnProgress;
  }
  ~Jpeg() override { jpeg_destroy_decompress(&jpeg_); }

  absl::Status ReadHeader() override {
    if (!Caught(jump_, [this] { OpenAndReadHeader(); })) return Broken();
    width = jpeg_.image_width;
    height = jpeg_.image_height;
    RETURN_IF_ERROR(CheckSize());
    if (components() != 1 && components() != 3 && components() != 4) {
      return ImageFault("is a JPEG of ", components(), " colour components; supported: 1, 3, 4");
    }
    if (multiple_scans_) held_bytes = kCoefficientBytes * PaddedPixels() * components();
    return absl::OkStatus();
  }

  absl::Status ReadRows(RowSink sink) override {
    std::vector<uint8_t> row(width * 4), rgb(width * kChannels);
    if (!Caught(jump_, [&] { Decode(row.data(), rgb.data(), sink); })) return Broken();
    return absl::OkStatus();
  }

 private:
  static constexpr int64_t kCoefficientBytes = sizeof(JCOEF);

  absl::Status Broken() const { return ImageFault("is a broken JPEG: ", message_); }
  int components() const { return jpeg_.num_components; }
  // Blocks are stored in whole units of up to 4 x 4 blocks of 8 x 8.
  int64_t PaddedPixels() const { return (width + 31) / 32 * 32 * ((height + 31) / 32 * 32); }

  void OpenAndReadHeader() {
    jpeg_create_decompress(&jpeg_);
    jpeg_mem_src(&jpeg_, reinterpret_cast<const uint8_t*>(bytes_.data()), bytes_.size());
    jpeg_read_header(&jpeg_, TRUE);
    multiple_scans_ = jpeg_has_multiple_scans(&jpeg_) != 0;
  }

  void Decode(uint8_t* row, uint8_t* rgb, RowSink sink) {
    const bool cmyk = components() == 4;
    jpeg_.out_color_space = cmyk ? JCS_CMYK : JCS_RGB;
    jpeg_.mem->max_memory_to_use = static_cast<long>(held_bytes + kImageLibraryBytes);
    jpeg_.progress = &progress_;
    jpeg_start_decompress(&jpeg_);
    while (jpeg_.output_scanline < jpeg_.output_height) {
      if (jpeg_read_scanlines(&jpeg_, &row, 1) != 1) OnErrorOf(*this, "it is truncated");
      if (cmyk) ToRgb(row, rgb);
      sink(cmyk ? rgb : row);
    }
    jpeg_finish_decompress(&jpeg_);
  }

  // Inverted CMYK to RGB as PIL does it: (255 - K) - C (255 - K) / 255, rounded.
  void ToRgb(const uint8_t* cmyk, uint8_t* rgb) const {
    for (int64_t x = 0; x < width; ++x, cmyk += 4, rgb += kChannels) {
      const int light = cmyk[3];
      for (int c = 0; c < kChannels; ++c) {
        const int product = (255 - cmyk[c]) * light + 128;
        rgb[c] = static_cast<uint8_t>(std::max(light - (((product >> 8) + product) >> 8), 0));
      }
    }
  }

  [[noreturn]] static void OnErrorOf(Jpeg& self, const char* message) {
    std::snprintf(self.message_, sizeof self.message_, "%s", message);
    std::longjmp(self.jump_, 1);
  }
  [[noreturn]] static void OnError(j_common_ptr jpeg) {
    char message[JMSG_LENGTH_MAX];
    jpeg->err->format_message(jpeg, message);
    OnErrorOf(*static_cast<Jpeg*>(jpeg->client_data), message);
  }
  // libjpeg goes on with grey where data are missing or wrong: a prediction of that helps nobody.
  static void OnMessage(j_common_ptr jpeg, int level) {
    const int code = jpeg->err->msg_code;
    const bool harmless =
        code == JWRN_EXTRANEOUS_DATA || code == JWRN_ADOBE_XFORM || code == JWRN_JFIF_MAJOR;
    if (level < 0 && !harmless) OnError(jpeg);
  }
  static void OnProgress(j_common_ptr jpeg) {
    Jpeg& self = *static_cast<Jpeg*>(jpeg->client_data);
    const int most = static_cast<int>(
        std::min<int64_t>(kMaxJpegScans, kMaxJpegScanPixels / (self.width * self.height)));
    if (self.jpeg_.input_scan_number <= most) return;
    std::snprintf(self.message_, sizeof self.message_, "it has more than %d scans", most);
    std::longjmp(self.jump_, 1);
  }

  const absl::string_view bytes_;
  jpeg_decompress_struct jpeg_ = {};
  jpeg_error_mgr errors_ = {};
  jpeg_progress_mgr progress_ = {};
  bool multiple_scans_ = false;
  std::jmp_buf jump_;
  char message_[JMSG_LENGTH_MAX] = "";
};

}  // namespace

bool ImageSource::SizeIsSound() const {
  return width <= kMaxImageSide && height <= kMaxImageSide && width * height <= kMaxImagePixels;
}

absl::Status ImageSource::CheckSize() const {
  if (SizeIsSound()) return absl::OkStatus();
  return ImageFault("has ", width, " x ", height, " pixels; at most ", kMaxImageSide,
                    " a side and ", kMaxImagePixels, " in all are supported");
}

absl::StatusOr<std::unique_ptr<ImageSource>> OpenImage(absl::string_view bytes) {
  if (bytes.empty()) return ImageFault("is empty");
  std::unique_ptr<ImageSource> source;
  if (absl::StartsWith(bytes, "\x89PNG\r\n\x1a\n")) {
    source = std::make_unique<Png>(bytes);
  } else if (absl::StartsWith(bytes, "\xff\xd8\xff")) {
    source = std::make_unique<Jpeg>(bytes);
  } else {
    return ImageFault("is neither a PNG nor a JPEG (its first bytes are neither's)");
  }
  RETURN_IF_ERROR(source->ReadHeader());
  return source;
}

}  // namespace mambascope::model
