#include "server/kernels/rms_norm.h"

#include <cmath>

#include "server/base/check.h"
#include "server/kernels/split_work.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/rms_norm.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// 1 / sqrt(mean of squares + eps). Four sums, so that the additions of one do not wait for each
// other; a tail goes to the first. The order depends on `cols` and the target only.
float RmsScale(const float* h, float eps, int64_t cols) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Vec sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  int64_t m = 0;
  for (; m + 4 * lanes <= cols; m += 4 * lanes) {
    const Vec v0 = hn::LoadU(d, h + m), v1 = hn::LoadU(d, h + m + lanes);
    const Vec v2 = hn::LoadU(d, h + m + 2 * lanes), v3 = hn::LoadU(d, h + m + 3 * lanes);
    sum0 = hn::MulAdd(v0, v0, sum0);
    sum1 = hn::MulAdd(v1, v1, sum1);
    sum2 = hn::MulAdd(v2, v2, sum2);
    sum3 = hn::MulAdd(v3, v3, sum3);
  }
  for (; m + lanes <= cols; m += lanes) {
    const Vec v = hn::LoadU(d, h + m);
    sum0 = hn::MulAdd(v, v, sum0);
  }
  if (m < cols) {
    const Vec v = LoadPart(d, h + m, cols - m);
    sum0 = hn::MulAdd(v, v, sum0);
  }
  const Vec sum = hn::SumOfLanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3)));
  return 1.0f / std::sqrt(hn::GetLane(sum) / static_cast<float>(cols) + eps);
}

void RmsNormRow(const float* h, const float* weight, float eps, int64_t cols, float* u) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  const Vec s = hn::Set(d, RmsScale(h, eps, cols));
  int64_t m = 0;
  for (; m + lanes <= cols; m += lanes) {
    const Vec scaled = hn::Mul(hn::LoadU(d, h + m), s);
    hn::StoreU(hn::Mul(hn::LoadU(d, weight + m), scaled), d, u + m);
  }
  if (m < cols) {
    const Vec scaled = hn::Mul(LoadPart(d, h + m, cols - m), s);
    StorePart(hn::Mul(LoadPart(d, weight + m, cols - m), scaled), d, u + m, cols - m);
  }
}

void RmsScaleRow(float* v, float eps, int64_t cols) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  const Vec s = hn::Set(d, RmsScale(v, eps, cols));
  int64_t m = 0;
  for (; m + lanes <= cols; m += lanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, v + m), s), d, v + m);
  }
  if (m < cols) StorePart(hn::Mul(LoadPart(d, v + m, cols - m), s), d, v + m, cols - m);
}

void AddRange(const float* out, int64_t count, float* h) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, h + i), hn::LoadU(d, out + i)), d, h + i);
  }
  for (; i < count; ++i) h[i] += out[i];
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(RmsNormRow);
HWY_EXPORT(RmsScaleRow);
HWY_EXPORT(AddRange);

}  // namespace

void RmsNorm(ThreadPool& pool, const float* h, const float* weight, float eps, int64_t rows,
             int64_t cols, float* u) {
  SplitWork(pool, rows * cols, rows, 1, [&](int64_t begin, int64_t end) {
    const auto row = HWY_DYNAMIC_DISPATCH(RmsNormRow);
    for (int64_t i = begin; i < end; ++i) row(h + i * cols, weight, eps, cols, u + i * cols);
  });
}

void GroupRmsNorm(ThreadPool& pool, const float* g, const float* weight, float eps, int64_t rows,
                  int64_t cols, int64_t groups, float* out) {
  MS_CHECK(groups >= 1 && cols % groups == 0);
  const int64_t width = cols / groups;
  SplitWork(pool, rows * cols, rows, 1, [&](int64_t begin, int64_t end) {
    const auto row = HWY_DYNAMIC_DISPATCH(RmsNormRow);
    for (int64_t at = begin * cols; at < end * cols; at += width) {
      row(g + at, weight + at % cols, eps, width, out + at);
    }
  });
}

void RmsScaleInPlace(ThreadPool& pool, float* v, int64_t rows, int64_t cols, int64_t stride,
                     float eps) {
  MS_CHECK(stride >= cols);
  SplitWork(pool, rows * cols, rows, 16, [&](int64_t begin, int64_t end) {
    const auto row = HWY_DYNAMIC_DISPATCH(RmsScaleRow);
    for (int64_t i = begin; i < end; ++i) row(v + i * stride, eps, cols);
  });
}

void AddInPlace(ThreadPool& pool, const float* out, int64_t count, float* h) {
  SplitWork(pool, count, count, 1024, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(AddRange)(out + begin, end - begin, h + begin);
  });
}

}  // namespace mambascope::kernels
#endif
