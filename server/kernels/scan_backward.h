#pragma once

#include <cstdint>

#include "server/base/thread_pool.h"
#include "server/kernels/hidden_attention.h"

namespace mambascope::kernels {

// The selective scan backward over one sequence, whose state before the first token is zero. y is
// the scan's output before D and gate; dy is the gradient of some number with respect to it. With
//   Abar[i, n, d]  = exp(delta[i, d] A[n, d])
//   state[i, n, d] = Abar[i, n, d] state[i-1, n, d] + delta[i, d] B[i, n] x[i, d]
//   y[i, d]        = sum_n C[i, n] state[i, n, d]
// the gradient of state[i] is, from the last token on,
//   G[i, n, d] = dy[i, d] C[i, n] + Abar[i+1, n, d] G[i+1, n, d]
// Layout: row-major, channels contiguous. All factors are <= 1 times inputs: nothing overflows,
// whatever A and the number of tokens. No result depends on the thread count, bit for bit.
// Threads: callable from many threads at once if their outputs do not overlap.

// dx[j, d] (+)= delta[j, d] sum_n B[j, n] G[j, n, d] = sum_{i >= j} dy[i, d] alpha[d, i, j]
// with delta, A, B and C held fixed: how a relevance or a direction goes back through the scan
// (methods.md: MambaLRP, ALTI-Logit, LaTIM). With dy = 1 at one token and 0 elsewhere it is
// TargetRows. dy, dx [tokens, d_inner], may be the same unless `accumulate`.
// One exponential a state and token; memory O(d_state) for each thread.
void ScanAdjoint(ThreadPool& pool, const ScanParameters& scan, const float* dy, float* dx,
                 bool accumulate);

// The ordinary gradient:
//   dx     as above
//   ddelta[i, d] = sum_n G[i, n, d] (A[n, d] Abar[i, n, d] state[i-1, n, d] + B[i, n] x[i, d])
//   dB[i, n]     = sum_d G[i, n, d] delta[i, d] x[i, d]
//   dC[i, n]     = sum_d dy[i, d] state[i, n, d]
// States are computed once to keep one in every few tokens, and again between those on the way
// back: two exponentials a state and token.
struct ScanGradients {         // borrowed until the call returns
  float* dx = nullptr;         // [tokens, d_inner]
  bool accumulate_dx = false;  // adds to what dx holds; the others are overwritten
  float* ddelta = nullptr;     // [tokens, d_inner] of delta after softplus
  float* dB = nullptr;         // [tokens, bc_stride], the first d_state of each row are written
  float* dC = nullptr;         // [tokens, bc_stride]
  int64_t bc_stride = 0;
};
// x [tokens, d_inner] is the scan's input, after convolution and activation. No output may overlap
// an input.
void ScanBackward(ThreadPool& pool, const ScanParameters& scan, const float* x, const float* dy,
                  const ScanGradients& out);

// What ScanBackward allocates while it runs, at most:
//   about 4 d_state (threads (32 tokens + 1024) + 2 tokens ceil(d_inner / 128)) bytes.
int64_t ScanBackwardBytes(int64_t tokens, int64_t d_inner, int64_t d_state, int threads);

}  // namespace mambascope::kernels
