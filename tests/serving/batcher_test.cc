#include "server/serving/batcher.h"

#include <gtest/gtest.h>

#include <random>

namespace mambascope::serving {
namespace {

const absl::Time kNow = absl::FromUnixSeconds(1000);

std::vector<WaitingCall> Waiting(std::initializer_list<int64_t> tokens, absl::Duration age) {
  std::vector<WaitingCall> calls;
  for (int64_t count : tokens) calls.push_back({kNow - age, count});
  return calls;
}

TEST(DecideQueue, WithoutADelayEverybodyEntersAtOnce) {
  EXPECT_EQ(DecideQueue(Waiting({5, 6}, absl::ZeroDuration()), 0, kNow, {}).take, 2);
}

TEST(DecideQueue, AnIdleServerWaitsForCompanyOnlyAsLongAsItSays) {
  const BatchLimits limits = {.max_queue_delay = absl::Milliseconds(5)};
  const QueueDecision early = DecideQueue(Waiting({5}, absl::Milliseconds(2)), 0, kNow, limits);
  EXPECT_EQ(early.take, 0);
  EXPECT_EQ(early.look_again, kNow + absl::Milliseconds(3));
  EXPECT_EQ(DecideQueue(Waiting({5}, absl::Milliseconds(5)), 0, kNow, limits).take, 1);
}

TEST(DecideQueue, ABusyServerOrAFullBatchDoesNotWait) {
  const BatchLimits limits = {.max_batch_tokens = 100, .max_queue_delay = absl::Seconds(1)};
  EXPECT_EQ(DecideQueue(Waiting({5}, absl::ZeroDuration()), 1, kNow, limits).take, 1);
  EXPECT_EQ(DecideQueue(Waiting({60, 60}, absl::ZeroDuration()), 0, kNow, limits).take, 2);
}

TEST(DecideQueue, NoMoreRunThanAllowed) {
  const BatchLimits limits = {.max_running = 3};
  EXPECT_EQ(DecideQueue(Waiting({1, 1, 1}, absl::ZeroDuration()), 1, kNow, limits).take, 2);
  EXPECT_EQ(DecideQueue(Waiting({1, 1, 1}, absl::ZeroDuration()), 3, kNow, limits).take, 0);
}

TEST(PlanPass, StepsComeFirstAndPromptsShareTheRestPieceByPiece) {
  EXPECT_EQ(PlanPass(std::vector<SequenceNeed>{{0, 100}, {7, 0}, {0, 50}}, 128),
            (std::vector<int64_t>{64, 1, 50}))
      << "13 tokens are left for the first, less than its next piece";
  EXPECT_EQ(PlanPass(std::vector<SequenceNeed>{{0, 30}, {7, 0}, {0, 50}}, 128),
            (std::vector<int64_t>{30, 1, 50}));
}

TEST(PlanPass, AShortPromptDoesNotWaitForLongOnesAndTheOldestNeverStarves) {
  // Eight pieces: the oldest, then who had least, then round again.
  EXPECT_EQ(PlanPass(std::vector<SequenceNeed>{{1024, 9000}, {512, 9000}, {0, 8}}, 512),
            (std::vector<int64_t>{256, 192, 8}));
  // Newcomers without end: the oldest still gets its piece in every pass.
  std::vector<SequenceNeed> needs = {{4096, 9000}};
  for (int i = 0; i < 20; ++i) needs.push_back({0, 64});
  const std::vector<int64_t> tokens = PlanPass(needs, 512);
  EXPECT_EQ(tokens[0], 64);
  EXPECT_EQ(tokens[7], 64);
  EXPECT_EQ(tokens[8], 0);
}

TEST(PlanPass, AnImageIsNeverCut) {
  EXPECT_EQ(
      PlanPass(std::vector<SequenceNeed>{{0, 197, true}, {0, 197, true}, {0, 197, true}}, 512),
      (std::vector<int64_t>{197, 197, 0}));
  EXPECT_EQ(PlanPass(std::vector<SequenceNeed>{{0, 1025, true}, {0, 10}}, 512),
            (std::vector<int64_t>{1025, 0}))
      << "larger than a pass: alone";
}

TEST(PlanPass, APassFullOfStepsStillMovesOnePrompt) {
  std::vector<SequenceNeed> needs(70, SequenceNeed{9, 0});
  needs.push_back({0, 500});
  EXPECT_EQ(PlanPass(needs, 64).back(), kPieceTokens);
}

TEST(PlanPass, PromptsAreCutOnlyAtMultiplesOfThePieceAndAlwaysFinish) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE(round);
    const int32_t budget = 64 + static_cast<int32_t>(random() % 500);
    std::vector<SequenceNeed> needs;
    for (unsigned i = 0; i < 1 + random() % 8; ++i) {
      needs.push_back({0, static_cast<int64_t>(random() % 1500)});
    }
    for (int pass = 0; pass < 1000; ++pass) {
      const std::vector<int64_t> tokens = PlanPass(needs, budget);
      int64_t total = 0, waiting = 0;
      for (size_t i = 0; i < needs.size(); ++i) {
        total += tokens[i];
        if (needs[i].remaining == 0) continue;
        ++waiting;
        needs[i].position += tokens[i];
        needs[i].remaining -= tokens[i];
        if (tokens[i] > 0 && needs[i].remaining > 0) {
          EXPECT_EQ(needs[i].position % kPieceTokens, 0);
        }
      }
      EXPECT_LE(total, budget + kPieceTokens);
      if (waiting == 0) break;
      ASSERT_LT(pass, 999) << "a prompt starves";
    }
  }
}

}  // namespace
}  // namespace mambascope::serving
