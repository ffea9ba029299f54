#pragma once

#include <algorithm>
#include <cstdint>

#include "server/base/check.h"
#include "server/kernels/hidden_attention.h"

// How the backward passes of the selective scan divide it: the same on every target.
namespace mambascope::kernels {

// Channels of one task, whose parts of dB and dC are added before those of other tasks.
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
inline ChannelRange RangeOfGroup(const ScanParameters& scan, int64_t group) {
  return {group * kScanGroup, std::min(kScanGroup, scan.d_inner - group * kScanGroup)};
}

inline void CheckScan(const ScanParameters& scan) {
  MS_CHECK(scan.tokens >= 0 && scan.d_inner >= 0 && scan.bc_stride >= scan.d_state);
  MS_CHECK(scan.d_state >= 1 && scan.d_state <= 256);
}

}  // namespace mambascope::kernels
