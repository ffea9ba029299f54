#include "server/kernels/conv_backward.h"

#include <algorithm>
#include <vector>

#include "server/base/check.h"
#include "server/kernels/split_work.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/conv_backward.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

HWY_INLINE Vec Slope(F32 d, Activation activation, BackwardRule rule, Vec c) {
  switch (activation) {
    case Activation::kSilu: {
      const Vec sigmoid = Sigmoid(d, c);
      return rule == BackwardRule::kGradient ? SiluSlope(d, c, sigmoid) : sigmoid;
    }
    case Activation::kRelu:
      return hn::IfThenElseZero(hn::Gt(c, hn::Zero(d)), hn::Set(d, 1.0f));
    case Activation::kIdentity:
      break;
  }
  return hn::Set(d, 1.0f);
}

void ActivationRange(const float* c, const float* dx, int64_t count, Activation activation,
                     BackwardRule rule, float* dc) {
  ForEachRegister(count, [&](int64_t i, auto lane) HWY_ATTR {
    const Vec slope = Slope(lane.d, activation, rule, lane.Load(c + i));
    lane.Store(hn::Mul(lane.Load(dx + i), slope), dc + i);
  });
}

// Token j. `weight` [taps, channels]: row k is the tap that token j + k gave to token j.
void ConvRow(const ConvBackwardInputs& in, const float* weight, int64_t j, float* dx_in) {
  const int64_t taps = std::min(in.taps, in.tokens - j), channels = in.channels;
  const float* dc = in.dc + j * channels;
  ForEachRegister(channels, [&](int64_t i, auto lane) HWY_ATTR {
    Vec sum = hn::Zero(lane.d);
    for (int64_t k = 0; k < taps; ++k) {
      const int64_t at = k * channels + i;
      sum = hn::MulAdd(lane.Load(weight + at), lane.Load(dc + at), sum);
    }
    lane.Store(sum, dx_in + i);
  });
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(ActivationRange);
HWY_EXPORT(ConvRow);

}  // namespace

void ActivationGradient(ThreadPool& pool, const float* c, const float* dx, int64_t tokens,
                        int64_t channels, Activation activation, BackwardRule rule, float* dc) {
  const int64_t count = tokens * channels;
  SplitWork(pool, count, count, 1024, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(ActivationRange)
    (c + begin, dx + begin, end - begin, activation, rule, dc + begin);
  });
}

void CausalConv1dBackward(ThreadPool& pool, const ConvBackwardInputs& in, float* dx_in,
                          int64_t dx_stride) {
  MS_CHECK(in.taps >= 1 && dx_stride >= in.channels);
  std::vector<float> weight(in.taps * in.channels);
  for (int64_t d = 0; d < in.channels; ++d) {
    for (int64_t k = 0; k < in.taps; ++k) {
      weight[k * in.channels + d] = in.weight[d * in.taps + in.taps - 1 - k];
    }
  }
  SplitWork(pool, in.tokens * in.channels, in.tokens, 1, [&](int64_t begin, int64_t end) {
    const auto row = HWY_DYNAMIC_DISPATCH(ConvRow);
    for (int64_t j = begin; j < end; ++j) row(in, weight.data(), j, dx_in + j * dx_stride);
  });
}

}  // namespace mambascope::kernels
#endif
