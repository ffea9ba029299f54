#pragma once

#include <cstdint>

#include "server/base/thread_pool.h"

namespace mambascope::kernels {

// Hidden attention of Mamba-2 (methods.md, sections 2 and 9, no. 1b), one map per head h of group
// g:
//   alpha[h, i, j] = (C[i, g] . B[j, g]) (prod_{k = j+1..i} exp(delta[k, h] A[h])) delta[j, h]
// for j <= i, else 0, so that y[i, h, p] = sum_j alpha[h, i, j] x[j, h, p]. All factors but the
// first are >= 0 and the same for all states: the mean over heads is C B^T times the mean of the
// rest, element by element, and so is the mean of magnitudes.
//
// Everything else about these maps (single heads and states, target rows, both directions of the
// adjoint) is hidden_attention.h's, where the heads of one group are the channels and A[n, h] =
// A[h] for every state n.
struct SsdMapInputs {                                      // borrowed until the call returns
  int64_t tokens = 0, heads = 0, groups = 1, d_state = 0;  // heads is a multiple of groups
  const float* delta = nullptr;  // [tokens, heads] as SsdDelta makes it, >= 0
  const float* A = nullptr;      // [heads], <= 0
  const float* B = nullptr;      // [tokens, bc_stride], the first groups * d_state of each row
  const float* C = nullptr;      // [tokens, bc_stride]
  int64_t bc_stride = 0;
};

// map[i, j] = mean over all heads of alpha, and of |alpha|. Decays are multiplied token by token as
// in the scan, so nothing overflows, whatever A and L. `map` is [tokens, tokens] dense and is
// overwritten, the upper triangle with zeros. The bits do not depend on the thread count.
// L^2 (groups d_state + heads) / 2 multiply-adds; memory beyond the map O(L heads).
void SsdMeanMap(ThreadPool& pool, const SsdMapInputs& in, float* map);
void SsdAbsMeanMap(ThreadPool& pool, const SsdMapInputs& in, float* map);

}  // namespace mambascope::kernels
