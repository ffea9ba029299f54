#pragma once

#include <cstdint>

namespace mambascope::kernels {

// Blocks of a hidden-attention map, in tokens. They are fixed, so that a result depends on the scan
// alone. Within kBase tokens alpha comes from the recurrence; kChunk is what one task factors.
constexpr int64_t kBase = 16;
constexpr int64_t kPanel = 32;
constexpr int64_t kChunk = 128;
constexpr int64_t kWidest = 16;  // floats in the widest register, whatever the target's

constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// What becomes of alpha: summed over channels, its magnitude summed over channels, or its magnitude
// summed over rows and columns.
enum class Reduce { kSum, kMagnitude, kMass };

// What a block of the map is summed over; channels is a multiple of kWidest.
struct Depth {
  int64_t states, channels;
  int64_t size() const { return states * channels; }
};

// B and C of a scan, dense and followed by zeros up to a multiple of kPanel tokens.
struct PaddedBC {
  const float *B, *C;  // [padded, d_state]
};

// One block of channels, factored for all tokens: alpha[i, j] = left[i] (carries between) right[j]
// for i and j in different chunks. Everything is <= 1 times B or C.
struct Factors {
  float* left;   // [padded, depth]                   decay from before i's chunk to i, times C[i]
  float* right;  // [padded / kPanel, depth, kPanel]  decay after j to the end of j's chunk, times
                 // Bbar[j]
  float* carry;  // [chunks, depth]                   decay over a whole chunk
  // The part of the map inside chunks, still to be added to it.
  float* local;      // [padded, kChunk]  all but what `triangles` holds
  float* triangles;  // [padded / kBase, kBase / 2, kBase]  below the diagonal of each base block
};

// Row `half` of a base block's triangle keeps two columns, of kBase - 1 entries together: column
// `half`, rows half + 1 .., and column kBase - 1 - half, whose entries stand first, from index 1.
struct TriangleEntry {
  int64_t row, column;
};
constexpr TriangleEntry EntryOf(int64_t half, int64_t index) {
  if (index > half) return {index, half};
  return {index + kBase - 1 - half, kBase - 1 - half};
}

}  // namespace mambascope::kernels
