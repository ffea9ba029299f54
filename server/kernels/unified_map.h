#pragma once

#include <cstdint>

#include "server/kernels/hidden_attention.h"

namespace mambascope::kernels {

// Unified maps (methods.md, section 3; UIA, arXiv 2405.16504) strip by strip: rows of alpha of one
// channel, and from them rows of
//   U[i, j] = gate[i] sum_k (alpha + D I)[i, j + k] slope[j + k] weight[taps - 1 - k]
// Decays are factored at the borders of strips (section 9, no. 1), so all factors are <= 1 times B
// or C: nothing overflows. A strip's bits depend on the scan and its strips alone.
// Threads: callable from many threads at once if their outputs do not overlap. None is started
// here.

constexpr int64_t kMapStrip = 32;  // rows of a strip

// Strips of kMapStrip tokens, the last or the first of which may be shorter: the scan that reads a
// sequence from its end has its short one first, so that its strips are the other's turned round.
struct MapStrips {
  int64_t tokens = 0;
  bool short_first = false;

  int64_t count() const { return (tokens + kMapStrip - 1) / kMapStrip; }
  int64_t begin(int64_t strip) const {
    const int64_t missing = short_first ? count() * kMapStrip - tokens : 0;
    return strip == 0 ? 0 : strip * kMapStrip - missing;
  }
  int64_t end(int64_t strip) const { return strip + 1 == count() ? tokens : begin(strip + 1); }
};

// What a strip needs of all tokens: floats of `factors`, and its making.  L N exponentials.
int64_t MapFactorsSize(int64_t tokens, int64_t d_state);
void FactorMap(const ScanParameters& scan, int64_t channel, const MapStrips& strips,
               float* factors);
// alpha[i, j] for the strip's rows, [rows, stride], j <= i; what follows is unspecified.
// `stride` >= RoundUp(tokens, kMapStrip) + kMapStrip.  N multiply-adds an entry.
void MapStripRows(const ScanParameters& scan, int64_t channel, const MapStrips& strips,
                  const float* factors, int64_t strip, int64_t stride, float* alpha);

// A channel's other factors; tokens in the scan's own order.
struct UnifiedChannel {
  const float* gate = nullptr;    // [tokens]
  const float* slope = nullptr;   // [tokens] of the convolution's activation
  const float* weight = nullptr;  // [taps] of the convolution
  int64_t taps = 1;
  float skip = 0, bias = 0;  // D, and the convolution's bias
};
// Row i of U from row i of alpha: out [i + 1]. `scratch` [tokens + taps + kMapStrip]. Returns what
// the bias gives: gate[i] sum_m (alpha + D I)[i, m] slope[m] bias.
double UnifiedRow(const UnifiedChannel& channel, const float* alpha, int64_t i, float* scratch,
                  float* out);

// sum[j] += row[j], or |row[j]|.
void AddRowTo(const float* row, int64_t count, bool magnitude, float* sum);

}  // namespace mambascope::kernels
