#include "server/kernels/ssd_backward.h"

#include <algorithm>

#include "server/base/array.h"
#include "server/base/check.h"
#include "server/kernels/ssd_backward_unit.h"
#include "server/kernels/sum_parts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/ssd_backward.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/lane_rows-inl.h"
#include "server/kernels/tile_product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// Where a chunk lies.
struct Span {
  int64_t begin, tokens;
};
inline Span ChunkSpan(const SsdBackwardInputs& in, int64_t chunk) {
  return {chunk * kQ, std::min(kQ, in.tokens - chunk * kQ)};
}

// Rows of `count` floats into padded ones; rows behind the last of a short chunk become zero.
void LoadRows(const float* from, int64_t stride, int64_t rows, int64_t count, int64_t padded,
              float* to) {
  for (int64_t i = 0; i < rows; ++i) std::copy_n(from + i * stride, count, to + i * padded);
  std::fill_n(to + rows * padded, (kQ - rows) * padded, 0.0f);
}

void LoadGroup(const SsdBackwardInputs& in, const SsdUnit& unit, Span span, SsdUnitScratch& s) {
  const int64_t at = span.begin * in.xbc_stride + unit.group * in.d_state;
  LoadRows(in.B + at, in.xbc_stride, span.tokens, in.d_state, s.N, s.B);
  LoadRows(in.C + at, in.xbc_stride, span.tokens, in.d_state, s.N, s.C);
}

// scores[i, j] = C[i] . B[j]
void Score(const SsdBackwardInputs& in, Span span, SsdUnitScratch& s) {
  Transpose(s.B, s.N, kQ, s.N, s.Bt, kQ);
  Product(Plain(s.C, s.N), Band::kAll, s.Bt, kQ, span.tokens, kQ, in.d_state, false, s.scores, kQ);
}

// delta and the decays of one head; tokens behind a short chunk have delta = 0 and decay 1.
void LoadDecays(const SsdBackwardInputs& in, int64_t head, Span span, SsdUnitScratch& s) {
  const F32 d;
  std::fill_n(s.delta, kQ, 0.0f);
  for (int64_t i = 0; i < span.tokens; ++i) {
    s.delta[i] = in.delta[(span.begin + i) * in.heads + head];
  }
  const Vec A = hn::Set(d, in.A[head] * 1.44269504f);
  for (int64_t i = 0; i < kQ; i += hn::Lanes(d)) {
    hn::Store(Exp2NonPositive(d, hn::Mul(hn::Load(d, s.delta + i), A)), d, s.decay + i);
  }
  float product = 1;
  for (int64_t i = 0; i < kQ; ++i) s.from_start[i] = product *= s.decay[i];
  product = 1;
  for (int64_t j = kQ - 1; j >= 0; product *= s.decay[j--]) s.to_end[j] = product;
}

// L[i, j] = prod_{k = j+1..i} a[k] for j <= i, else 0: multiplied token by token, because a
// quotient or a difference of long products would keep no digits of a short one.
void FormL(int64_t tokens, SsdUnitScratch& s) {
  std::fill_n(s.L, kQ, 0.0f);
  s.L[0] = 1;
  for (int64_t i = 1; i < tokens; ++i) {
    Scale(s.decay[i], s.L + (i - 1) * kQ, kQ, s.L + i * kQ);
    s.L[i * kQ + i] = 1;
  }
}

// dy, and dy times the decay from the chunk's start.
void LoadDy(const SsdBackwardInputs& in, int64_t head, Span span, SsdUnitScratch& s) {
  const int64_t channels = in.heads * in.head_dim;
  LoadRows(in.dy + span.begin * channels + head * in.head_dim, channels, span.tokens, in.head_dim,
           s.P, s.dy);
  for (int64_t i = 0; i < span.tokens; ++i) {
    Scale(s.from_start[i], s.dy + i * s.P, s.P, s.dy_decayed + i * s.P);
  }
}

// delta x, and the same times the decay to the chunk's end.
void LoadDrive(const SsdBackwardInputs& in, int64_t head, Span span, SsdUnitScratch& s) {
  LoadRows(in.x + span.begin * in.xbc_stride + head * in.head_dim, in.xbc_stride, span.tokens,
           in.head_dim, s.P, s.drive);
  for (int64_t j = 0; j < span.tokens; ++j) {
    Scale(s.delta[j], s.drive + j * s.P, s.P, s.drive + j * s.P);
    Scale(s.to_end[j], s.drive + j * s.P, s.P, s.drive_decayed + j * s.P);
  }
}

