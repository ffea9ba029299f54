#pragma once

#include <cstdint>

#include "server/base/thread_pool.h"

namespace mambascope::kernels {

// Mamba-2's scan backward over one sequence, whose state before the first token is zero; y is the
// scan's output before D, gate and norm (ssd_scan.h), dy the gradient of some number with respect
// to it. For head h of group g, channel p of the head, state n, with a[i, h] = exp(delta[i, h]
// A[h]):
//   state[i, h, n, p] = a[i, h] state[i-1, h, n, p] + delta[i, h] B[i, g, n] x[i, h, p]
//   y[i, h, p]        = sum_n C[i, g, n] state[i, h, n, p]
//   G[i, h, n, p]     = dy[i, h, p] C[i, g, n] + a[i+1, h] G[i+1, h, n, p]
// Computed in chunks of tokens as products of matrices (arXiv 2405.21060, section 6), chunks
// counted from the sequence's first token. Decays inside a chunk are products of factors <= 1:
// nothing overflows, whatever A and the number of tokens. No result depends on the thread count,
// bit for bit.
// Threads: callable from many threads at once if their outputs do not overlap.
struct SsdBackwardInputs {  // borrowed until the call returns
  int64_t tokens = 0;
  int64_t heads = 0, head_dim = 0, groups = 1, d_state = 0;  // heads is a multiple of groups
  const float* x = nullptr;  // [tokens, xbc_stride] the first heads * head_dim of each row
  const float* B = nullptr;  // [tokens, xbc_stride] the first groups * d_state of each row
  const float* C = nullptr;  // [tokens, xbc_stride]
  int64_t xbc_stride = 0;
  const float* delta = nullptr;  // [tokens, heads] as SsdDelta makes it, >= 0
  const float* A = nullptr;      // [heads], <= 0
  const float* dy = nullptr;     // [tokens, heads * head_dim]
};

// dx[j, h, p] (+)= delta[j, h] sum_n B[j, g, n] G[j, h, n, p] = sum_{i >= j} alpha[h, i, j] dy[i,
// h, p] with delta, A, B and C held fixed: how a relevance or a direction goes back through the
// scan. dx [tokens, dx_stride], the first heads * head_dim of each row. `in.x` is not read.
void SsdAdjoint(ThreadPool& pool, const SsdBackwardInputs& in, float* dx, int64_t dx_stride,
                bool accumulate);

// The ordinary gradient:
//   dx     as above
//   ddelta[i, h] = sum_np G[i, h, n, p] (A[h] a[i, h] state[i-1, h, n, p] + B[i, g, n] x[i, h, p])
//   dB[i, g, n]  = sum_{h of g} sum_p G[i, h, n, p] delta[i, h] x[i, h, p]
//   dC[i, g, n]  = sum_{h of g} sum_p dy[i, h, p] state[i, h, n, p]
struct SsdGradients {          // borrowed until the call returns; no overlap with the inputs
  float* dx = nullptr;         // [tokens, xbc_stride] the first heads * head_dim of each row
  bool accumulate_dx = false;  // adds to what dx holds; the others are overwritten
  float* dB = nullptr;         // [tokens, xbc_stride] the first groups * d_state of each row
  float* dC = nullptr;         // [tokens, xbc_stride]
  int64_t xbc_stride = 0;
  float* ddelta = nullptr;  // [tokens, heads] of delta after softplus and clamp
};
void SsdBackward(ThreadPool& pool, const SsdBackwardInputs& in, const SsdGradients& out);

// What SsdBackward allocates while it runs, at most: states at every 64th token of four heads for
// each thread, and the parts of dB and dC of every four heads.
int64_t SsdBackwardBytes(int64_t tokens, int64_t heads, int64_t head_dim, int64_t groups,
                         int64_t d_state, int threads);

}  // namespace mambascope::kernels
