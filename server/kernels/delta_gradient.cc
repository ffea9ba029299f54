#include "server/kernels/delta_gradient.h"

#include "server/base/check.h"
#include "server/kernels/split_work.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/delta_gradient.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// 1 - exp(-v) for v >= 0: its series where the difference would lose digits.
HWY_INLINE Vec OneMinusExp(F32 d, Vec v) {
  constexpr float kSeries[] = {1.0f / 5040, -1.0f / 720, 1.0f / 120, -1.0f / 24,
                               1.0f / 6,    -1.0f / 2,   1.0f};
  Vec p = hn::Set(d, -1.0f / 40320);
  for (const float factor : kSeries) p = hn::MulAdd(p, v, hn::Set(d, factor));
  const Vec far = hn::Sub(hn::Set(d, 1.0f), ExpNonPositive(d, hn::Neg(v)));
  return hn::IfThenElse(hn::Lt(v, hn::Set(d, 0.5f)), hn::Mul(v, p), far);
}

void SoftplusRange(const float* delta, int64_t count, float* ddelta) {
  const F32 d;
  ForEachRegister(count, [&](int64_t i, const auto& lane) {
    lane.Store(hn::Mul(lane.Load(ddelta + i), OneMinusExp(d, lane.Load(delta + i))), ddelta + i);
  });
}

void SsdRow(const float* dt, const float* bias, float low, float high, int64_t heads,
            const float* ddelta, float* ddt) {
  const F32 d;
  ForEachRegister(heads, [&](int64_t h, const auto& lane) {
    const Vec v = hn::Add(lane.Load(dt + h), lane.Load(bias + h));
    const Vec delta = Softplus(d, v);
    // Written so that a NaN is not outside: it must not become a zero.
    const auto outside = hn::Or(hn::Le(delta, hn::Set(d, low)), hn::Ge(delta, hn::Set(d, high)));
    const Vec gradient = hn::Mul(lane.Load(ddelta + h), Sigmoid(d, v));
    lane.Store(hn::IfThenZeroElse(outside, gradient), ddt + h);
  });
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(SoftplusRange);
HWY_EXPORT(SsdRow);

}  // namespace

void SoftplusGradient(ThreadPool& pool, std::span<const float> delta, std::span<float> ddelta) {
  MS_CHECK(delta.size() == ddelta.size());
  const auto count = static_cast<int64_t>(delta.size());
  SplitWork(pool, count, count, /*multiple=*/16, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(SoftplusRange)(delta.data() + begin, end - begin, ddelta.data() + begin);
  });
}

void SsdDeltaGradient(ThreadPool& pool, const float* dt, int64_t dt_stride, const float* dt_bias,
                      float delta_min, float delta_max, int64_t tokens, int64_t heads,
                      const float* ddelta, float* ddt, int64_t ddt_stride) {
  MS_CHECK(dt_stride >= heads && ddt_stride >= heads);
  SplitWork(pool, tokens * heads, tokens, 1, [&](int64_t begin, int64_t end) {
    const auto row = HWY_DYNAMIC_DISPATCH(SsdRow);
    for (int64_t i = begin; i < end; ++i) {
      row(dt + i * dt_stride, dt_bias, delta_min, delta_max, heads, ddelta + i * heads,
          ddt + i * ddt_stride);
    }
  });
}

}  // namespace mambascope::kernels
#endif
