// Factors one chunk of a hidden-attention map for one block of channels, and computes the part of
// the map inside the chunk. Compiled once for each target (so no #pragma once).
#if defined(MAMBASCOPE_KERNELS_MAP_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MAMBASCOPE_KERNELS_MAP_CHUNK_INL_H_
#undef MAMBASCOPE_KERNELS_MAP_CHUNK_INL_H_
#else
#define MAMBASCOPE_KERNELS_MAP_CHUNK_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "hwy/cache_control.h"
#include "server/base/array.h"
#include "server/kernels/channel_group.h"
#include "server/kernels/lane_rows-inl.h"
#include "server/kernels/map_layout.h"
#include "server/kernels/map_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {

// sums[i] += the sum of the lanes of v[i].
HWY_INLINE void AddSums(Vec (&v)[kBase], float* sums) {
  const F32 d;
  int count = kBase;
  for (int step = 1; step < kLanes; step *= 2) {
    count /= 2;
    for (int i = 0; i < count; ++i) {
      v[i] = hn::Add(EvenLanes(v[2 * i + 1], v[2 * i]), OddLanes(v[2 * i + 1], v[2 * i]));
    }
  }
  for (int i = 0; i < count; ++i) {
    float* to = sums + i * kLanes;
    hn::StoreU(hn::Add(hn::LoadU(d, to), v[i]), d, to);
  }
}

// Scratch of one chunk.
struct ChunkScratch {
  explicit ChunkScratch(const Depth& depth)
      : delta(kBase * depth.channels),
        decay(kBase * depth.size()),
        carry(kChunk / kBase * depth.size()),
        mass(depth.channels * (kWidest + 1)) {
    std::fill(mass.begin(), mass.end(), 0.0f);
  }
  Array<float> delta;  // [channels / kLanes, kBase, kLanes] of the current base block
  Array<float> decay;  // [depth / kLanes, kBase, kLanes]    exp(delta A) of the current base block
  Array<float> carry;  // [kChunk / kBase, depth]  decay over each block that was merged so far
  Array<float> mass;   // [channels, kWidest] from tiles, then [channels] from base blocks
};

// delta of `rows` tokens from `first` on, zeros for the others of the base block.
inline void LoadDelta(const ChannelGroup& group, const Depth& depth, int64_t first, int64_t rows,
                      int64_t tokens, float* delta) {
  const F32 d;
  for (int64_t r = 0; r < kBase; ++r) {
    const float* from = group.delta(first + std::min(r, rows - 1));
    for (int64_t c = 0; c < depth.channels; c += kLanes) {
      hn::Store(r < rows ? hn::LoadU(d, from + c) : hn::Zero(d), d, delta + c * kBase + r * kLanes);
    }
    // Too far apart for the hardware to foresee.
    hwy::Prefetch(group.delta(std::min(first + kBase + r, tokens - 1)));
  }
}

// One register of depth of a base block: its decays, its rows of left relative to the block's first
// border, its columns of right relative to its last, and the decay over all of it. B and C [kBase].
template <Reduce kReduce>
HWY_INLINE void FactorGroup(Vec A, const float* B, const float* C, const float* delta, float* decay,
                            float* carry, float* left, float* right) {
  const F32 d;
  Vec product = hn::Set(d, 1.0f);
#pragma GCC unroll 16
  for (int r = 0; r < kBase; ++r) {
    const Vec step = Exp2NonPositive(d, hn::Mul(hn::Load(d, delta + r * kLanes), A));
    product = hn::Mul(product, step);
    hn::Store(step, d, decay + r * kLanes);
    hn::Store(hn::Mul(product, hn::Set(d, C[r])), d, left + r * kLanes);
  }
  hn::Store(product, d, carry);
  product = hn::Set(d, 1.0f);
  for (int part = kBase - kLanes; part >= 0; part -= kLanes) {
    Vec column[kLanes];
#pragma GCC unroll 16
    for (int r = kLanes - 1; r >= 0; --r) {
      const Vec input = hn::Mul(hn::Load(d, delta + (part + r) * kLanes), hn::Set(d, B[part + r]));
      column[r] = hn::Mul(product, input);
      product = hn::Mul(product, hn::Load(d, decay + (part + r) * kLanes));
    }
    Transpose(column);
    for (int i = 0; i < kLanes; ++i) hn::Store(column[i], d, right + i * kPanel<kReduce> + part);
  }
}

