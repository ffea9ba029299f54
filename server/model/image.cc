#include "server/model/image.h"

#include <png.h>
// jpeglib.h asks for these before it.
#include <cstddef>
#include <cstdio>
// clang-format off
#include <jpeglib.h>
#include <jerror.h>
// clang-format on

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/model/image_resample.h"
#include "server/model/json_reader.h"

namespace mambascope::model {
namespace {

using Json = nlohmann::json;

constexpr int64_t kChannels = 3;
constexpr int32_t kMaxImageSize = 4096;
constexpr double kEvaluationCrop = 0.875;  // Vim's eval_crop_ratio
// Room of the libraries beside what is counted: tables, a row or a stripe of them, zlib's window.
constexpr int64_t kLibraryBytes = 8 << 20;

absl::Status Fault(const auto&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("image ", parts...));
}

// ------------------------------------------------------------------ preprocessor_config.json

std::optional<int32_t> AsSize(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t size = value.get<uint64_t>();
  if (size < 1 || size > kMaxImageSize) return std::nullopt;
  return static_cast<int32_t>(size);
}

// 224, or {"height": 224, "width": 224}.
std::optional<std::array<int32_t, 2>> AsHeightAndWidth(const Json& value) {
  if (const std::optional<int32_t> side = AsSize(value)) return {{*side, *side}};
  if (!value.is_object() || value.size() != 2 || !value.contains("height") ||
      !value.contains("width")) {
    return std::nullopt;
  }
  const std::optional<int32_t> height = AsSize(value["height"]), width = AsSize(value["width"]);
  if (!height || !width) return std::nullopt;
  return {{*height, *width}};
}

void ReadSize(JsonReader& reader, ImagePreprocessing& how) {
  const Json* size = reader.Find("size");
  if (size == nullptr) return;
  if (const auto exact = AsHeightAndWidth(*size)) {
    how.shortest_edge = 0;
    how.height = (*exact)[0];
    how.width = (*exact)[1];
    return;
  }
  const bool is_edge = size->is_object() && size->size() == 1 && size->contains("shortest_edge");
  const std::optional<int32_t> edge =
      is_edge ? AsSize((*size)["shortest_edge"]) : std::optional<int32_t>();
  if (edge.has_value()) {
    how.shortest_edge = *edge;
  } else {
    reader.Fault("size",
                 absl::StrCat(Shown(*size),
                              " is neither a number, {height, width} nor {shortest_edge} in [1, ",
                              kMaxImageSize, "]"));
  }
}

// The picture must come out with image_size pixels a side, whatever went in.
void CheckResult(JsonReader& reader, const ImagePreprocessing& how) {
  const Json* size = reader.Find("size");
  if (!how.resize || size == nullptr) return;
  const int32_t least = how.shortest_edge > 0 ? how.shortest_edge : std::min(how.height, how.width);
  const bool exact = how.height == how.image_size && how.width == how.image_size;
  if (how.center_crop && least < how.image_size) {
    reader.Fault("size", absl::StrCat(Shown(*size), " is less than the model's image_size ",
                                      how.image_size));
  } else if (!how.center_crop && how.shortest_edge == 0 && !exact) {
    reader.Fault("size", absl::StrCat(Shown(*size), " is not the model's image_size ",
                                      how.image_size, ", and do_center_crop is false"));
  }
}

void ReadColours(JsonReader& reader, const char* key, double above, std::array<double, 3>& values) {
  const Json* found = reader.Find(key);
  if (found == nullptr) return;
  bool sound = found->is_array() && found->size() == kChannels;
  for (size_t c = 0; sound && c < kChannels; ++c) {
    sound = (*found)[c].is_number();
    if (sound) values[c] = (*found)[c].get<double>();
    sound = sound && values[c] > above && std::abs(values[c]) <= 1e6;
  }
  if (sound) return;
  reader.Fault(key,
               absl::StrCat(Shown(*found), " is not three numbers", above == 0 ? " above 0" : ""));
}

}  // namespace

