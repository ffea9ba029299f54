#include "server/model/image.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "tests/support/pictures.h"
#include "tests/support/safetensors_io.h"

namespace mambascope::model {
namespace {

using testing::EncodeJpeg;
using testing::EncodePng;
using ::testing::HasSubstr;
using testing::JpegKind;
using testing::PngKind;
using ::testing::StartsWith;

const std::string kGolden = MAMBASCOPE_SOURCE_DIR "/tests/golden/image/";

// 8-bit values as they are: no scaling, no normalisation.
ImagePreprocessing Plain(int32_t image_size) {
  ImagePreprocessing how;
  how.image_size = image_size;
  how.factor = 1;
  how.mean = {0, 0, 0};
  how.std = {1, 1, 1};
  return how;
}
ImagePreprocessing Untouched(int32_t image_size) {
  ImagePreprocessing how = Plain(image_size);
  how.resize = false;
  return how;
}

// The same pixels as [size, size, 3] bytes.
std::vector<uint8_t> Interleaved(const std::vector<float>& planes) {
  const size_t pixels = planes.size() / 3;
  std::vector<uint8_t> rgb(planes.size());
  for (size_t i = 0; i < planes.size(); ++i) {
    const float value = planes[i];
    EXPECT_TRUE(value >= 0 && value <= 255 && value == std::floor(value)) << value;
    rgb[i % pixels * 3 + i / pixels] = static_cast<uint8_t>(value);
  }
  return rgb;
}

std::vector<uint8_t> Pixels(const std::string& bytes, const ImagePreprocessing& how) {
  const auto planes = DecodeImage(bytes, how);
  EXPECT_TRUE(planes.ok()) << planes.status();
  if (!planes.ok()) return {};
  EXPECT_EQ(planes->size(), size_t(3) * how.image_size * how.image_size);
  return Interleaved(*planes);
}

std::string FaultOf(const std::string& bytes, const ImagePreprocessing& how = Untouched(8)) {
  const auto begin = std::chrono::steady_clock::now();
  const auto image = DecodeImage(bytes, how);
  // Milliseconds in truth; the machine may be busy and sanitizers slow.
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  if (image.ok()) return "accepted";
  EXPECT_EQ(image.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(image.status().message());
}

int Pattern(int x, int y, int s) { return (x * 37 + y * 59 + s * 101 + x * y * s) % 256; }

// ------------------------------------------------------------------ against PIL

TEST(Image, PixelsArePils) {
  const testing::StoredTensors expected =
      testing::ReadSafetensors(kGolden + "expected.safetensors");
  ASSERT_EQ(expected.size(), 26u);
  for (const auto& [name, tensor] : expected) {
    SCOPED_TRACE(name);
    const size_t slash = name.find('/');
    const std::string file = name.substr(0, slash), made = name.substr(slash + 1);
    ImagePreprocessing how = Plain(static_cast<int32_t>(tensor.shape[0]));
    how.shortest_edge = made == "smaller" ? 18 : made == "smaller-bilinear" ? 19 : 57;
    if (made == "smaller-bilinear") how.resample = ImagePreprocessing::Resample::kBilinear;
    if (made == "untouched") how.resize = false;
    if (made == "exact" || made == "across-only") {
      how.shortest_edge = 0;
      how.height = made == "exact" ? 20 : 43;
      how.width = made == "exact" ? 20 : 30;
    }
    EXPECT_EQ(Pixels(testing::ReadBytes(kGolden + file), how), tensor.bytes);
  }
}

TEST(Image, ChannelsAreScaledAndNormalisedIntoPlanes) {
  const std::string png = EncodePng({.width = 3, .height = 3}, Pattern);
  ImagePreprocessing how;
  how.image_size = 3;
  how.resize = false;
  const auto planes = DecodeImage(png, how);
  ASSERT_TRUE(planes.ok()) << planes.status();
  ASSERT_EQ(planes->size(), 27u);
  for (int c = 0; c < 3; ++c) {
    for (int i = 0; i < 9; ++i) {
      const double expected = (Pattern(i % 3, i / 3, c) / 255.0 - how.mean[c]) / how.std[c];
      EXPECT_FLOAT_EQ((*planes)[c * 9 + i], static_cast<float>(expected));
    }
  }
}

TEST(Image, WhatLiesOutsideASmallPictureIsBlack) {
  const std::string png = EncodePng({.width = 1, .height = 2}, [](int, int, int) { return 200; });
  const std::vector<uint8_t> pixels = Pixels(png, Untouched(4));
  for (int i = 0; i < 16; ++i) {
    const bool inside = i % 4 == 1 && (i / 4 == 1 || i / 4 == 2);
    EXPECT_EQ(pixels[3 * i], inside ? 200 : 0) << i;
  }
}

// ------------------------------------------------------------------ kinds of pictures

// What the 8-bit RGB of a sample is.
uint8_t Shown(const PngKind& kind, int x, int y, int channel) {
  const auto sample = [&](int s) { return Pattern(x, y, s) % (1 << std::min(kind.depth, 8)); };
  if (kind.color == PNG_COLOR_TYPE_PALETTE) {
    const int i = sample(0);
    return static_cast<uint8_t>(channel == 0 ? i : channel == 1 ? 2 * i : 255 - i);
  }
  const bool grey = !(kind.color & PNG_COLOR_MASK_COLOR);
  const int value = sample(grey ? 0 : channel);
  return static_cast<uint8_t>(kind.depth < 8 ? value * 255 / ((1 << kind.depth) - 1) : value);
}

TEST(Image, EveryKindOfPngIsRead) {
  int kinds = 0;
  for (const int color : {PNG_COLOR_TYPE_GRAY, PNG_COLOR_TYPE_GRAY_ALPHA, PNG_COLOR_TYPE_PALETTE,
                          PNG_COLOR_TYPE_RGB, PNG_COLOR_TYPE_RGB_ALPHA}) {
    for (const int depth : {1, 2, 4, 8, 16}) {
      const bool palette = color == PNG_COLOR_TYPE_PALETTE;
      if (depth < 8 && color != PNG_COLOR_TYPE_GRAY && !palette) continue;
      if (depth == 16 && palette) continue;
      for (const bool interlaced : {false, true}) {
        const PngKind kind = {9, 9, color, depth, interlaced};
        SCOPED_TRACE(::testing::Message() << color << " " << depth << " " << interlaced);
        const std::string png = EncodePng(kind, [&](int x, int y, int s) {
          const int value = Pattern(x, y, s) % (1 << std::min(depth, 8));
          return depth == 16 ? value << 8 | (255 - value) : value;
        });
        const std::vector<uint8_t> pixels = Pixels(png, Untouched(9));
        ASSERT_EQ(pixels.size(), 243u);
        for (int i = 0; i < 243; ++i) {
          ASSERT_EQ(pixels[i], Shown(kind, i / 3 % 9, i / 27, i % 3)) << i;
        }
        ++kinds;
      }
    }
  }
  EXPECT_EQ(kinds, 30);
}

TEST(Image, FlatJpegsOfEveryKindKeepTheirColour) {
  // A colour that YCbCr holds exactly; CMYK's are stored inverted: 255 - C = 51, K = 0.
  const auto flat = [](int, int, int s) { return s == 3 ? 255 : 51; };
  for (const int components : {1, 3, 4}) {
    for (const bool progressive : {false, true}) {
      SCOPED_TRACE(::testing::Message() << components << " " << progressive);
      const std::string jpeg =
          EncodeJpeg({20, 20, components, progressive, false, /*quality=*/100}, flat);
      EXPECT_EQ(Pixels(jpeg, Untouched(16)), std::vector<uint8_t>(768, 51));
    }
  }
  const std::string two = EncodeJpeg({8, 8, 2}, flat);
  EXPECT_EQ(FaultOf(two), "image is a JPEG of 2 colour components; supported: 1, 3, 4");
}

TEST(Image, OtherBytesAreNoImage) {
  EXPECT_EQ(FaultOf(""), "image is empty");
  for (const std::string bytes : {"GIF89a......", "BM", "\x89PNG", "\xff\xd8", "RIFF....WEBP"}) {
    EXPECT_EQ(FaultOf(bytes), "image is neither a PNG nor a JPEG (its first bytes are neither's)");
  }
  EXPECT_THAT(FaultOf("\xff\xd8\xff\xe0"), StartsWith("image is a broken JPEG: "));
  EXPECT_THAT(FaultOf(std::string(testing::kPngSignature)), StartsWith("image is a broken PNG: "));
}

// ------------------------------------------------------------------ broken and hostile bytes

TEST(Image, ATruncatedPictureIsRefusedAtEveryLength) {
  for (const bool special : {false, true}) {
    const std::string pictures[] = {
        EncodePng({.interlaced = special}, Pattern),
        EncodeJpeg({.progressive = special}, Pattern),
    };
    for (const std::string& whole : pictures) {
      EXPECT_EQ(FaultOf(whole), "accepted");
      EXPECT_EQ(FaultOf(whole + "and more"), "accepted") << "what follows the end is not looked at";
      for (size_t length = 0; length < whole.size(); ++length) {
        ASSERT_NE(FaultOf(whole.substr(0, length)), "accepted") << length;
      }
    }
  }
}

TEST(Image, SizesAreRefusedByTheHeaderAlone) {
  EXPECT_EQ(FaultOf(testing::PngHeader(50000, 50000)),
            "image has 50000 x 50000 pixels; at most 16384 a side and 33554432 in all are "
            "supported");
  EXPECT_THAT(FaultOf(testing::PngHeader(0xffffffff, 0xffffffff)), HasSubstr("has 4294967295 x"));
  EXPECT_THAT(FaultOf(testing::PngHeader(16384, 2049)), HasSubstr("has 16384 x 2049 pixels"));
  EXPECT_THAT(FaultOf(testing::PngHeader(16384, 2048)), StartsWith("image is a broken PNG: "));
  EXPECT_THAT(FaultOf(testing::PngHeader(0, 7)), StartsWith("image is a broken PNG: "));

  std::string jpeg = EncodeJpeg({.width = 16, .height = 16}, Pattern);
  const size_t frame = jpeg.find("\xff\xc0");
  ASSERT_NE(frame, std::string::npos);
  jpeg.replace(frame + 5, 4, "\xc3\x50\xc3\x50");  // 50,000
  EXPECT_THAT(FaultOf(jpeg), HasSubstr("image has 50000 x 50000 pixels"));
}

TEST(Image, DataThatInflateWithoutEndAreRefused) {
  // 8 x 8 pixels need 72 bytes; two gigabytes follow them in the same stream.
  const std::string bomb = testing::PngHeader(8, 8) +
                           testing::PngChunk("IDAT", testing::ZerosDeflated(2000)) +
                           testing::PngChunk("IEND", "");
  EXPECT_LT(bomb.size(), size_t{4} << 20);
  EXPECT_EQ(FaultOf(bomb), "image is a broken PNG: it holds more data than pixels");
  // A text chunk that would inflate as far is passed over.
  const std::string small = EncodePng({.width = 8, .height = 8}, Pattern);
  const std::string text =
      testing::PngChunk("zTXt", std::string("t\0\0", 3) + testing::ZerosDeflated(2000));
  EXPECT_EQ(FaultOf(small.substr(0, 33) + text + small.substr(33)), "accepted");
}

TEST(Image, AFewBytesMayStandForManyPixels) {
  const int side = 5000;
  const std::string png =
      EncodePng({side, side, PNG_COLOR_TYPE_GRAY, 1}, [](int, int, int) { return 1; });
  EXPECT_LT(png.size(), size_t{20000});
  ImagePreprocessing how = Plain(16);
  how.shortest_edge = 18;
  EXPECT_EQ(Pixels(png, how), std::vector<uint8_t>(768, 255));
  const auto bytes = ImageDecodeBytes(png, how);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_LT(*bytes, int64_t{16} << 20) << "no row stays longer than it is needed";
}

TEST(Image, ALongThinPictureCostsNoMoreThanItsPixels) {
  ImagePreprocessing how = Plain(16);
  how.shortest_edge = 4096;  // 4096 x 67 million pixels, of which 16 x 16 are wanted
  const std::string png =
      EncodePng({16384, 1, PNG_COLOR_TYPE_GRAY, 8}, [](int, int, int) { return 7; });
  EXPECT_EQ(Pixels(png, how), std::vector<uint8_t>(768, 7));
}

TEST(Image, TheScansOfAJpegAreCounted) {
  const std::string jpeg = EncodeJpeg({.scan_per_component = true}, Pattern);
  const size_t scan = jpeg.rfind("\xff\xda"), end = jpeg.size() - 2;
  const auto with_scans = [&](int scans) {
    std::string bytes = jpeg.substr(0, end);
    for (int i = 3; i < scans; ++i) bytes += jpeg.substr(scan, end - scan);
    return bytes + "\xff\xd9";
  };
  EXPECT_EQ(FaultOf(with_scans(100)), "accepted");
  EXPECT_EQ(FaultOf(with_scans(1000)), "image is a broken JPEG: it has more than 100 scans");
}

TEST(Image, NoBytesCrashIt) {
  std::vector<std::string> sound;
  for (const auto& entry : std::filesystem::directory_iterator(kGolden)) {
    const std::string type = entry.path().extension();
    if (type == ".png" || type == ".jpg") sound.push_back(testing::ReadBytes(entry.path()));
  }
  std::ranges::sort(sound);  // a folder has no order
  sound.push_back(EncodePng({.interlaced = true}, Pattern));
  sound.push_back(EncodePng({13, 9, PNG_COLOR_TYPE_PALETTE, 2}, Pattern));
  ImagePreprocessing how = Plain(16);
  how.shortest_edge = 18;
  int accepted = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 random(seed);
    std::string bytes = sound[seed % sound.size()];
    for (uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
      const size_t at = random() % std::min<size_t>(bytes.size(), random() % 2 ? 700 : 1 << 20);
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes[at] ^= static_cast<char>(1 << random() % 8);
          break;
        case 2:
          bytes.resize(at + 1);
          break;
        case 3:  // a piece twice
          bytes.insert(at, bytes.substr(at / 2, random() % 64));
          break;
      }
    }
    const auto image = DecodeImage(bytes, how);
    if (!image.ok()) {
      EXPECT_EQ(image.status().code(), absl::StatusCode::kInvalidArgument);
      continue;
    }
    ++accepted;
    EXPECT_EQ(image->size(), 768u);
    EXPECT_TRUE(ImageDecodeBytes(bytes, how).ok());
  }
  EXPECT_GT(accepted, 0);  // a change of a colour
  EXPECT_LT(accepted, 2000);
}

// ------------------------------------------------------------------ preprocessor_config.json

TEST(ImagePreprocessing, WithoutAFileIsThePublishedEvaluation) {
  for (const std::string text : {"", "{}", "{\"size\":null,\"image_processor_type\":\"X\"}"}) {
    const auto how = ReadImagePreprocessing(text, 224);
    ASSERT_TRUE(how.ok()) << how.status();
    EXPECT_TRUE(how->resize);
    EXPECT_EQ(how->shortest_edge, 256);
    EXPECT_EQ(how->resample, ImagePreprocessing::Resample::kBicubic);
    EXPECT_TRUE(how->center_crop);
    EXPECT_EQ(how->factor, 1.0 / 255);
    EXPECT_EQ(how->mean[0], 0.485);
    EXPECT_EQ(how->std[2], 0.225);
  }
}

TEST(ImagePreprocessing, IsWhatTheFileSays) {
  const auto how = ReadImagePreprocessing(
      R"({"do_resize": true, "size": {"height": 32, "width": 32}, "resample": 2,
          "do_center_crop": false, "do_rescale": true, "rescale_factor": 0.5,
          "do_normalize": true, "image_mean": [0.5, 0, -1], "image_std": [1, 2, 3]})",
      32);
  ASSERT_TRUE(how.ok()) << how.status();
  EXPECT_EQ(how->shortest_edge, 0);
  EXPECT_EQ(how->height, 32);
  EXPECT_EQ(how->width, 32);
  EXPECT_EQ(how->resample, ImagePreprocessing::Resample::kBilinear);
  EXPECT_FALSE(how->center_crop);
  EXPECT_EQ(how->factor, 0.5);
  EXPECT_EQ(how->mean, (std::array<double, 3>{0.5, 0, -1}));
  EXPECT_EQ(how->std, (std::array<double, 3>{1, 2, 3}));

  const auto off = ReadImagePreprocessing(
      R"({"size": {"shortest_edge": 40}, "crop_size": 32, "do_rescale": false,
          "do_normalize": false, "do_pad": false})",
      32);
  ASSERT_TRUE(off.ok()) << off.status();
  EXPECT_EQ(off->shortest_edge, 40);
  EXPECT_EQ(off->factor, 1);
  EXPECT_EQ(off->mean, (std::array<double, 3>{0, 0, 0}));
  EXPECT_EQ(off->std, (std::array<double, 3>{1, 1, 1}));

  EXPECT_EQ(ReadImagePreprocessing(R"({"size": 48})", 32)->height, 48);
}