// All of a base block; left and right are those of its first token.
template <Reduce kReduce>
void FactorBase(const float* B, const float* C, const Depth& depth, const float* A,
                const float* delta, float* decay, float* carry, float* left, float* right) {
  const F32 d;
  for (int64_t n = 0; n < depth.states; ++n) {
    for (int64_t c = 0; c < depth.channels; c += kLanes) {
      const int64_t k = n * depth.channels + c;
      FactorGroup<kReduce>(hn::LoadU(d, A + k), B + n * kBase, C + n * kBase, delta + c * kBase,
                           decay + k * kBase, carry + k, left + k * kBase,
                           right + k * kPanel<kReduce>);
    }
  }
}

// Two columns of a base block below its diagonal, which have kBase - 1 elements together: those of
// column kHalf at sums[row], those of column kOther before them, from sums[1] on. h starts as a
// column's Bbar and decays down the rows.
template <Reduce kReduce, int kHalf>
HWY_INLINE void TriangleColumns(const float* B, const float* C, const Depth& depth,
                                const float* delta, const float* decay, float* sums, float* mass) {
  constexpr int kOther = kBase - 1 - kHalf;
  const F32 d;
  Vec alpha[kBase];
  for (int i = 0; i < kBase; ++i) alpha[i] = hn::Zero(d);
  for (int64_t c = 0; c < depth.channels; c += kLanes) {
    const Vec delta_half = hn::Load(d, delta + c * kBase + kHalf * kLanes);
    const Vec delta_other = hn::Load(d, delta + c * kBase + kOther * kLanes);
    for (int64_t n = 0; n < depth.states; ++n) {
      const float* step = decay + (n * depth.channels + c) * kBase;
      const float *Bn = B + n * kBase, *Cn = C + n * kBase;
      Vec h = hn::Mul(delta_half, hn::Set(d, Bn[kHalf]));
#pragma GCC unroll 16
      for (int i = kHalf + 1; i < kBase; ++i) {
        h = hn::Mul(h, hn::Load(d, step + i * kLanes));
        alpha[i] = hn::MulAdd(h, hn::Set(d, Cn[i]), alpha[i]);
      }
      h = hn::Mul(delta_other, hn::Set(d, Bn[kOther]));
#pragma GCC unroll 16
      for (int i = 1; i <= kHalf; ++i) {
        h = hn::Mul(h, hn::Load(d, step + (kOther + i) * kLanes));
        alpha[i] = hn::MulAdd(h, hn::Set(d, Cn[kOther + i]), alpha[i]);
      }
    }
    if constexpr (kReduce == Reduce::kSum) continue;
    for (int i = 0; i < kBase; ++i) alpha[i] = hn::Abs(alpha[i]);
    if constexpr (kReduce == Reduce::kMagnitude) {
      AddSums(alpha, sums);
    } else {
      Vec sum = hn::Load(d, mass + c);
      for (int i = 0; i < kBase; ++i) sum = hn::Add(sum, alpha[i]);
      hn::Store(sum, d, mass + c);
    }
    for (int i = 0; i < kBase; ++i) alpha[i] = hn::Zero(d);
  }
  if constexpr (kReduce == Reduce::kSum) AddSums(alpha, sums);
}

// The base block below its diagonal: added to `map`, rows of `stride`, or to the channels' mass.
template <Reduce kReduce, int kHalf = 0>
HWY_INLINE void Triangle(const float* B, const float* C, const Depth& depth, const float* delta,
                         const float* decay, int64_t rows, float* map, int64_t stride,
                         float* mass) {
  HWY_ALIGN float sums[kBase] = {};
  TriangleColumns<kReduce, kHalf>(B, C, depth, delta, decay, sums, mass);
  if constexpr (kReduce != Reduce::kMass) {
    constexpr int kOther = kBase - 1 - kHalf;
    for (int64_t i = kHalf + 1; i < rows; ++i) map[i * stride + kHalf] += sums[i];
    for (int64_t i = kOther + 1; i < rows; ++i) map[i * stride + kOther] += sums[i - kOther];
  }
  if constexpr (kHalf + 1 < kBase / 2) {
    Triangle<kReduce, kHalf + 1>(B, C, depth, delta, decay, rows, map, stride, mass);
  }
}

// to[i, k] = left[i, k] by[k] for whole base blocks; `to` may be `left`.
inline void ScaleRows(const float* left, int64_t rows, int64_t size, const float* by, float* to) {
  const F32 d;
  for (int64_t i = 0; i < rows; i += kBase) {
    for (int64_t k = 0; k < size; k += kLanes) {
      const Vec factor = hn::Load(d, by + k);
      const int64_t at = i * size + k * kBase;
      for (int64_t r = 0; r < kGroupSize; r += kLanes) {
        hn::Store(hn::Mul(hn::Load(d, left + at + r), factor), d, to + at + r);
      }
    }
  }
}

