#include "server/serving/result_stream.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace mambascope::serving {
namespace {

using Next = ResultStream::Next;

v1::PredictEvent EventOfBytes(int bytes) {
  v1::PredictEvent event;
  event.mutable_tensor_chunk()->set_data(std::string(bytes, 'x'));
  return event;
}

v1::PredictEvent TokenEventOf(int id) {
  v1::PredictEvent event;
  event.mutable_token()->set_token_id(id);
  return event;
}

TEST(ResultStream, EventsComeInOrderThenTheEnd) {
  ResultStream stream(1000);
  v1::PredictEvent event;
  EXPECT_EQ(stream.TryPop(&event), Next::kWait);
  stream.Send(TokenEventOf(1));
  stream.Send(TokenEventOf(2));
  stream.Close(absl::DeadlineExceededError("late"));
  ASSERT_EQ(stream.TryPop(&event), Next::kEvent);
  EXPECT_EQ(event.token().token_id(), 1);
  ASSERT_EQ(stream.TryPop(&event), Next::kEvent);
  EXPECT_EQ(event.token().token_id(), 2);
  ASSERT_EQ(stream.TryPop(&event), Next::kClosed);
  EXPECT_TRUE(absl::IsDeadlineExceeded(stream.final_status()));
}

TEST(ResultStream, OnlyTheFirstCloseCountsAndNothingFollowsIt) {
  ResultStream stream(1000);
  stream.Close(absl::OkStatus());
  stream.Close(absl::InternalError("second"));
  stream.Send(TokenEventOf(1));
  v1::PredictEvent event;
  EXPECT_EQ(stream.TryPop(&event), Next::kClosed);
  EXPECT_TRUE(stream.final_status().ok());
}

TEST(ResultStream, ASlowReaderTakesAwayTheRoomAndGivesItBack) {
  int room = 0;
  ResultStream stream(100, [&] { ++room; });
  EXPECT_TRUE(stream.HasRoom());
  stream.Send(EventOfBytes(60));
  EXPECT_TRUE(stream.HasRoom());
  stream.Send(EventOfBytes(60));
  EXPECT_FALSE(stream.HasRoom());
  v1::PredictEvent event;
  stream.TryPop(&event);
  EXPECT_TRUE(stream.HasRoom());
  EXPECT_EQ(room, 1);
  stream.TryPop(&event);
  EXPECT_EQ(room, 1) << "room is announced once, when it appears";
}

TEST(ResultStream, AReaderThatLeavesDropsWhatWaitsAndTellsTheProducer) {
  int room = 0;
  ResultStream stream(10, [&] { ++room; });
  stream.Send(EventOfBytes(60));
  stream.Cancel();
  stream.Cancel();
  EXPECT_EQ(room, 1);
  EXPECT_TRUE(stream.cancelled());
  stream.Send(EventOfBytes(60));
  v1::PredictEvent event;
  EXPECT_EQ(stream.TryPop(&event), Next::kWait);
  stream.Close(absl::CancelledError(""));
  EXPECT_EQ(stream.TryPop(&event), Next::kClosed);
}

TEST(ResultStream, AReaderThatComesLateIsToldAtOnce) {
  ResultStream stream(10);
  stream.Send(TokenEventOf(1));
  int readable = 0;
  stream.SetOnReadable([&] { ++readable; });
  EXPECT_EQ(readable, 1);
  stream.Send(TokenEventOf(2));
  EXPECT_EQ(readable, 2);
}

TEST(ResultStream, OneProducerAndOneConsumerOnTwoThreadsLoseNothing) {
  constexpr int kEvents = 20000;
  ResultStream stream(1 << 20);
  std::thread producer([&] {
    for (int i = 0; i < kEvents; ++i) stream.Send(TokenEventOf(i));
    stream.Close(absl::OkStatus());
  });
  int next = 0;
  v1::PredictEvent event;
  for (Next got = Next::kWait; got != Next::kClosed;) {
    got = stream.TryPop(&event);
    if (got == Next::kEvent) {
      ASSERT_EQ(event.token().token_id(), next++);
    } else {
      std::this_thread::yield();
    }
  }
  producer.join();
  EXPECT_EQ(next, kEvents);
}

}  // namespace
}  // namespace mambascope::serving
