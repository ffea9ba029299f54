#pragma once

#include <cstdint>

#include "server/base/thread_pool.h"

// The norms of rms_norm.h backwards. With s = 1 / sqrt(mean(h^2) + eps) and u = weight h s:
//   dh[m] = s weight[m] du[m] - h[m] s^3 / cols sum_k weight[k] du[k] h[k]
// and, where `frozen`, the first term alone: MambaLRP's rule takes s for a constant (methods.md,
// section 6). Row-major; the bits of a row depend on that row alone.
namespace mambascope::kernels {

// dh += the above. h, du, dh [rows, cols] dense; weight [cols] or null for ones. dh must not
// overlap the inputs.
void RmsNormBackward(ThreadPool& pool, const float* h, const float* weight, float eps, int64_t rows,
                     int64_t cols, const float* du, bool frozen, float* dh);

// dg = the above, group by group of cols / groups neighbouring channels. g, dout, dg [rows, cols]
// dense; weight [cols] or null for ones; dg may be dout.
void GroupRmsNormBackward(ThreadPool& pool, const float* g, const float* weight, float eps,
                          int64_t rows, int64_t cols, int64_t groups, const float* dout,
                          bool frozen, float* dg);

// RmsScaleInPlace backwards, in place: dv, the gradient of v s, becomes that of v, which is `v`
// before it was scaled. The first `cols` of each row, v_stride and dv_stride apart; the rest of
// dv's rows stays. There is no weight.
void RmsScaleBackwardInPlace(ThreadPool& pool, const float* v, int64_t v_stride, int64_t rows,
                             int64_t cols, float eps, float* dv, int64_t dv_stride);

}  // namespace mambascope::kernels
