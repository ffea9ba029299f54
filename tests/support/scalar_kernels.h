#pragma once

#include <cstdint>
#include <span>

#include "server/kernels/activation.h"
#include "server/kernels/causal_conv1d.h"
#include "server/kernels/hidden_attention.h"
#include "server/kernels/selective_scan.h"
#include "server/kernels/ssd_scan.h"

// The device kernels on the CPU: one thread, one number at a time, the same bodies in the same
// order of additions. Slow, and not for serving: tests hold it against the Highway kernels here and
// against the device kernels where there is a GPU.
namespace mambascope::kernels::scalar {

void CausalConv1d(const ConvInputs& in, const ConvOutputs& out);
void SelectiveScan(const ScanInputs& in, const ScanOutputs& out);
void SsdScan(const SsdInputs& in, const SsdOutputs& out);

// Groups of cols / groups neighbouring columns, each with its own scale; `weight` may be null.
// h, u: `stride` apart; u may be h.
void RmsNorm(const float* h, const float* weight, float eps, int64_t rows, int64_t cols,
             int64_t groups, int64_t stride, float* u);

// rows[j, d] = sum_{i >= j} v[i, d] alpha[d, i, j]; v [tokens, d_inner] with a row stride, or one
// number for all channels where `v_per_channel` is false.
void AdjointScan(const ScanParameters& scan, const float* v, int64_t v_stride, bool v_per_channel,
                 float* rows);
// rows[i, d] = sum_{j <= i} alpha[d, i, j] v[j]
void ForwardScan(const ScanParameters& scan, const float* v, float* rows);
// out[i] = mean over the columns of rows[i], as the device adds them.
void RowMeans(const float* rows, int64_t count, int64_t cols, float* out);

}  // namespace mambascope::kernels::scalar