// u[j] = sum_n B[j, n] G[j, n]: first what comes from behind the chunk,
void UFromGradient(const SsdBackwardInputs& in, Span span, const float* gradient,
                   SsdUnitScratch& s) {
  if (span.begin + span.tokens == in.tokens) {
    std::fill_n(s.u, span.tokens * s.P, 0.0f);
    return;
  }
  Product(Plain(s.B, s.N), Band::kAll, gradient, s.P, span.tokens, s.P, in.d_state, false, s.u,
          s.P);
  for (int64_t j = 0; j < span.tokens; ++j) Scale(s.to_end[j], s.u + j * s.P, s.P, s.u + j * s.P);
}

// then what comes from the chunk's own dy.
void UFromChunk(Span span, SsdUnitScratch& s) {
  Multiply(s.L, s.scores, span.tokens * kQ, s.weights);
  Product(Transposed(s.weights, kQ), Band::kFromRow, s.dy, s.P, span.tokens, s.P, span.tokens, true,
          s.u, s.P);
}

// The gradient of the state before the chunk from that of the state after it. Nothing stands before
// the first chunk.
void StepGradient(const SsdBackwardInputs& in, Span span, float* gradient, SsdUnitScratch& s) {
  if (span.begin == 0) return;
  Scale(s.from_start[kQ - 1], gradient, in.d_state * s.P, gradient);
  Product(Transposed(s.C, s.N), Band::kAll, s.dy_decayed, s.P, in.d_state, s.P, span.tokens, true,
          gradient, s.P);
}

// dx (+)= delta u
void StoreDx(const SsdBackwardInputs& in, int64_t head, Span span, const SsdUnitScratch& s,
             int64_t stride, bool accumulate, float* dx) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), P = in.head_dim;
  for (int64_t j = 0; j < span.tokens; ++j) {
    float* row = dx + (span.begin + j) * stride + head * P;
    const Vec delta = hn::Set(d, s.delta[j]);
    for (int64_t p = 0; p < P; p += lanes) {
      Vec v = hn::Mul(delta, hn::Load(d, s.u + j * s.P + p));
      if (accumulate) v = hn::Add(v, LoadLanes(d, row + p, P - p));
      StoreLanes(v, d, row + p, P - p);
    }
  }
}

void AdjointUnit(const SsdBackwardInputs& in, const SsdUnit& unit, float* dx, int64_t stride,
                 bool accumulate, SsdUnitScratch& s) {
  for (int64_t chunk = SsdChunks(in.tokens) - 1; chunk >= 0; --chunk) {
    const Span span = ChunkSpan(in, chunk);
    LoadGroup(in, unit, span, s);
    Score(in, span, s);
    for (int64_t h = 0; h < unit.heads; ++h) {
      const int64_t head = unit.first_head + h;
      LoadDecays(in, head, span, s);
      FormL(span.tokens, s);
      LoadDy(in, head, span, s);
      UFromGradient(in, span, s.Gradient(h), s);
      UFromChunk(span, s);
      StoreDx(in, head, span, s, stride, accumulate, dx);
      StepGradient(in, span, s.Gradient(h), s);
    }
  }
}

// The states before each chunk, of the unit's heads: [head_dim, d_state] each, for the products
// that follow.
void KeepStates(const SsdBackwardInputs& in, const SsdUnit& unit, SsdUnitScratch& s) {
  for (int64_t chunk = 0; chunk + 1 < SsdChunks(in.tokens); ++chunk) {
    const Span span = ChunkSpan(in, chunk);
    LoadGroup(in, unit, span, s);
    for (int64_t h = 0; h < unit.heads; ++h) {
      LoadDecays(in, unit.first_head + h, span, s);
      LoadDrive(in, unit.first_head + h, span, s);
      float* after = s.State(h, chunk + 1);
      Scale(s.from_start[kQ - 1], s.State(h, chunk), in.head_dim * s.N, after);
      Product(Transposed(s.drive_decayed, s.P), Band::kAll, s.B, s.N, in.head_dim, s.N, span.tokens,
              true, after, s.N);
    }
  }
}

// T[i, j] = L[i, j] delta[j] (dy[i] . x[j]), added to the unit's; a gradient of scores.
// paths[i, j] = T[i, j] scores[i, j]: what flows from token j to token i.
void FormPaths(const SsdBackwardInputs& in, Span span, float* paths, SsdUnitScratch& s) {
  Transpose(s.drive, s.P, kQ, s.P, s.drive_t, kQ);
  Product(Plain(s.dy, s.P), Band::kAll, s.drive_t, kQ, span.tokens, kQ, in.head_dim, false, paths,
          kQ);
  Multiply(s.L, paths, span.tokens * kQ, paths);
  AddTo(paths, span.tokens * kQ, s.T);
  Multiply(s.scores, paths, span.tokens * kQ, paths);
}

