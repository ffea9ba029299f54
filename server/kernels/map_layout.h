#pragma once

#include <cstdint>

namespace mambascope::kernels {

// Blocks of a hidden-attention map, in tokens. They are fixed, so that a result depends on the scan
// alone. Within kBase tokens alpha comes from the recurrence; kChunk is what one task factors.
constexpr int64_t kBase = 16;
constexpr int64_t kChunk = 128;
constexpr int64_t kWidestPanel = 64;  // columns that a target packs together at most
constexpr int64_t kWidest = 16;       // floats in the widest register, whatever the target's

constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// What becomes of alpha: summed over channels, its magnitude summed over channels, or its magnitude
// summed over rows and columns.
enum class Reduce { kSum, kMagnitude, kMass };

// What a block of the map is summed over. `channels` is a multiple of the target's lanes; all from
// `live` on are zero, which matters to a scan of few.
struct Depth {
  int64_t states, channels, live;
  int64_t size() const { return states * channels; }
};

// B and C of a scan, followed by zeros up to a multiple of kWidestPanel tokens.
struct PaddedBC {
  const float *B, *C;  // [padded / kBase, d_state, kBase]
};

// One block of channels, factored for all tokens: for i and j in different chunks
// alpha[i, j] = sum left[i] (carries of the chunks between) right[j]. All are <= 1 times B or C.
// The layouts are those of map_tile-inl.h.
struct Factors {
  float* left;   // [padded, depth]    C[i], decayed from before i's chunk to i
  float* right;  // [depth, padded]    Bbar[j], decayed to the end of j's chunk
  float* carry;  // [chunks, depth]    decay over a whole chunk
};

}  // namespace mambascope::kernels
