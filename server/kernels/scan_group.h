#pragma once

#include <algorithm>
#include <cstdint>

#include "server/base/check.h"
#include "server/kernels/hidden_attention.h"

// How the backward passes of the selective scan divide it: the same on every target.
namespace mambascope::kernels {

// Channels that pass over the tokens together. Wide blocks read whole pages of the tokens' rows: of
// 5 alternating runs on a loaded Sapphire Rapids VM (512 tokens, 1536 channels, 16 states) the
// lowest took 2.0 / 7.5 ms (adjoint / gradient) with 512 channels, 2.2 / 7.8 with 256, 3.0 / 9.6
// with 128; the scan itself 2.8.
constexpr int64_t kScanBlock = 256;
// Channels whose parts of dB and dC are added before those of others; also the least of one thread.
constexpr int64_t kScanGroup = 128;
// Tokens that a register of channels passes over at a time, and between two states that are kept.
constexpr int64_t kScanChunk = 8;
constexpr int64_t kMaxLanes = 16;  // the widest register's
constexpr int64_t kMaxRows = 16;   // states that are in registers at a time

// Channels [first, first + count) of a scan.
struct ChannelRange {
  int64_t first, count;
};

inline int64_t ScanChunks(int64_t tokens) { return (tokens + kScanChunk - 1) / kScanChunk; }
inline int64_t ScanGroups(int64_t d_inner) { return (d_inner + kScanGroup - 1) / kScanGroup; }

// Calls run(range) for blocks that cover channels [begin, end).
template <class Run>
void ForScanBlocks(int64_t begin, int64_t end, const Run& run) {
  for (int64_t first = begin; first < end; first += kScanBlock) {
    run(ChannelRange{first, std::min(kScanBlock, end - first)});
  }
}

inline void CheckScan(const ScanParameters& scan) {
  MS_CHECK(scan.tokens >= 0 && scan.d_inner >= 0 && scan.bc_stride >= scan.d_state);
  MS_CHECK(scan.d_state >= 1 && scan.d_state <= 256);
}

}  // namespace mambascope::kernels
