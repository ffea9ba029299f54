#include "server/kernels/causal_conv1d.h"

#include <algorithm>

#include "server/base/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/causal_conv1d.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

HWY_INLINE Vec Activate(F32 d, Activation activation, Vec c) {
  switch (activation) {
    case Activation::kSilu:
      return Silu(d, c);
    case Activation::kRelu:
      return hn::Max(hn::Zero(d), c);  // in this order x86 hands a NaN on
    case Activation::kIdentity:
      break;
  }
  return c;
}

// weight[channel + lane, tap] for the lanes in use.
HWY_INLINE Vec TapWeight(F32 d, const ConvInputs& in, int64_t channel, int64_t tap, size_t count) {
  HWY_ALIGN float lanes[HWY_MAX_BYTES / sizeof(float)] = {};
  for (size_t i = 0; i < count; ++i) lanes[i] = in.weight[(channel + i) * in.taps + tap];
  return hn::Load(d, lanes);
}

// Tokens that pass over a register of channels before the next register's turn. Few rows at a time
// are few streams, which the hardware fetches ahead: 1.4 ms for 1024 tokens of 1536 channels where
// all tokens at once took 4.4 ms (medians of 9 alternating rounds, one thread's CPU time, Sapphire
// Rapids VM under a load of 12).
constexpr int64_t kTileTokens = 8;

// Tokens [begin, end) of sequence s. The last taps - 1 inputs stay in registers.
template <int kTaps, bool kAllLanes>
void ConvTile(const ConvInputs& in, const ConvOutputs& out, size_t s, int64_t begin, int64_t end,
              int64_t channel, size_t count) {
  const Lane<kAllLanes> lane{F32(), count};
  const F32 d;
  float* state = out.conv_state[s] + channel;
  Vec weight[kTaps], window[kTaps];
  if constexpr (kTaps == 4 && kAllLanes) {
    hn::LoadInterleaved4(d, in.weight + channel * 4, weight[0], weight[1], weight[2], weight[3]);
  } else {
    for (int k = 0; k < kTaps; ++k) weight[k] = TapWeight(d, in, channel, k, count);
  }
  const Vec bias = in.bias == nullptr ? hn::Zero(d) : lane.Load(in.bias + channel);
  for (int k = 0; k < kTaps - 1; ++k) {
    const int64_t i = begin - (kTaps - 1) + k;
    window[k] = lane.Load(i < in.seq_start[s] ? state + (begin - in.seq_start[s] + k) * in.channels
                                              : in.x_in + i * in.x_stride + channel);
  }
  for (int64_t i = begin; i < end; ++i) {
    window[kTaps - 1] = lane.Load(in.x_in + i * in.x_stride + channel);
    Vec c = bias;
    for (int k = 0; k < kTaps; ++k) c = hn::MulAdd(weight[k], window[k], c);
    lane.Store(Activate(d, in.activation, c), out.x + i * in.channels + channel);
    for (int k = 0; k < kTaps - 1; ++k) window[k] = window[k + 1];
  }
  if (end < in.seq_start[s + 1]) return;
  for (int k = 0; k < kTaps - 1; ++k) lane.Store(window[k], state + k * in.channels);
}

// Any number of taps, no window in registers. No published model needs it.
template <bool kAllLanes>
void ConvChannelsManyTaps(const ConvInputs& in, const ConvOutputs& out, int64_t channel,
                          size_t count) {
  const Lane<kAllLanes> lane{F32(), count};
  const F32 d;
  const int64_t before = in.taps - 1;
  const Vec bias = in.bias == nullptr ? hn::Zero(d) : lane.Load(in.bias + channel);
  for (size_t s = 0; s + 1 < in.seq_start.size(); ++s) {
    float* state = out.conv_state[s] + channel;
    const int64_t begin = in.seq_start[s], tokens = in.seq_start[s + 1] - begin;
    const float* x_in = in.x_in + begin * in.x_stride + channel;
    for (int64_t i = 0; i < tokens; ++i) {
      Vec c = bias;
      for (int64_t k = 0; k < in.taps; ++k) {
        const int64_t j = i - before + k;
        const float* input = j < 0 ? state + (before + j) * in.channels : x_in + j * in.x_stride;
        c = hn::MulAdd(TapWeight(d, in, channel, k, count), lane.Load(input), c);
      }
      lane.Store(Activate(d, in.activation, c), out.x + (begin + i) * in.channels + channel);
    }
    for (int64_t k = 0; k < before; ++k) {
      const int64_t j = tokens - before + k;
      const float* input = j < 0 ? state + (before + j) * in.channels : x_in + j * in.x_stride;
      lane.Store(lane.Load(input), state + k * in.channels);
    }
  }
}

template <int kTaps>
void ConvTiles(const ConvInputs& in, const ConvOutputs& out, int64_t first, int64_t last) {
  const int64_t lanes = hn::Lanes(F32());
  for (size_t s = 0; s + 1 < in.seq_start.size(); ++s) {
    const int64_t tokens_end = in.seq_start[s + 1];
    for (int64_t i = in.seq_start[s]; i < tokens_end; i += kTileTokens) {
      const int64_t end = std::min(i + kTileTokens, tokens_end);
      int64_t channel = first;
      for (; channel + lanes <= last; channel += lanes) {
        ConvTile<kTaps, true>(in, out, s, i, end, channel, lanes);
      }
      if (channel < last) ConvTile<kTaps, false>(in, out, s, i, end, channel, last - channel);
    }
  }
}

// Channels [first, last) of all tokens.
void ConvRange(const ConvInputs& in, const ConvOutputs& out, int64_t first, int64_t last) {
  switch (in.taps) {
    case 1:
      return ConvTiles<1>(in, out, first, last);
    case 2:
      return ConvTiles<2>(in, out, first, last);
    case 3:
      return ConvTiles<3>(in, out, first, last);
    case 4:
      return ConvTiles<4>(in, out, first, last);
  }
  const int64_t lanes = hn::Lanes(F32());
  int64_t channel = first;
  for (; channel + lanes <= last; channel += lanes) {
    ConvChannelsManyTaps<true>(in, out, channel, lanes);
  }
  if (channel < last) ConvChannelsManyTaps<false>(in, out, channel, last - channel);
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(ConvRange);

// The widest register holds 16 channels.
constexpr int64_t kRegisterChannels = 16;
// Below this many outputs, waking another thread costs more than the work.
constexpr int64_t kWorthSplitting = 16384;

}  // namespace

void CausalConv1d(ThreadPool& pool, const ConvInputs& in, const ConvOutputs& out) {
  MS_CHECK(in.taps >= 1 && in.x_stride >= in.channels && !in.seq_start.empty());
  MS_CHECK(out.conv_state.size() + 1 == in.seq_start.size());
  const int64_t work = (in.seq_start.back() - in.seq_start.front()) * in.channels;
  const bool alone = work < kWorthSplitting;
  pool.Split(in.channels, alone ? std::max<int64_t>(in.channels, 1) : kRegisterChannels,
             [&](int64_t begin, int64_t end) {
               HWY_DYNAMIC_DISPATCH(ConvRange)(in, out, begin, end);
             });
}

}  // namespace mambascope::kernels
#endif
