#include "server/kernels/tap_rows.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/tap_rows.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/vector_math-inl.h"

#ifndef MAMBASCOPE_KERNELS_TAP_ROWS_ONCE_
#define MAMBASCOPE_KERNELS_TAP_ROWS_ONCE_
namespace mambascope::kernels {

// Tokens whose sum is taken apart: a single fp32 sum over a long input would round too often.
constexpr int64_t kSumTokens = 64;
constexpr int64_t kFoldChannels = 64;  // side by side: their sums stay in the first cache

}  // namespace mambascope::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

template <Activation kF>
void TapRowsOf(const TapRow& in, int64_t begin, int64_t end, bool accumulate, float* out,
               int64_t out_stride) {
  const F32 d;
  for (int64_t j = begin; j < end; ++j, out += out_stride) {
    const float* row = in.row + j * in.channels;
    const float* x_in = in.x_in + j * in.x_stride;
    const int64_t taps = std::min(in.taps, in.target + 1 - j);
    ForEachRegister(in.channels, [&](int64_t c, auto lane) {
      const Vec x = lane.Load(x_in + c);
      Vec sum = hn::Zero(d);
      for (int64_t m = 0; m < taps; ++m) {
        Vec tap = lane.Load(in.weight + m * in.channels + c);
        if (kF == Activation::kSilu) tap = Silu(d, hn::Mul(tap, x));
        if (kF == Activation::kRelu) tap = hn::Max(hn::Mul(tap, x), hn::Zero(d));
        sum = hn::MulAdd(lane.Load(row + m * in.channels + c), tap, sum);
      }
      if (kF == Activation::kIdentity) sum = hn::Mul(sum, x);
      if (accumulate) sum = hn::Add(sum, lane.Load(out + c));
      lane.Store(sum, out + c);
    });
  }
}

void TapRowsAny(const TapRow& in, int64_t begin, int64_t end, bool accumulate, float* out,
                int64_t out_stride) {
  switch (in.f) {
    case Activation::kSilu:
      return TapRowsOf<Activation::kSilu>(in, begin, end, accumulate, out, out_stride);
    case Activation::kRelu:
      return TapRowsOf<Activation::kRelu>(in, begin, end, accumulate, out, out_stride);
    case Activation::kIdentity:
      return TapRowsOf<Activation::kIdentity>(in, begin, end, accumulate, out, out_stride);
  }
}

// Channels [begin, begin + width), width <= kFoldChannels, of one map or of as many neighbours.
void FoldChannels(const RowFold& fold, int64_t begin, int64_t width) {
  const F32 d;
  const int64_t map = begin / fold.channels_per_map;
  const bool own_maps = fold.channels_per_map == 1;
  HWY_ALIGN float total[kFoldChannels] = {};
  HWY_ALIGN float part[kFoldChannels];
  for (int64_t first = 0; first <= fold.target; first += kSumTokens) {
    std::fill_n(part, width, 0.0f);
    for (int64_t k = first; k < std::min(first + kSumTokens, fold.target + 1); ++k) {
      float* const row = fold.row + k * fold.row_stride + begin;
      const float* const alpha = fold.alpha + k * fold.maps + map;
      const float* const slope =
          fold.slope == nullptr ? nullptr : fold.slope + k * fold.slope_stride + begin;
      ForEachRegister(width, [&](int64_t c, auto lane) {
        const auto of_map = [&](const float* values) {
          return own_maps ? lane.Load(values + c) : hn::Set(d, *values);
        };
        Vec read = of_map(alpha);
        if (k == fold.target) read = hn::Add(read, of_map(fold.skip + map));
        read = hn::Mul(read, lane.Load(fold.scale + begin + c));
        if (slope != nullptr) read = hn::Mul(read, lane.Load(slope + c));
        lane.Store(read, row + c);
        lane.Store(hn::Add(lane.Load(part + c), read), part + c);
      });
    }
    for (int64_t c = 0; c < width; ++c) total[c] += part[c];
  }
  std::copy_n(total, width, fold.sums + begin);
}

void Sigmoids(float* c, int64_t count) {
  ForEachRegister(
      count, [&](int64_t i, auto lane) { lane.Store(Sigmoid(F32(), lane.Load(c + i)), c + i); });
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(TapRowsAny);
HWY_EXPORT(FoldChannels);
HWY_EXPORT(Sigmoids);

}  // namespace

void FoldRow(const RowFold& fold, int64_t begin, int64_t end) {
  const int64_t per_map = fold.channels_per_map, last = end * per_map;
  for (int64_t c = begin * per_map; c < last;) {
    const int64_t border = per_map == 1 ? last : (c / per_map + 1) * per_map;
    const int64_t next = std::min(border, c + kFoldChannels);
    HWY_DYNAMIC_DISPATCH(FoldChannels)(fold, c, next - c);
    c = next;
  }
}

void TapRows(const TapRow& in, int64_t begin, int64_t end, bool accumulate, float* out,
             int64_t out_stride) {
  HWY_DYNAMIC_DISPATCH(TapRowsAny)(in, begin, end, accumulate, out, out_stride);
}

void ActivationSlope(Activation f, std::span<float> c) {
  switch (f) {
    case Activation::kSilu:
      HWY_DYNAMIC_DISPATCH(Sigmoids)(c.data(), static_cast<int64_t>(c.size()));
      break;
    case Activation::kRelu:
      for (float& value : c) value = value > 0 ? 1.0f : 0.0f;
      break;
    case Activation::kIdentity:
      std::fill(c.begin(), c.end(), 1.0f);
      break;
  }
}

}  // namespace mambascope::kernels
#endif