// R[k] = sum_np G[k] a[k] state[k-1]: all that flows over the step from k - 1 to k. Paths inside
// the chunk, from before it (s), to behind it (q), and through all of it (`across`). Sums of paths
// only: the shorter recurrence R[k] = R[k+1] + dy y - dx x would leave a small rest of large terms.
void SumPaths(int64_t tokens, const float* paths, float across, SsdUnitScratch& s) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  HWY_ALIGN float to_here[kQ] = {};  // sum_{i >= k} paths[i, j]
  float before = across;
  for (int64_t k = tokens - 1; k >= 0; --k) {
    AddTo(paths + k * kQ, kQ, to_here);
    Vec sum = hn::Zero(d);
    for (int64_t j = 0; j < k; j += lanes) {
      sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, k - j), hn::Load(d, to_here + j)));
    }
    before += s.s[k];
    s.R[k] = before + hn::GetLane(hn::SumOfLanes(d, sum));
  }
  float behind = 0;
  for (int64_t k = 0; k < tokens; ++k) {
    s.R[k] += behind;
    behind += s.q[k];
  }
}

// dC += from_start dy state, dB += to_end delta x gradient: what the unit's head adds by the states
// at the chunk's ends. Returns what flows through the whole chunk.
float AddFromEnds(const SsdBackwardInputs& in, Span span, const float* state, const float* gradient,
                  SsdUnitScratch& s) {
  Product(Plain(s.dy_decayed, s.P), Band::kAll, state, s.N, span.tokens, s.N, in.head_dim, false,
          s.dC_head, s.N);
  for (int64_t i = 0; i < span.tokens; ++i) {
    s.s[i] = Dot(s.dC_head + i * s.N, s.C + i * s.N, s.N);
  }
  AddTo(s.dC_head, span.tokens * s.N, s.dC);
  Transpose(gradient, s.P, s.N, s.P, s.gradient_t, s.N);
  Product(Plain(s.drive_decayed, s.P), Band::kAll, s.gradient_t, s.N, span.tokens, s.N, in.head_dim,
          true, s.dB, s.N);
  return s.from_start[kQ - 1] * Dot(state, s.gradient_t, in.head_dim * s.N);
}

// ddelta[j] = u . x + A R
void StoreDdelta(const SsdBackwardInputs& in, int64_t head, Span span, const SsdUnitScratch& s,
                 float* ddelta) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), P = in.head_dim;
  for (int64_t j = 0; j < span.tokens; ++j) {
    const float* x = in.x + (span.begin + j) * in.xbc_stride + head * P;
    Vec sum = hn::Zero(d);
    for (int64_t p = 0; p < P; p += lanes) {
      sum = hn::MulAdd(LoadLanes(d, x + p, P - p), hn::Load(d, s.u + j * s.P + p), sum);
    }
    ddelta[(span.begin + j) * in.heads + head] =
        hn::GetLane(hn::SumOfLanes(d, sum)) + in.A[head] * s.R[j];
  }
}

void BackwardHead(const SsdBackwardInputs& in, int64_t head, int64_t h, int64_t chunk,
                  const SsdGradients& out, SsdUnitScratch& s) {
  const Span span = ChunkSpan(in, chunk);
  float* gradient = s.Gradient(h);
  LoadDecays(in, head, span, s);
  FormL(span.tokens, s);
  LoadDy(in, head, span, s);
  LoadDrive(in, head, span, s);
  UFromGradient(in, span, gradient, s);
  for (int64_t j = 0; j < span.tokens; ++j) s.q[j] = Dot(s.u + j * s.P, s.drive + j * s.P, s.P);
  UFromChunk(span, s);
  StoreDx(in, head, span, s, out.xbc_stride, out.accumulate_dx, out.dx);
  float* paths = s.weights;  // which UFromChunk has done with
  FormPaths(in, span, paths, s);
  const float across = AddFromEnds(in, span, s.State(h, chunk), gradient, s);
  SumPaths(span.tokens, paths, across, s);
  StoreDdelta(in, head, span, s, out.ddelta);
  StepGradient(in, span, gradient, s);
}

