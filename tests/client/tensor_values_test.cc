#include "client/cli/tensor_values.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace mambascope::cli {
namespace {

Tensor Make(v1::DataType dtype, const std::vector<int64_t>& axes, const std::string& bytes) {
  Tensor tensor;
  tensor.info.set_dtype(dtype);
  for (const int64_t size : axes) tensor.info.add_axes()->set_size(size);
  tensor.bytes = bytes;
  return tensor;
}

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

TEST(FloatFromHalf, IsExactForEveryKindOfNumber) {
  EXPECT_EQ(FloatFromHalf(0x3c00), 1.0f);
  EXPECT_EQ(FloatFromHalf(0xc000), -2.0f);
  EXPECT_EQ(FloatFromHalf(0x7bff), 65504.0f);
  EXPECT_EQ(FloatFromHalf(0x0400), 0x1p-14f);  // the smallest normal
  EXPECT_EQ(FloatFromHalf(0x03ff), 0x1p-14f - 0x1p-24f);
  EXPECT_EQ(FloatFromHalf(0x8001), -0x1p-24f);
  EXPECT_EQ(FloatFromHalf(0x7c00), std::numeric_limits<float>::infinity());
  EXPECT_EQ(FloatFromHalf(0xfc00), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(FloatFromHalf(0x7e01)));
  EXPECT_TRUE(std::signbit(FloatFromHalf(0x8000)));
}

TEST(Floats, PutsBytesBackOnTheGridOfTheirSlab) {
  // Two slabs of [1, 2].
  const std::string bytes = Bytes<float>({0.5f, 2}) + std::string("\x00\x04", 2) +
                            Bytes<float>({-1, 0}) + std::string("\xff\x01", 2);
  EXPECT_EQ(*Floats(Make(v1::DATA_TYPE_UINT8, {2, 1, 2}, bytes)),
            (std::vector<float>{-1, 1, -255, -1}));
  EXPECT_EQ(*Floats(Make(v1::DATA_TYPE_UINT8, {2}, bytes.substr(0, 10))),
            (std::vector<float>{-1, 1}));
  EXPECT_TRUE(Floats(Make(v1::DATA_TYPE_UINT8, {3, 0}, ""))->empty());
}

Tensor Sparse(const std::vector<int64_t>& axes, const std::string& bytes,
              v1::DataType dtype = v1::DATA_TYPE_FP32) {
  Tensor tensor = Make(dtype, axes, bytes);
  tensor.info.set_encoding(v1::ENCODING_SPARSE_ROWS);
  return tensor;
}

TEST(Floats, WhatSparseRowsLeaveOutIsZero) {
  const std::string bytes = Bytes<uint32_t>({2, 0, 3}) + Bytes<float>({1.5f, -2}) +
                            Bytes<uint32_t>({0}) + Bytes<uint32_t>({1, 1}) + Bytes<float>({7});
  EXPECT_EQ(*Floats(Sparse({3, 4}, bytes)),
            (std::vector<float>{1.5f, 0, 0, -2, 0, 0, 0, 0, 0, 7, 0, 0}));
  const std::string halves = Bytes<uint32_t>({1, 1}) + Bytes<uint16_t>({0xc000});
  EXPECT_EQ(*Floats(Sparse({2}, halves, v1::DATA_TYPE_FP16)), (std::vector<float>{0, -2}));
}

TEST(Floats, SparseRowsOutOfOrderOrCutShortAreFound) {
  const std::string values = Bytes<float>({1, 2});
  for (const auto& columns : {std::vector<uint32_t>{2, 1, 0}, {2, 1, 1}, {2, 0, 4}}) {
    EXPECT_EQ(Floats(Sparse({4}, Bytes(columns) + values)).status().code(),
              absl::StatusCode::kDataLoss);
  }
  EXPECT_FALSE(Floats(Sparse({4}, Bytes<uint32_t>({2, 0, 1}) + values.substr(0, 7))).ok());
  EXPECT_FALSE(Floats(Sparse({2, 4}, Bytes<uint32_t>({0}))).ok());
}

TEST(Floats, AFewSparseBytesCannotClaimAllMemory) {
  EXPECT_EQ(Floats(Sparse({int64_t{1} << 40}, Bytes<uint32_t>({0}))).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(Integers, AreThoseOfInt32Only) {
  EXPECT_EQ(Integers(Make(v1::DATA_TYPE_INT32, {2}, Bytes<int32_t>({-1, 9}))),
            (std::vector<int32_t>{-1, 9}));
  EXPECT_FALSE(Floats(Make(v1::DATA_TYPE_INT32, {1}, Bytes<int32_t>({9}))).ok());
  EXPECT_TRUE(Integers(Make(v1::DATA_TYPE_FP32, {1}, Bytes<float>({1}))).empty());
}

}  // namespace
}  // namespace mambascope::cli