// by[k] *= with[k], the decay over two blocks.
inline void JoinCarry(const float* with, int64_t size, float* by) {
  const F32 d;
  for (int64_t k = 0; k < size; k += kLanes) {
    hn::Store(hn::Mul(hn::Load(d, by + k), hn::Load(d, with + k)), d, by + k);
  }
}

// The same in place for columns of panels: right[k, j] *= by[k].
template <Reduce kReduce>
void ScaleColumns(float* right, int64_t columns, int64_t size, const float* by) {
  const F32 d;
  constexpr int64_t kWidth = kPanel<kReduce>;
  for (int64_t j = 0; j < columns; j += kWidth) {
    const int64_t width = std::min(columns - j, kWidth);
    for (int64_t k = 0; k < size; ++k) {
      const Vec factor = hn::Set(d, by[k]);
      float* to = right + j * size + k * kWidth;
      for (int64_t v = 0; v < width; v += kLanes) {
        hn::Store(hn::Mul(hn::Load(d, to + v), factor), d, to + v);
      }
    }
  }
}

// mass[c] += sum over a base block of |alpha[c, i, i]|.
inline void AddDiagonal(const float* B, const float* C, const Depth& depth, const float* delta,
                        float* mass) {
  for (int64_t r = 0; r < kBase; ++r) {
    float self = 0;
    for (int64_t n = 0; n < depth.states; ++n) self += C[n * kBase + r] * B[n * kBase + r];
    for (int64_t c = 0; c < depth.channels; ++c) {
      mass[c] += std::fabs(self) * delta[(c / kLanes * kBase + r) * kLanes + c % kLanes];
    }
  }
}

// Factors chunk number `chunk` and adds what its tokens see of each other to `map`, the whole map;
// with kMass it goes to mass [depth.channels] instead.
template <Reduce kReduce>
void FactorChunkFor(const ScanParameters& scan, const PaddedBC& bc, const ChannelGroup& group,
                    const Depth& depth, int64_t chunk, const Factors& out, float* map,
                    float* mass) {
  const F32 d;
  constexpr int64_t kWidth = kPanel<kReduce>;
  const int64_t size = depth.size(), stride = scan.tokens;
  const int64_t begin = chunk * kChunk, tokens = std::min(kChunk, scan.tokens - begin);
  ChunkScratch scratch(depth);
  float* tile_mass = scratch.mass.data();
  float* base_mass = tile_mass + depth.channels * kWidest;
  const auto at = [&](int64_t i, int64_t j) {
    return kReduce == Reduce::kMass ? tile_mass : map + (begin + i) * stride + begin + j;
  };

  for (int64_t base = 0; base < tokens; base += kBase) {
    const int64_t first = begin + base, rows = std::min(kBase, tokens - base);
    float *delta = scratch.delta.data(), *decay = scratch.decay.data();
    const float *B = bc.B + first * depth.states, *C = bc.C + first * depth.states;
    LoadDelta(group, depth, first, rows, scan.tokens, delta);
    FactorBase<kReduce>(B, C, depth, group.A(), delta, decay,
                        scratch.carry.data() + base / kBase * size, out.left + first * size,
                        out.right + first / kWidth * kWidth * size + first % kWidth);
    Triangle<kReduce>(B, C, depth, delta, decay, rows, at(base, base), stride, base_mass);
    if constexpr (kReduce == Reduce::kMass) AddDiagonal(B, C, depth, delta, base_mass);
  }

  // Neighbours become one block twice as long: first what the second sees of the first, then both
  // relative to the borders of the whole.
  for (int64_t half = kBase; half < kChunk; half *= 2) {
    for (int64_t start = 0; start + half < tokens; start += 2 * half) {
      const int64_t middle = start + half, rows = std::min(half, tokens - middle);
      float* left = out.left + (begin + middle) * size;
      float* right = out.right + (begin + start) / kWidth * kWidth * size + start % kWidth;
      float* first_carry = scratch.carry.data() + start / kBase * size;
      float* second_carry = scratch.carry.data() + middle / kBase * size;
      Multiply<kReduce>(left, right, depth, rows, half, at(middle, start), stride);
      ScaleRows(left, rows, size, first_carry, left);
      ScaleColumns<kReduce>(right, half, size, second_carry);
      JoinCarry(second_carry, size, first_carry);
    }
  }
  std::copy_n(scratch.carry.data(), size, out.carry + chunk * size);
  if constexpr (kReduce == Reduce::kMass) {
    for (int64_t c = 0; c < depth.channels; ++c) {
      mass[c] = base_mass[c] + hn::GetLane(hn::SumOfLanes(d, hn::Load(d, tile_mass + c * kWidest)));
    }
  }
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