TEST(ImagePreprocessing, EveryFaultNamesItsKey) {
  const struct {
    std::string json, fault;
  } cases[] = {
      {"[", "not a JSON object"},
      {"7", "not a JSON object"},
      {R"({"do_resize": 1})", "do_resize: 1 is not true or false"},
      {R"({"size": {"longest_edge": 40}})",
       R"(size: {"longest_edge":40} is neither a number, {height, width} nor {shortest_edge} in [1, 4096])"},
      {R"({"size": 0})",
       "size: 0 is neither a number, {height, width} nor {shortest_edge} in [1, 4096]"},
      {R"({"size": {"shortest_edge": 31}})",
       R"(size: {"shortest_edge":31} is less than the model's image_size 32)"},
      {R"({"size": 48, "do_center_crop": false})",
       "size: 48 is not the model's image_size 32, and do_center_crop is false"},
      {R"({"crop_size": {"height": 32, "width": 31}})",
       R"(crop_size: {"height":32,"width":31} is not the model's image_size 32)"},
      {R"({"resample": 1})", "resample: 1 is neither 2 (bilinear) nor 3 (bicubic)"},
      {R"({"rescale_factor": 0})", "rescale_factor: 0 is not a number above 0"},
      {R"({"image_mean": [1, 2]})", "image_mean: [1,2] is not three numbers"},
      {R"({"image_std": [1, 2, 0]})", "image_std: [1,2,0] is not three numbers above 0"},
      {R"({"do_pad": true})", "do_pad: true is not supported"},
      {R"({"crop_pct": 0.9, "resample": 0})",
       "resample: 0 is neither 2 (bilinear) nor 3 (bicubic); crop_pct: 0.9 is not supported"},
  };
  for (const auto& [json, fault] : cases) {
    SCOPED_TRACE(json);
    const auto how = ReadImagePreprocessing(json, 32);
    EXPECT_EQ(how.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(how.status().message(), fault);
  }
  EXPECT_FALSE(ReadImagePreprocessing("", 0).ok());
  EXPECT_EQ(ReadImagePreprocessing(std::string(100000, '['), 32).status().message(),
            "nested more than 32 levels deep");
}

TEST(Image, WithoutACropTheSizeMustComeOut) {
  ImagePreprocessing how = Plain(8);
  how.shortest_edge = 8;
  how.center_crop = false;
  EXPECT_EQ(FaultOf(EncodePng({.width = 16, .height = 16}, Pattern), how), "accepted");
  EXPECT_EQ(FaultOf(EncodePng({.width = 16, .height = 24}, Pattern), how),
            "image has 16 x 24 pixels, 8 x 12 after resizing; without a crop the model needs 8 x "
            "8");
}

}  // namespace
}  // namespace mambascope::model
