#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "server/kernels/cuda/gemm.h"
#include "server/kernels/hidden_attention.h"

namespace mambascope::kernels::cuda {

// hidden_attention.h on the device, same definitions: alpha of one selective scan over one
// sequence. ScanParameters' pointers and all others are of the device, borrowed until `stream` has
// run the call; d_state <= 256. Nothing of size channels x L x L is stored, and all factors used
// are <= 1 times B or C. The bits of a result depend on the scan alone: chunks lie at fixed tokens,
// and every sum is taken in a fixed order, without atomics.

// map[i, j] = mean over all channels of alpha, [tokens, tokens] dense, zeros above the diagonal.
// `scratch` of MeanMapScratchBytes bytes on 16 bytes. L^2 D N / 2 multiply-adds, as GEMM.
int64_t MeanMapScratchBytes(const ScanParameters& scan);
absl::Status MeanMap(Gemm& gemm, const ScanParameters& scan, void* scratch, float* map,
                     cudaStream_t stream);

// rows[j, d] = alpha[d, target, j] for every channel, [tokens, d_inner]; zeros for j > target. L D
// N. `without_target_decay` leaves the factor exp(delta[target] A) out and the self entry 0.
absl::Status TargetRows(const ScanParameters& scan, int64_t target, bool without_target_decay,
                        float* rows, cudaStream_t stream);

// The adjoint scan: rows[j, d] = sum_{i >= j} v[i, d] alpha[d, i, j]; v [tokens, v_stride], or
// v[i, 0] for every channel where `per_channel` is false. L D N.
absl::Status AdjointScan(const ScanParameters& scan, const float* v, int64_t v_stride,
                         bool per_channel, float* rows, cudaStream_t stream);

// out[j] = sum_i v[i] mean_d alpha[d, i, j] and out[i] = sum_j mean_d alpha[d, i, j] v[j]; v, out
// [tokens], may be the same. `scratch` [tokens, d_inner] on 16 bytes. L D N.
absl::Status MeanAdjoint(const ScanParameters& scan, const float* v, float* scratch, float* out,
                         cudaStream_t stream);
absl::Status MeanForward(const ScanParameters& scan, const float* v, float* scratch, float* out,
                         cudaStream_t stream);

}  // namespace mambascope::kernels::cuda
