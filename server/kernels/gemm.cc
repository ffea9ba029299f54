#include "server/kernels/gemm.h"

#include <blis.h>
#include <algorithm>

#include "server/base/check.h"

namespace mambascope::kernels {
namespace {

void Blis(ConstMatrix a, ConstMatrix b, float beta, Matrix c) {
  rntm_t one_thread = BLIS_RNTM_INITIALIZER;
  bli_rntm_set_num_threads(1, &one_thread);
  bli_rntm_disable_l3_sup(&one_thread);
  float alpha = 1;
  bli_sgemm_ex(BLIS_NO_TRANSPOSE, BLIS_TRANSPOSE, c.rows, c.cols, a.cols, &alpha,
               const_cast<float*>(a.data), a.stride, 1, const_cast<float*>(b.data), b.stride, 1,
               &beta, c.data, c.stride, 1, nullptr, &one_thread);
}

}  // namespace

void GemmBlock(ConstMatrix a, ConstMatrix b, bool accumulate, Matrix c) {
  MS_CHECK(a.cols == b.cols && c.rows == a.rows && c.cols == b.rows);
  Blis(a, b, accumulate ? 1.0f : 0.0f, c);
}

void Linear(ThreadPool& pool, ConstMatrix x, ConstMatrix w, const float* bias, Matrix y) {
  MS_CHECK(x.cols == w.cols && y.rows == x.rows && y.cols == w.rows);
  pool.Split(w.rows, 32, [&](int64_t begin, int64_t end) {
    const Matrix part{y.data + begin, y.rows, end - begin, y.stride};
    Blis(x, {w.data + begin * w.stride, end - begin, w.cols, w.stride}, 0.0f, part);
    if (bias == nullptr) return;
    for (int64_t m = 0; m < part.rows; ++m) {
      for (int64_t n = 0; n < part.cols; ++n) part.data[m * part.stride + n] += bias[begin + n];
    }
  });
}

GemmReport CheckGemm(ThreadPool&) { return {"BLIS", 0, true}; }

}  // namespace mambascope::kernels
