#include "server/kernels/norm_backward.h"

#include <cmath>

#include "server/base/check.h"
#include "server/kernels/split_work.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/norm_backward.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// weight[m] du[m] for the lanes in use.
template <typename Lanes>
HWY_INLINE Vec Weighted(Lanes lane, const float* weight, const float* du, int64_t m) {
  const Vec v = lane.Load(du + m);
  return weight == nullptr ? v : hn::Mul(lane.Load(weight + m), v);
}

// The sums of h^2 and of h times weight du. Four chains each, so that the additions of one do not
// wait for each other. The order depends on `cols` and the target only.
void Sums(const float* h, const float* weight, const float* du, int64_t cols, float* squares,
          float* product) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Vec square[4], along[4];
  for (int c = 0; c < 4; ++c) square[c] = along[c] = hn::Zero(d);
  int64_t m = 0;
  for (; m + 4 * lanes <= cols; m += 4 * lanes) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const Lane<true> lane{d, static_cast<size_t>(lanes)};
      const Vec v = lane.Load(h + m + c * lanes);
      square[c] = hn::MulAdd(v, v, square[c]);
      along[c] = hn::MulAdd(v, Weighted(lane, weight, du, m + c * lanes), along[c]);
    }
  }
  ForEachRegister(cols - m, [&](int64_t i, auto lane) HWY_ATTR {
    const Vec v = lane.Load(h + m + i);
    square[0] = hn::MulAdd(v, v, square[0]);
    along[0] = hn::MulAdd(v, Weighted(lane, weight, du, m + i), along[0]);
  });
  const auto all = [&](const Vec* sum) HWY_ATTR {
    return hn::GetLane(
        hn::SumOfLanes(d, hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]))));
  };
  *squares = all(square);
  *product = all(along);
}

// One row or group; dh may be du.
void NormBackwardRow(const float* h, const float* weight, float eps, int64_t cols, const float* du,
                     bool frozen, bool accumulate, float* dh) {
  float squares, product;
  Sums(h, weight, du, cols, &squares, &product);
  const float count = static_cast<float>(cols), scale = 1.0f / std::sqrt(squares / count + eps);
  const F32 d;
  const Vec s = hn::Set(d, scale);
  const Vec along = hn::Set(d, frozen ? 0.0f : product / count * scale * scale * scale);
  ForEachRegister(cols, [&](int64_t m, auto lane) HWY_ATTR {
    const Vec across = hn::Mul(s, Weighted(lane, weight, du, m));
    // Not 0 times h where frozen: a constant scale has no second term, whatever h is.
    const Vec v = frozen ? across : hn::NegMulAdd(along, lane.Load(h + m), across);
    lane.Store(accumulate ? hn::Add(lane.Load(dh + m), v) : v, dh + m);
  });
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(NormBackwardRow);

}  // namespace

void RmsNormBackward(ThreadPool& pool, const float* h, const float* weight, float eps, int64_t rows,
                     int64_t cols, const float* du, bool frozen, float* dh) {
  SplitWork(pool, rows * cols, rows, 1, [&](int64_t begin, int64_t end) {
    const auto row = HWY_DYNAMIC_DISPATCH(NormBackwardRow);
    for (int64_t at = begin * cols; at < end * cols; at += cols) {
      row(h + at, weight, eps, cols, du + at, frozen, /*accumulate=*/true, dh + at);
    }
  });
}

void GroupRmsNormBackward(ThreadPool& pool, const float* g, const float* weight, float eps,
                          int64_t rows, int64_t cols, int64_t groups, const float* dout,
                          bool frozen, float* dg) {
  MS_CHECK(groups >= 1 && cols % groups == 0);
  const int64_t width = cols / groups;
  SplitWork(pool, rows * cols, rows, 1, [&](int64_t begin, int64_t end) {
    const auto row = HWY_DYNAMIC_DISPATCH(NormBackwardRow);
    for (int64_t at = begin * cols; at < end * cols; at += width) {
      const float* const of_group = weight == nullptr ? nullptr : weight + at % cols;
      row(g + at, of_group, eps, width, dout + at, frozen, /*accumulate=*/false, dg + at);
    }
  });
}

void RmsScaleBackwardInPlace(ThreadPool& pool, const float* v, int64_t v_stride, int64_t rows,
                             int64_t cols, float eps, float* dv, int64_t dv_stride) {
  MS_CHECK(v_stride >= cols && dv_stride >= cols);
  SplitWork(pool, rows * cols, rows, 16, [&](int64_t begin, int64_t end) {
    const auto row = HWY_DYNAMIC_DISPATCH(NormBackwardRow);
    for (int64_t i = begin; i < end; ++i) {
      float* const at = dv + i * dv_stride;
      row(v + i * v_stride, nullptr, eps, cols, at, /*frozen=*/false, /*accumulate=*/false, at);
    }
  });
}

}  // namespace mambascope::kernels
#endif