absl::StatusOr<ImagePreprocessing> ReadImagePreprocessing(absl::string_view json_or_empty,
                                                          int32_t image_size) {
  if (image_size < 1 || image_size > kMaxImageSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("image_size ", image_size, " is not in [1, ", kMaxImageSize, "]"));
  }
  ImagePreprocessing how;
  how.image_size = image_size;
  how.shortest_edge = static_cast<int32_t>(image_size / kEvaluationCrop);
  if (json_or_empty.empty()) return how;

  ASSIGN_OR_RETURN(const Json object, ParseJsonObject(json_or_empty));
  JsonReader reader(object);
  how.resize = reader.Flag("do_resize", true);
  how.center_crop = reader.Flag("do_center_crop", true);
  ReadSize(reader, how);
  if (const Json* resample = reader.Find("resample")) {
    if (*resample == 2 || *resample == 3) {
      how.resample = *resample == 2 ? ImagePreprocessing::Resample::kBilinear
                                    : ImagePreprocessing::Resample::kBicubic;
    } else {
      reader.Fault("resample",
                   absl::StrCat(Shown(*resample), " is neither 2 (bilinear) nor 3 (bicubic)"));
    }
  }
  const Json* crop = reader.Find("crop_size");
  if (crop != nullptr && how.center_crop) {
    const auto sizes = AsHeightAndWidth(*crop);
    if (!sizes.has_value() || (*sizes)[0] != image_size || (*sizes)[1] != image_size) {
      reader.Fault("crop_size",
                   absl::StrCat(Shown(*crop), " is not the model's image_size ", image_size));
    }
  }
  CheckResult(reader, how);

  const bool rescale = reader.Flag("do_rescale", true);
  const bool normalize = reader.Flag("do_normalize", true);
  if (const Json* factor = reader.Find("rescale_factor")) {
    const double value = factor->is_number() ? factor->get<double>() : 0;
    if (value > 0 && value <= 1e6) {
      how.factor = value;
    } else {
      reader.Fault("rescale_factor", absl::StrCat(Shown(*factor), " is not a number above 0"));
    }
  }
  ReadColours(reader, "image_mean", -1e6, how.mean);
  ReadColours(reader, "image_std", 0, how.std);
  if (!rescale) how.factor = 1;
  if (!normalize) {
    how.mean = {0, 0, 0};
    how.std = {1, 1, 1};
  }
  for (const char* key :
       {"do_pad", "do_flip_channel_order", "do_thumbnail", "do_align_long_axis"}) {
    if (reader.Flag(key, false)) reader.Fault(key, "true is not supported");
  }
  for (const char* key : {"crop_pct", "rescale_offset", "size_divisor"}) {
    if (const Json* value = reader.Find(key)) {
      reader.Fault(key, absl::StrCat(Shown(*value), " is not supported"));
    }
  }
  if (absl::Status status = reader.status(); !status.ok()) return status;
  return how;
}

// ------------------------------------------------------------------ pictures

namespace {

// libpng and libjpeg leave an error by longjmp. Calls `step`; false if it was left so. Nothing with
// a destructor may live in `step` or below it: the jump would skip it. What a step changes, it
// changes through references to objects of an outer frame, which the jump does not touch; hence
// never inlined.
[[gnu::noinline]] bool Caught(std::jmp_buf& jump, absl::FunctionRef<void()> step) {
  if (setjmp(jump) != 0) return false;
  step();
  return true;
}

using RowSink = absl::FunctionRef<void(const uint8_t*)>;  // RGB; may not throw or own anything

// One encoded picture. First ReadHeader, then ReadRows, once each.
class Source {
 public:
  virtual ~Source() = default;
  virtual absl::Status ReadHeader() = 0;
  // All rows from the top, each [width, 3].
  virtual absl::Status ReadRows(RowSink sink) = 0;

  int64_t width = 0, height = 0;
  int64_t held_bytes = 0;  // of the whole picture, where the format wants it held

 protected:
  bool SizeIsSound() const {
    return width <= kMaxImageSide && height <= kMaxImageSide && width * height <= kMaxImagePixels;
  }
  absl::Status CheckSize() const {
    if (SizeIsSound()) return absl::OkStatus();
    return Fault("has ", width, " x ", height, " pixels; at most ", kMaxImageSide, " a side and ",
                 kMaxImagePixels, " in all are supported");
  }
};

class Png final : public Source {
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
  absl::Status Broken() const { return Fault("is a broken PNG: ", message_); }

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

class Jpeg final : public Source {
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
      return Fault("is a JPEG of ", components(), " colour components; supported: 1, 3, 4");
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

