#include "client/cli/tensors.h"

#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "client/cli/answer.h"
#include "client/cli/tensor_values.h"

namespace mambascope::cli {
namespace {

using Infos = TensorSet::Infos;
using Digests = TensorSet::Digests;

// 1, 2, 3, 4 as float32, and its SHA-256 (by another program).
const std::string kBytes("\x00\x00\x80\x3f\x00\x00\x00\x40\x00\x00\x40\x40\x00\x00\x80\x40", 16);
constexpr char kSha256[] = "ad73b9acd6e4a74b2f5bb5386658ce3bb146cd040a1867646ab3b973fb6632b1";

v1::TensorInfo Info(const std::string& name, int64_t rows, int64_t columns, int64_t bytes,
                    v1::DataType dtype = v1::DATA_TYPE_FP32) {
  v1::TensorInfo info;
  info.set_name(name);
  info.add_axes()->set_size(rows);
  info.add_axes()->set_size(columns);
  info.set_dtype(dtype);
  info.set_total_bytes(bytes);
  return info;
}

v1::TensorChunk Chunk(const std::string& tensor, int64_t offset, const std::string& data) {
  v1::TensorChunk chunk;
  chunk.set_tensor(tensor);
  chunk.set_byte_offset(offset);
  chunk.set_data(data);
  return chunk;
}

Infos Only(const v1::TensorInfo& info) {
  Infos infos;
  *infos.Add() = info;
  return infos;
}

Digests DigestOf(const std::string& tensor, const std::string& sha256) {
  Digests digests;
  auto* digest = digests.Add();
  digest->set_tensor(tensor);
  digest->set_sha256(sha256);
  return digests;
}

// A set that awaits the 2 x 2 tensor "map".
TensorSet AwaitingMap(bool keep = true) {
  TensorSet set;
  EXPECT_TRUE(set.Announce(Only(Info("map", 2, 2, 16)), keep).ok());
  return set;
}

TEST(TensorSet, PiecesInOrderMakeTheAnnouncedTensor) {
  TensorSet set = AwaitingMap();
  EXPECT_TRUE(set.Append(Chunk("map", 0, kBytes.substr(0, 5))).ok());
  EXPECT_TRUE(set.Append(Chunk("map", 5, "")).ok());
  EXPECT_TRUE(set.Append(Chunk("map", 5, kBytes.substr(5))).ok());
  EXPECT_TRUE(set.CheckComplete().ok());
  EXPECT_TRUE(set.CheckDigests(DigestOf("map", kSha256)).ok());
  EXPECT_EQ(*Floats(set.tensors()[0]), (std::vector<float>{1, 2, 3, 4}));
}

TEST(TensorSet, ChecksWithoutKeepingToo) {
  TensorSet set = AwaitingMap(/*keep=*/false);
  EXPECT_TRUE(set.Append(Chunk("map", 0, kBytes)).ok());
  EXPECT_TRUE(set.CheckComplete().ok());
  EXPECT_TRUE(set.CheckDigests(DigestOf("map", kSha256)).ok());
  EXPECT_TRUE(set.tensors()[0].bytes.empty());
}

TEST(TensorSet, OneChangedBitIsFound) {
  TensorSet set = AwaitingMap();
  std::string bytes = kBytes;
  bytes[9] ^= 1;
  EXPECT_TRUE(set.Append(Chunk("map", 0, bytes)).ok());
  EXPECT_EQ(set.CheckDigests(DigestOf("map", kSha256)).code(), absl::StatusCode::kDataLoss);
}

TEST(TensorSet, ATensorWithoutItsDigestIsNotBelieved) {
  TensorSet set = AwaitingMap();
  EXPECT_TRUE(set.Append(Chunk("map", 0, kBytes)).ok());
  EXPECT_EQ(set.CheckDigests(DigestOf("other", kSha256)).code(), absl::StatusCode::kDataLoss);
}

TEST(TensorSet, GapsOverlapsAndWhatIsTooMuchAreFound) {
  TensorSet set = AwaitingMap();
  EXPECT_TRUE(set.Append(Chunk("map", 0, kBytes.substr(0, 8))).ok());
  EXPECT_EQ(set.Append(Chunk("map", 12, "1234")).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(set.Append(Chunk("map", 4, "1234")).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(set.Append(Chunk("map", 8, "123456789")).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(set.Append(Chunk("mop", 0, "1234")).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(set.CheckComplete().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(set.Append(Chunk("map", 8, kBytes.substr(8))).ok());
  EXPECT_TRUE(set.CheckComplete().ok());
}

TEST(TensorSet, AShapeThatContradictsItsSizeIsRefused) {
  constexpr int64_t kHuge = int64_t{1} << 40;
  for (const v1::TensorInfo& info :
       {Info("map", 2, 2, 12), Info("map", -2, -2, 16), Info("map", kHuge, kHuge, 0)}) {
    EXPECT_EQ(TensorSet().Announce(Only(info), true).code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_FALSE(TensorSet().Announce(Only(Info("map", 2, 2, 16, v1::DataType(99))), true).ok());
}

TEST(TensorSet, ATensorThatIsAnnouncedHugeTakesNoMemoryBeforeItComes) {
  TensorSet set;
  constexpr int64_t kRows = int64_t{1} << 45;
  EXPECT_TRUE(set.Announce(Only(Info("map", kRows, 2, kRows * 8)), true).ok());
  EXPECT_TRUE(set.Append(Chunk("map", 0, kBytes)).ok());
  EXPECT_FALSE(set.CheckComplete().ok());
}

TEST(TensorSet, TwoTensorsOfOneNameAreRefused) {
  Infos infos = Only(Info("map", 2, 2, 16));
  *infos.Add() = infos[0];
  EXPECT_EQ(TensorSet().Announce(infos, true).code(), absl::StatusCode::kDataLoss);
}

// A 2 x 3 tensor "rows" of SPARSE_ROWS: column 2 of the first row is -1, the second row is empty.
v1::TensorInfo SparseInfo(int64_t bytes) {
  v1::TensorInfo info = Info("rows", 2, 3, bytes);
  info.set_encoding(v1::ENCODING_SPARSE_ROWS);
  return info;
}
const std::string kRows("\x01\0\0\0\x02\0\0\0\0\0\x80\xbf\0\0\0\0", 16);

TEST(TensorSet, SparseRowsMayTakeFewerBytesThanAnnounced) {
  TensorSet set;
  ASSERT_TRUE(set.Announce(Only(SparseInfo(56)), true).ok());
  for (size_t at = 0; at < kRows.size(); ++at) {
    EXPECT_FALSE(set.CheckComplete().ok());
    EXPECT_TRUE(set.Append(Chunk("rows", static_cast<int64_t>(at), kRows.substr(at, 1))).ok());
  }
  EXPECT_TRUE(set.CheckComplete().ok());
  EXPECT_EQ(*Floats(set.tensors()[0]), (std::vector<float>{0, 0, -1, 0, 0, 0}));
  EXPECT_EQ(set.Append(Chunk("rows", 16, "x")).code(), absl::StatusCode::kDataLoss);
}

TEST(TensorSet, SparseRowsThatDoNotFitTheirColumnsAreRefused) {
  TensorSet set;
  ASSERT_TRUE(set.Announce(Only(SparseInfo(56)), false).ok());
  EXPECT_EQ(set.Append(Chunk("rows", 0, std::string("\x04\0\0\0", 4))).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_FALSE(TensorSet().Announce(Only(SparseInfo(57)), true).ok());
  EXPECT_FALSE(TensorSet().Announce(Only(SparseInfo(-1)), true).ok());
  v1::TensorInfo bytes = SparseInfo(10);
  bytes.set_dtype(v1::DATA_TYPE_UINT8);
  EXPECT_FALSE(TensorSet().Announce(Only(bytes), true).ok());
}

TEST(TensorSet, SlabsOfBytesHaveTheirGridsInFront) {
  const auto announces = [](const std::vector<int64_t>& axes, int64_t bytes) {
    v1::TensorInfo info;
    for (const int64_t size : axes) info.add_axes()->set_size(size);
    info.set_dtype(v1::DATA_TYPE_UINT8);
    info.set_total_bytes(bytes);
    return TensorSet().Announce(Only(info), true).ok();
  };
  EXPECT_TRUE(announces({5}, 13));
  EXPECT_TRUE(announces({2, 3}, 14));
  EXPECT_TRUE(announces({4, 2, 3}, 56));
  EXPECT_TRUE(announces({7, 4, 2, 3}, 7 * 56));
  EXPECT_TRUE(announces({4, 2, 0}, 0));
  EXPECT_TRUE(announces({0}, 0));
  EXPECT_FALSE(announces({4, 2, 3}, 24));
  constexpr int64_t kHuge = int64_t{1} << 40;
  EXPECT_FALSE(announces({kHuge, kHuge}, 0));
}

// The events of an answer with one explanation, "map".
struct Events {
  v1::PredictEvent started, token, begun, chunk, ended, finished;

  Events() {
    started.mutable_started()->set_model("m");
    token.mutable_token()->set_token_id(5);
    auto* explanation = begun.mutable_explanation_started();
    explanation->set_explanation_id("map");
    *explanation->add_tensors() = Info("map", 2, 2, 16);
    *chunk.mutable_tensor_chunk() = Chunk("map", 0, kBytes);
    chunk.mutable_tensor_chunk()->set_explanation_id("map");
    ended.mutable_explanation_finished()->set_explanation_id("map");
    *ended.mutable_explanation_finished()->mutable_digests() = DigestOf("map", kSha256);
    finished.mutable_finished();
  }
};

TEST(Answer, AddsUpWhatItsEventsSay) {
  const Events events;
  Answer answer(/*keep_tensors=*/true);
  for (const auto* event : {&events.started, &events.token, &events.begun, &events.chunk,
                            &events.ended, &events.finished}) {
    EXPECT_TRUE(answer.Add(*event).ok());
  }
  ASSERT_EQ(answer.explanations().size(), 1);
  EXPECT_TRUE(answer.explanations()[0].succeeded());
  EXPECT_TRUE(answer.is_finished());
  EXPECT_EQ(answer.generated().size(), 1);
}

TEST(Answer, EventsOutOfOrderAreRefused) {
  const Events events;
  const auto refuses = [](std::initializer_list<const v1::PredictEvent*> before,
                          const v1::PredictEvent& last) {
    Answer answer(/*keep_tensors=*/true);
    for (const auto* event : before) EXPECT_TRUE(answer.Add(*event).ok());
    return answer.Add(last).code() == absl::StatusCode::kDataLoss;
  };
  EXPECT_TRUE(refuses({}, events.token));
  EXPECT_TRUE(refuses({&events.started}, events.started));
  EXPECT_TRUE(refuses({&events.started}, events.chunk));
  EXPECT_TRUE(refuses({&events.started}, events.ended));
  EXPECT_TRUE(refuses({&events.started, &events.begun}, events.begun));
  EXPECT_TRUE(refuses({&events.started, &events.begun}, events.ended));     // bytes are missing
  EXPECT_TRUE(refuses({&events.started, &events.begun}, events.finished));  // it never ended
  EXPECT_TRUE(
      refuses({&events.started, &events.begun, &events.chunk, &events.ended}, events.chunk));
  EXPECT_TRUE(
      refuses({&events.started, &events.begun, &events.chunk, &events.ended}, events.ended));
  EXPECT_TRUE(refuses({&events.started, &events.finished}, events.token));
}

TEST(Answer, AFailedExplanationNeedsNoBytesAndNoBeginning) {
  Events events;
  events.ended.mutable_explanation_finished()->mutable_status()->set_code(8);
  for (const bool begun : {true, false}) {
    Answer answer(/*keep_tensors=*/true);
    EXPECT_TRUE(answer.Add(events.started).ok());
    if (begun) {
      EXPECT_TRUE(answer.Add(events.begun).ok());
    }
    EXPECT_TRUE(answer.Add(events.ended).ok());
    EXPECT_TRUE(answer.Add(events.finished).ok());
    EXPECT_FALSE(answer.explanations()[0].succeeded());
  }
}

TEST(Answer, ARefusedRequestHasOnlyItsEnd) {
  Events events;
  events.finished.mutable_finished()->mutable_status()->set_code(3);
  Answer answer(/*keep_tensors=*/true);
  EXPECT_TRUE(answer.Add(events.finished).ok());
  EXPECT_FALSE(answer.is_started());
}

}  // namespace
}  // namespace mambascope::cli