// dx and ddelta of the unit's heads, and their parts of dB and dC, [tokens, d_state] each.
void BackwardUnit(const SsdBackwardInputs& in, const SsdUnit& unit, const SsdGradients& out,
                  float* dB, float* dC, SsdUnitScratch& s) {
  KeepStates(in, unit, s);
  for (int64_t chunk = SsdChunks(in.tokens) - 1; chunk >= 0; --chunk) {
    const Span span = ChunkSpan(in, chunk);
    LoadGroup(in, unit, span, s);
    Score(in, span, s);
    std::fill_n(s.T, kQ * kQ, 0.0f);
    std::fill_n(s.dB, kQ * s.N, 0.0f);
    std::fill_n(s.dC, kQ * s.N, 0.0f);
    for (int64_t h = 0; h < unit.heads; ++h) {
      BackwardHead(in, unit.first_head + h, h, chunk, out, s);
    }
    Product(Plain(s.T, kQ), Band::kUpToRow, s.B, s.N, span.tokens, s.N, span.tokens, true, s.dC,
            s.N);
    Product(Transposed(s.T, kQ), Band::kFromRow, s.C, s.N, span.tokens, s.N, span.tokens, true,
            s.dB, s.N);
    for (int64_t i = 0; i < span.tokens; ++i) {
      std::copy_n(s.dB + i * s.N, in.d_state, dB + (span.begin + i) * in.d_state);
      std::copy_n(s.dC + i * s.N, in.d_state, dC + (span.begin + i) * in.d_state);
    }
  }
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(AdjointUnit);
HWY_EXPORT(BackwardUnit);

void Check(const SsdBackwardInputs& in) {
  MS_CHECK(in.tokens >= 0 && in.groups >= 1 && in.heads % in.groups == 0 && in.head_dim >= 1);
  MS_CHECK(in.d_state >= 1 && in.d_state <= 256);
  MS_CHECK(in.xbc_stride >= in.groups * in.d_state);
}

int64_t UnitsOfGroup(int64_t heads_of_group) {
  return (heads_of_group + kUnitHeads - 1) / kUnitHeads;
}

SsdUnit UnitAt(const SsdBackwardInputs& in, int64_t index) {
  const int64_t heads_of_group = in.heads / in.groups, units = UnitsOfGroup(heads_of_group);
  const int64_t group = index / units, first = index % units * kUnitHeads;
  return {group, group * heads_of_group + first, std::min(kUnitHeads, heads_of_group - first)};
}

}  // namespace

void SsdAdjoint(ThreadPool& pool, const SsdBackwardInputs& in, float* dx, int64_t dx_stride,
                bool accumulate) {
  Check(in);
  MS_CHECK(dx_stride >= in.heads * in.head_dim);
  pool.Run(in.groups * UnitsOfGroup(in.heads / in.groups), [&](int64_t index) {
    SsdUnitScratch scratch(in, /*gradients=*/false);
    HWY_DYNAMIC_DISPATCH(AdjointUnit)(in, UnitAt(in, index), dx, dx_stride, accumulate, scratch);
  });
}

void SsdBackward(ThreadPool& pool, const SsdBackwardInputs& in, const SsdGradients& out) {
  Check(in);
  const int64_t channels = in.heads * in.head_dim, N = in.d_state, part = in.tokens * N;
  MS_CHECK(std::min(in.xbc_stride, out.xbc_stride) >= std::max(channels, in.groups * N));
  const int64_t units = UnitsOfGroup(in.heads / in.groups);
  Array<float> parts(in.groups * units * 2 * part);
  pool.Run(in.groups * units, [&](int64_t index) {
    SsdUnitScratch scratch(in, /*gradients=*/true);
    float* dB = parts.data() + index * 2 * part;
    HWY_DYNAMIC_DISPATCH(BackwardUnit)(in, UnitAt(in, index), out, dB, dB + part, scratch);
  });
  pool.Split(in.tokens, 64, [&](int64_t begin, int64_t end) {
    for (int64_t group = 0; group < in.groups; ++group) {
      const float* dB = parts.data() + group * units * 2 * part;
      SumParts(dB, 2 * part, units, begin, end, N, out.xbc_stride, out.dB + group * N);
      SumParts(dB + part, 2 * part, units, begin, end, N, out.xbc_stride, out.dC + group * N);
    }
  });
}

int64_t SsdBackwardBytes(int64_t tokens, int64_t heads, int64_t head_dim, int64_t groups,
                         int64_t d_state, int threads) {
  const int64_t units = groups * UnitsOfGroup(heads / groups);
  const int64_t at_once = std::min<int64_t>(threads, units);
  const int64_t floats = 2 * units * tokens * d_state +
                         at_once * SsdUnitScratch::Floats(tokens, d_state, head_dim, true) +
                         kPad * (at_once + 1);
  return floats * static_cast<int64_t>(sizeof(float));
}

}  // namespace mambascope::kernels
#endif