  absl::Status Broken() const { return Fault("is a broken JPEG: ", message_); }
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
    jpeg_.mem->max_memory_to_use = static_cast<long>(held_bytes + kLibraryBytes);
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

// With its header read and inside the limits.
absl::StatusOr<std::unique_ptr<Source>> Open(absl::string_view bytes) {
  if (bytes.empty()) return Fault("is empty");
  std::unique_ptr<Source> source;
  if (absl::StartsWith(bytes, "\x89PNG\r\n\x1a\n")) {
    source = std::make_unique<Png>(bytes);
  } else if (absl::StartsWith(bytes, "\xff\xd8\xff")) {
    source = std::make_unique<Jpeg>(bytes);
  } else {
    return Fault("is neither a PNG nor a JPEG (its first bytes are neither's)");
  }
  RETURN_IF_ERROR(source->ReadHeader());
  return source;
}

// ------------------------------------------------------------------ sizes

struct Resized {
  int64_t width, height;
};

// As torchvision's Resize: the long side is rounded down.
Resized SizeAfterResize(const Source& source, const ImagePreprocessing& how) {
  if (!how.resize) return {source.width, source.height};
  if (how.shortest_edge == 0) return {how.width, how.height};
  const auto longer = [&](int64_t along, int64_t across) {
    return static_cast<int64_t>(static_cast<double>(int64_t{how.shortest_edge} * along) /
                                static_cast<double>(across));
  };
  if (source.width <= source.height) {
    return {how.shortest_edge, longer(source.height, source.width)};
  }
  return {longer(source.width, source.height), how.shortest_edge};
}

// As torchvision's CenterCrop: halves go to the even side. Negative: the picture is smaller.
int64_t CropStart(int64_t extent, int64_t wanted) {
  if (wanted > extent) return -((wanted - extent) / 2);
  const int64_t half = (extent - wanted) / 2;
  return (extent - wanted) % 2 == 1 && half % 2 == 1 ? half + 1 : half;
}

struct Axes {
  ResampleAxis across, down;
};

absl::StatusOr<Axes> PlanAxes(const Source& source, const ImagePreprocessing& how) {
  const Resized resized = SizeAfterResize(source, how);
  if (!how.center_crop && (resized.width != how.image_size || resized.height != how.image_size)) {
    return Fault("has ", source.width, " x ", source.height, " pixels, ", resized.width, " x ",
                 resized.height, " after resizing; without a crop the model needs ", how.image_size,
                 " x ", how.image_size);
  }
  const ResampleFilter filter = how.resample == ImagePreprocessing::Resample::kBicubic
                                    ? ResampleFilter::kBicubic
                                    : ResampleFilter::kBilinear;
  return Axes{PlanResampling(source.width, resized.width, CropStart(resized.width, how.image_size),
                             how.image_size, filter),
              PlanResampling(source.height, resized.height,
                             CropStart(resized.height, how.image_size), how.image_size, filter)};
}

std::vector<float> Normalised(const std::vector<uint8_t>& rgb, const ImagePreprocessing& how) {
  std::array<std::array<float, 256>, kChannels> table;
  for (int64_t c = 0; c < kChannels; ++c) {
    for (int v = 0; v < 256; ++v) {
      table[c][v] = static_cast<float>((v * how.factor - how.mean[c]) / how.std[c]);
    }
  }
  const int64_t pixels = static_cast<int64_t>(rgb.size()) / kChannels;
  std::vector<float> planes(rgb.size());
  for (int64_t c = 0; c < kChannels; ++c) {
    for (int64_t i = 0; i < pixels; ++i) planes[c * pixels + i] = table[c][rgb[i * kChannels + c]];
  }
  return planes;
}

}  // namespace

absl::StatusOr<std::vector<float>> DecodeImage(absl::string_view bytes,
                                               const ImagePreprocessing& how) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Source> source, Open(bytes));
  ASSIGN_OR_RETURN(Axes axes, PlanAxes(*source, how));
  Resampler resampler(std::move(axes.across), std::move(axes.down));
  RETURN_IF_ERROR(source->ReadRows([&](const uint8_t* rgb) { resampler.AddRow(rgb); }));
  return Normalised(resampler.Finish(), how);
}

absl::StatusOr<int64_t> ImageDecodeBytes(absl::string_view bytes, const ImagePreprocessing& how) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Source> source, Open(bytes));
  ASSIGN_OR_RETURN(const Axes axes, PlanAxes(*source, how));
  const int64_t size = how.image_size, side = source->width + source->height;
  const int64_t weights = axes.across.bytes() + axes.down.bytes();
  const int64_t result = size * size * kChannels * static_cast<int64_t>(1 + sizeof(float));
  return source->held_bytes + source->height * size * kChannels + 64 * side + weights + result +
         kLibraryBytes;
}

}  // namespace mambascope::model
