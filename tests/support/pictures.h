#pragma once

#include <png.h>
// jpeglib.h asks for these before it.
#include <cstddef>
#include <cstdio>
// clang-format off
#include <jpeglib.h>
// clang-format on
#include <zlib.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace mambascope::testing {

// Pictures written by the libraries themselves, for tests. Errors of theirs end the program: what
// is written here is sound.

// A PNG of any kind that libpng writes.
struct PngKind {
  int width = 13, height = 9;
  int color = PNG_COLOR_TYPE_RGB, depth = 8;
  bool interlaced = false;
};

inline int PngSamples(int color) {
  const int colours = color & PNG_COLOR_MASK_COLOR && !(color & PNG_COLOR_MASK_PALETTE) ? 3 : 1;
  return colours + (color & PNG_COLOR_MASK_ALPHA ? 1 : 0);
}

// `sample(x, y, s)`: the s-th sample of a pixel, of `depth` bits. A palette's colour i is
// (i, 2 i, 255 - i), for as many as the depth has.
inline std::string EncodePng(const PngKind& kind, std::function<int(int, int, int)> sample) {
  std::string bytes;
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(png);
  png_set_write_fn(
      png, &bytes,
      [](png_structp p, png_bytep data, size_t size) {
        static_cast<std::string*>(png_get_io_ptr(p))
            ->append(reinterpret_cast<const char*>(data), size);
      },
      nullptr);
  png_set_IHDR(png, info, kind.width, kind.height, kind.depth, kind.color,
               kind.interlaced ? PNG_INTERLACE_ADAM7 : PNG_INTERLACE_NONE,
               PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  if (kind.color == PNG_COLOR_TYPE_PALETTE) {
    std::vector<png_color> palette(1 << kind.depth);
    for (size_t i = 0; i < palette.size(); ++i) {
      const auto level = static_cast<png_byte>(i);
      palette[i] = {level, static_cast<png_byte>(2 * level), static_cast<png_byte>(255 - level)};
    }
    png_set_PLTE(png, info, palette.data(), static_cast<int>(palette.size()));
    png_byte transparent[2] = {0, 128};
    png_set_tRNS(png, info, transparent, 2, nullptr);
  }
  png_write_info(png, info);
  const int samples = PngSamples(kind.color);
  std::vector<std::vector<png_byte>> rows(kind.height);
  std::vector<png_bytep> pointers;
  for (int y = 0; y < kind.height; ++y) {
    rows[y].resize((kind.width * samples * kind.depth + 7) / 8);
    for (int i = 0; i < kind.width * samples; ++i) {
      const int value = sample(i / samples, y, i % samples);
      if (kind.depth == 16) {
        rows[y][2 * i] = static_cast<png_byte>(value >> 8);
        rows[y][2 * i + 1] = static_cast<png_byte>(value);
      } else {
        const int bit = i * kind.depth;
        rows[y][bit / 8] |= static_cast<png_byte>(value << (8 - kind.depth - bit % 8));
      }
    }
    pointers.push_back(rows[y].data());
  }
  png_write_image(png, pointers.data());
  png_write_end(png, info);
  png_destroy_write_struct(&png, &info);
  return bytes;
}

struct JpegKind {
  int width = 13, height = 9, components = 3;
  bool progressive = false;
  bool scan_per_component = false;
  int quality = 90;
};

inline std::string EncodeJpeg(const JpegKind& kind, std::function<int(int, int, int)> sample) {
  jpeg_compress_struct jpeg;
  jpeg_error_mgr errors;
  jpeg.err = jpeg_std_error(&errors);
  jpeg_create_compress(&jpeg);
  unsigned char* memory = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&jpeg, &memory, &size);
  jpeg.image_width = kind.width;
  jpeg.image_height = kind.height;
  jpeg.input_components = kind.components;
  jpeg.in_color_space = kind.components == 1   ? JCS_GRAYSCALE
                        : kind.components == 3 ? JCS_RGB
                        : kind.components == 4 ? JCS_CMYK
                                               : JCS_UNKNOWN;
  jpeg_set_defaults(&jpeg);
  jpeg_set_quality(&jpeg, kind.quality, TRUE);
  if (kind.progressive) jpeg_simple_progression(&jpeg);
  std::vector<jpeg_scan_info> scans;
  if (kind.scan_per_component) {
    for (int c = 0; c < kind.components; ++c) scans.push_back({1, {c, 0, 0, 0}, 0, 63, 0, 0});
    jpeg.scan_info = scans.data();
    jpeg.num_scans = kind.components;
  }
  jpeg_start_compress(&jpeg, TRUE);
  std::vector<JSAMPLE> row(kind.width * kind.components);
  for (int y = 0; y < kind.height; ++y) {
    for (size_t i = 0; i < row.size(); ++i) {
      const int x = static_cast<int>(i);
      row[i] = static_cast<JSAMPLE>(sample(x / kind.components, y, x % kind.components));
    }
    JSAMPROW pointer = row.data();
    jpeg_write_scanlines(&jpeg, &pointer, 1);
  }
  jpeg_finish_compress(&jpeg);
  jpeg_destroy_compress(&jpeg);
  const std::string bytes(reinterpret_cast<const char*>(memory), size);
  std::free(memory);
  return bytes;
}

inline std::string BigEndian(uint32_t number) {
  return {static_cast<char>(number >> 24), static_cast<char>(number >> 16),
          static_cast<char>(number >> 8), static_cast<char>(number)};
}

// A chunk of a PNG with its length and its sum.
inline std::string PngChunk(const std::string& type, const std::string& data) {
  const std::string summed = type + data;
  const auto sum =
      crc32(0, reinterpret_cast<const Bytef*>(summed.data()), static_cast<uInt>(summed.size()));
  return BigEndian(static_cast<uint32_t>(data.size())) + summed +
         BigEndian(static_cast<uint32_t>(sum));
}

inline constexpr char kPngSignature[] = "\x89PNG\r\n\x1a\n";

// 8-bit grey.
inline std::string PngHeader(uint32_t width, uint32_t height) {
  return kPngSignature +
         PngChunk("IHDR", BigEndian(width) + BigEndian(height) + std::string("\x08\0\0\0\0", 5));
}

// A zlib stream of `megabytes` of zeros, made from one compressed megabyte again and again. It
// lacks its end.
inline std::string ZerosDeflated(int megabytes) {
  const std::string zeros(1 << 20, '\0');
  z_stream stream = {};
  deflateInit(&stream, 9);
  std::string head(1 << 16, '\0'), block(1 << 16, '\0');
  const auto deflated = [&](std::string& out) {
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(zeros.data()));
    stream.avail_in = static_cast<uInt>(zeros.size());
    stream.next_out = reinterpret_cast<Bytef*>(out.data());
    stream.avail_out = static_cast<uInt>(out.size());
    deflate(&stream, Z_FULL_FLUSH);
    out.resize(out.size() - stream.avail_out);
  };
  deflated(head);   // with the stream's own header
  deflated(block);  // depends on nothing before it
  deflateEnd(&stream);
  for (int i = 1; i < megabytes; ++i) head += block;
  return head;
}

}  // namespace mambascope::testing
