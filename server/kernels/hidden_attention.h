#pragma once

#include <cstdint>
#include <span>

#include "server/base/thread_pool.h"

namespace mambascope::kernels {

// Hidden attention of one selective scan over one sequence (methods.md, sections 2 and 9; The
// Hidden Attention of Mamba Models, arXiv 2403.01590, eq. 11-13):
//   alpha[d, i, j] = sum_n C[i, n] (prod_{k = j+1..i} exp(delta[k, d] A[n, d])) delta[j, d] B[j, n]
// for j <= i, else 0, so that y[i, d] = sum_j alpha[d, i, j] x[j, d]. Maps are [output i, input j].
//
// No function here stores anything of size channels x L x L. All factors used are <= 1 times B or
// C: nothing overflows, whatever A and L. The bits of a result do not depend on the thread count.
// Work is in multiply-adds; L tokens, D channels, N states.
struct ScanParameters {  // borrowed until the call returns
  int64_t tokens = 0, d_inner = 0, d_state = 0;
  const float* delta = nullptr;  // [tokens, d_inner] after softplus, >= 0
  const float* A = nullptr;      // [d_state, d_inner], <= 0
  const float* B = nullptr;      // [tokens, bc_stride], the first d_state of each row
  const float* C = nullptr;      // [tokens, bc_stride]
  int64_t bc_stride = 0;
};

// map[i, j] = mean over all channels of alpha.  L^2 D N / 2, as GEMM on chunks (section 9, no. 1).
// `map` is [tokens, tokens] dense and is overwritten, the upper triangle with zeros; memory beyond
// it is O(L) for a block of channels.
void MeanMap(ThreadPool& pool, const ScanParameters& scan, float* map);

// map[i, j] = mean over all channels of |alpha|. Not linear in alpha, so every channel's map is
// formed, block by block.  L^2 D N / 2.
void AbsMeanMap(ThreadPool& pool, const ScanParameters& scan, float* map);

// maps[c] = alpha[channels[c]], [channels.size(), tokens, tokens]. Channels must be in [0,
// d_inner).
void ChannelMaps(ThreadPool& pool, const ScanParameters& scan, std::span<const int32_t> channels,
                 float* maps);

// map = mean over the named channels of alpha, [tokens, tokens]; channels may not be empty.
void MeanMapOfChannels(ThreadPool& pool, const ScanParameters& scan,
                       std::span<const int32_t> channels, float* map);

// maps[s] = the inner map of state states[s] of one channel; their sum over all states is alpha.
void StateMaps(ThreadPool& pool, const ScanParameters& scan, int32_t channel,
               std::span<const int32_t> states, float* maps);

// decay[s][i, j] = prod_{k = j+1..i} exp(delta[k, channel] A[states[s], channel]), 0 for j > i: the
// H of Q_i H_ij K_j.  [states.size(), tokens, tokens]
void DecayMaps(ThreadPool& pool, const ScanParameters& scan, int32_t channel,
               std::span<const int32_t> states, float* decay);

// A mean over channels that is made piece by piece: one piece's channels, all when empty, and the
// number of channels that the mean is over. `add` adds to what `map` holds instead of overwriting.
struct MapPart {
  std::span<const int32_t> channels;
  int64_t of = 1;
  bool add = false;
};

// map (+)= sum over the part's channels of alpha / of, or of |alpha| / of. Neighbouring channels in
// ascending order are read in place. [tokens, tokens]
void PartOfMeanMap(ThreadPool& pool, const ScanParameters& scan, const MapPart& part, float* map);
void PartOfAbsMeanMap(ThreadPool& pool, const ScanParameters& scan, const MapPart& part,
                      float* map);

// mass[d] = sum_ij |alpha[d, i, j]|, [d_inner], what TOP_K ranks by.  L^2 D N / 2.
void ChannelMass(ThreadPool& pool, const ScanParameters& scan, float* mass);

// ---- linear in L: the adjoint scan (section 9, no. 2) ----

// rows[j, d] = alpha[d, target, j] for every channel, [tokens, d_inner]; zeros for j > target.
// L D N. `without_target_decay` leaves the factor exp(delta[target] A) out and the self entry 0, as
// the published vision code does (`quirks` in methods.md).
void TargetRows(ThreadPool& pool, const ScanParameters& scan, int64_t target,
                bool without_target_decay, float* rows);

// out[j] = sum_i v[i] mean_{d in channels} alpha[d, i, j]; all channels when `channels` is empty.
// v, out [tokens], may be the same.  L D N.
void MeanAdjoint(ThreadPool& pool, const ScanParameters& scan, std::span<const int32_t> channels,
                 const float* v, float* out);

// out[i] = sum_j mean_{d in channels} alpha[d, i, j] v[j], the forward direction of the same.
void MeanForward(ThreadPool& pool, const ScanParameters& scan, std::span<const int32_t> channels,
                 const float* v, float* out);

}  // namespace mambascope::kernels
