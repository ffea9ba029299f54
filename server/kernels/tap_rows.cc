#include "server/kernels/tap_rows.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/tap_rows.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// Lanes [c, c + lanes) of a row of `channels`; those beyond it read as zero and are not written.
HWY_INLINE Vec LoadAt(F32 d, const float* p, int64_t c, int64_t channels) {
  const int64_t lanes = hn::Lanes(d);
  return c + lanes <= channels ? hn::LoadU(d, p + c) : LoadPart(d, p + c, channels - c);
}

template <Activation kF>
void TapRowsOf(const TapRow& in, int64_t begin, int64_t end, bool accumulate, float* out,
               int64_t out_stride) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), channels = in.channels;
  for (int64_t j = begin; j < end; ++j, out += out_stride) {
    const float* row = in.row + j * channels;
    const float* x_in = in.x_in + j * in.x_stride;
    const int64_t taps = std::min(in.taps, in.target + 1 - j);
    for (int64_t c = 0; c < channels; c += lanes) {
      const Vec x = LoadAt(d, x_in, c, channels);
      Vec sum = hn::Zero(d);
      for (int64_t m = 0; m < taps; ++m) {
        const Vec read = LoadAt(d, row + m * channels, c, channels);
        Vec tap = LoadAt(d, in.weight + m * channels, c, channels);
        if (kF == Activation::kSilu) tap = Silu(d, hn::Mul(tap, x));
        if (kF == Activation::kRelu) tap = hn::Max(hn::Mul(tap, x), hn::Zero(d));
        sum = hn::MulAdd(read, tap, sum);
      }
      if (kF == Activation::kIdentity) sum = hn::Mul(sum, x);
      if (accumulate) sum = hn::Add(sum, LoadAt(d, out, c, channels));
      if (c + lanes <= channels) {
        hn::StoreU(sum, d, out + c);
      } else {
        StorePart(sum, d, out + c, channels - c);
      }
    }
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

void Sigmoids(float* c, int64_t count) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(Sigmoid(d, hn::LoadU(d, c + i)), d, c + i);
  if (i < count) StorePart(Sigmoid(d, LoadPart(d, c + i, count - i)), d, c + i, count - i);
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(TapRowsAny);
HWY_EXPORT(Sigmoids);

// Tokens whose sum is taken apart: a single fp32 sum over a long input would round too often.
constexpr int64_t kSumTokens = 64;
constexpr int64_t kFoldChannels = 64;

// Channels [begin, end), at most kFoldChannels, of one map or of as many neighbours.
void FoldChannels(const RowFold& fold, int64_t begin, int64_t end) {
  const int64_t width = end - begin, per_map = fold.channels_per_map;
  const float* const scale = fold.scale + begin;
  float total[kFoldChannels] = {}, part[kFoldChannels];
  for (int64_t first = 0; first <= fold.target; first += kSumTokens) {
    std::fill_n(part, width, 0.0f);
    for (int64_t k = first; k < std::min(first + kSumTokens, fold.target + 1); ++k) {
      float* const row = fold.row + k * fold.row_stride + begin;
      const float* const alpha = fold.alpha + k * fold.maps;
      if (per_map == 1) {
        for (int64_t c = 0; c < width; ++c) row[c] = alpha[begin + c];
      } else {
        std::fill_n(row, width, alpha[begin / per_map]);
      }
      if (k == fold.target) {
        for (int64_t c = 0; c < width; ++c) row[c] += fold.skip[(begin + c) / per_map];
      }
      for (int64_t c = 0; c < width; ++c) row[c] *= scale[c];
      if (fold.slope != nullptr) {
        const float* const slope = fold.slope + k * fold.slope_stride + begin;
        for (int64_t c = 0; c < width; ++c) row[c] *= slope[c];
      }
      for (int64_t c = 0; c < width; ++c) part[c] += row[c];
    }
    for (int64_t c = 0; c < width; ++c) total[c] += part[c];
  }
  std::copy_n(total, width, fold.sums + begin);
}

}  // namespace

void FoldRow(const RowFold& fold, int64_t begin, int64_t end) {
  const int64_t per_map = fold.channels_per_map, last = end * per_map;
  for (int64_t c = begin * per_map; c < last;) {
    const int64_t border = per_map == 1 ? last : (c / per_map + 1) * per_map;
    const int64_t next = std::min(border, c + kFoldChannels);
    FoldChannels(fold, c, next);
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
