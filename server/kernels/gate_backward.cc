#include "server/kernels/gate_backward.h"

#include <vector>

#include "server/base/check.h"
#include "server/kernels/split_work.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/gate_backward.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// One token; `skip` [d_inner] is D of each channel.
void GateRow(const GateBackwardInputs& in, const GateBackwardOutputs& out, const float* skip,
             int64_t token) {
  const int64_t row = token * in.d_inner;
  const float *dgated = in.dgated + row, *y = in.y + row;
  const float *x = in.x + token * in.x_stride, *z = in.z + token * in.z_stride;
  float *dyd = out.dyd + row, *dz = out.dz + token * out.dz_stride;
  const bool halved = in.rule == BackwardRule::kRelevance;
  ForEachRegister(in.d_inner, [&](int64_t i, auto lane) HWY_ATTR {
    const auto d = lane.d;
    const Vec gate = lane.Load(z + i), sigmoid = Sigmoid(d, gate);
    const Vec yd = hn::MulAdd(lane.Load(skip + i), lane.Load(x + i), lane.Load(y + i));
    const Vec whole = lane.Load(dgated + i);
    const Vec gradient = halved ? hn::Mul(whole, hn::Set(d, 0.5f)) : whole;
    const Vec slope = halved ? sigmoid : SiluSlope(d, gate, sigmoid);
    const Vec to_z = hn::Mul(hn::Mul(gradient, yd), slope);
    lane.Store(to_z, dz + i);
    lane.Store(hn::Mul(gradient, hn::Mul(gate, sigmoid)), dyd + i);
  });
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(GateRow);

}  // namespace

void GateBackward(ThreadPool& pool, const GateBackwardInputs& in, const GateBackwardOutputs& out) {
  MS_CHECK(in.channels_per_skip >= 1 && in.d_inner % in.channels_per_skip == 0);
  MS_CHECK(in.x_stride >= in.d_inner && in.z_stride >= in.d_inner && out.dz_stride >= in.d_inner);
  std::vector<float> skip(in.d_inner);
  for (int64_t d = 0; d < in.d_inner; ++d) skip[d] = in.D[d / in.channels_per_skip];
  SplitWork(pool, in.tokens * in.d_inner, in.tokens, 1, [&](int64_t begin, int64_t end) {
    const auto row = HWY_DYNAMIC_DISPATCH(GateRow);
    for (int64_t i = begin; i < end; ++i) row(in, out, skip.data(), i);
  });
}

}  // namespace mambascope::kernels
#endif
