// Maps over all channels as products of matrices (methods.md, section 9, no. 1). Decays are
// factored at the borders of chunks; what one chunk sees of an earlier one is then left right^T.
//
// In groups of channel blocks: first every chunk is factored, each by one task; then every strip of
// rows adds the chunks before it, each by one task. An element of the map is written by one task at
// a time and in the order of the channel blocks, so threads change no bit.
#include <algorithm>
#include <cmath>
#include <vector>

#include "server/base/array.h"
#include "server/base/check.h"
#include "server/kernels/channel_group.h"
#include "server/kernels/hidden_attention.h"
#include "server/kernels/map_layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/mean_map.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/map_chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {

void FactorChunk(Reduce reduce, const ScanParameters& scan, const PaddedBC& bc,
                 const ChannelGroup& group, const Depth& depth, int64_t chunk, const Factors& out,
                 float* mass) {
  switch (reduce) {
    case Reduce::kSum:
      return FactorChunkFor<Reduce::kSum>(scan, bc, group, depth, chunk, out, mass);
    case Reduce::kMagnitude:
      return FactorChunkFor<Reduce::kMagnitude>(scan, bc, group, depth, chunk, out, mass);
    case Reduce::kMass:
      return FactorChunkFor<Reduce::kMass>(scan, bc, group, depth, chunk, out, mass);
  }
}

// What rows [begin, begin + rows) of one chunk see of all earlier chunks. `out` is the map's row
// `begin`, or with kMass the mass of each channel. `left` is scratch, [rows, depth].
template <Reduce kReduce>
void AddChunksBeforeFor(const Factors& factors, const Depth& depth, int64_t begin, int64_t rows,
                        float* left, float* out, int64_t stride) {
  const F32 d;
  const int64_t size = depth.size(), padded = RoundUp(rows, kBase);
  Array<float> tile_mass(kReduce == Reduce::kMass ? depth.channels * kWidest : 0);
  std::fill(tile_mass.begin(), tile_mass.end(), 0.0f);
  const float* rows_left = factors.left + begin * size;
  for (int64_t chunk = begin / kChunk - 1; chunk >= 0; --chunk) {
    float* to = kReduce == Reduce::kMass ? tile_mass.data() : out + chunk * kChunk;
    Multiply<kReduce>(rows_left, factors.right + chunk * kChunk * size, depth, rows, kChunk, to,
                      stride);
    if (chunk == 0) break;
    if (rows_left != left) {
      std::copy_n(rows_left, padded * size, left);
      rows_left = left;
    }
    ScaleRows(left, padded, size, factors.carry + chunk * size);
  }
  if constexpr (kReduce == Reduce::kMass) {
    for (int64_t c = 0; c < depth.channels; ++c) {
      out[c] = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, tile_mass.data() + c * kWidest)));
    }
  }
}

void AddChunksBefore(Reduce reduce, const Factors& factors, const Depth& depth, int64_t begin,
                     int64_t rows, float* left, float* out, int64_t stride) {
  switch (reduce) {
    case Reduce::kSum:
      return AddChunksBeforeFor<Reduce::kSum>(factors, depth, begin, rows, left, out, stride);
    case Reduce::kMagnitude:
      return AddChunksBeforeFor<Reduce::kMagnitude>(factors, depth, begin, rows, left, out, stride);
    case Reduce::kMass:
      return AddChunksBeforeFor<Reduce::kMass>(factors, depth, begin, rows, left, out, stride);
  }
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(FactorChunk);
HWY_EXPORT(AddChunksBefore);

// Rows of one task: each column panel is read from the cache once for all of them.
constexpr int64_t kStrip = 64;
// Factors of a group of channel blocks together; more blocks mean fewer waits of one thread for
// another, less memory stays closer.
constexpr int64_t kGroupBytes = int64_t{8} << 20;
// A block's depth in states x channels where d_state allows: a column panel of it fills most of a
// first cache of 48 KiB.
constexpr int64_t kDepth = 256;

// The factors of `blocks` channel blocks.
class Workspace {
 public:
  Workspace(int64_t tokens, const Depth& depth, int64_t blocks)
      : padded_(RoundUp(tokens, kPanel)),
        depth_(depth.size()),
        chunks_(RoundUp(tokens, kChunk) / kChunk),
        numbers_(blocks * PerBlock(padded_, depth_, chunks_)) {}

  static int64_t PerBlock(int64_t padded, int64_t depth, int64_t chunks) {
    return padded * (2 * depth + kChunk + kBase / 2) + chunks * depth;
  }

  Factors Block(int64_t block) {
    float* at = numbers_.data() + block * PerBlock(padded_, depth_, chunks_);
    const auto take = [&](int64_t size) {
      float* taken = at;
      at += size;
      return taken;
    };
    return {take(padded_ * depth_), take(padded_ * depth_), take(chunks_ * depth_),
            take(padded_ * kChunk), take(padded_ * (kBase / 2))};
  }

 private:
  int64_t padded_, depth_, chunks_;
  Array<float> numbers_;
};

// One call: a scan, its channels and what to reduce.
class MapOfAll {
 public:
  MapOfAll(ThreadPool& pool, const ScanParameters& scan, std::span<const int32_t> channels,
           Reduce reduce)
      : pool_(pool),
        scan_(scan),
        channels_(channels),
        count_(ChannelCount(scan, channels)),
        reduce_(reduce),
        chunks_(RoundUp(scan.tokens, kChunk) / kChunk),
        strips_(RoundUp(scan.tokens, kStrip) / kStrip) {
    const int64_t wanted = std::max<int64_t>(kDepth / scan.d_state, 1);
    depth_ = {scan.d_state, RoundUp(std::min(wanted, count_), kWidest)};
    blocks_ = RoundUp(count_, depth_.channels) / depth_.channels;
    PadBC();
  }

  // `map` is null for kMass, `mass` for the others.
  void Run(float* map, float* mass) {
    const int64_t block_bytes =
        Workspace::PerBlock(RoundUp(scan_.tokens, kPanel), depth_.size(), chunks_) * sizeof(float);
    const int64_t group = std::clamp<int64_t>(kGroupBytes / block_bytes, 1, blocks_);
    Workspace workspace(scan_.tokens, depth_, group);
    if (map != nullptr) StartMap(map);
    Array<float> parts(mass == nullptr ? 0 : group * (chunks_ + strips_) * depth_.channels);
    for (int64_t first = 0; first < blocks_; first += group) {
      const int64_t blocks = std::min(group, blocks_ - first);
      const auto part = [&](int64_t block, int64_t index) {
        return mass == nullptr
                   ? nullptr
                   : parts.data() + (block * (chunks_ + strips_) + index) * depth_.channels;
      };
      std::vector<ChannelGroup> groups;
      for (int64_t b = 0; b < blocks; ++b) {
        groups.emplace_back(scan_, channels_, (first + b) * depth_.channels, depth_.channels);
      }
      pool_.Run(blocks * chunks_, [&](int64_t task) {
        const int64_t b = task / chunks_, chunk = task % chunks_;
        HWY_DYNAMIC_DISPATCH(FactorChunk)
        (reduce_, scan_, {B_.data(), C_.data()}, groups[b], depth_, chunk, workspace.Block(b),
         part(b, chunk));
      });
      pool_.Run(strips_, [&](int64_t task) {
        const int64_t strip = strips_ - 1 - task;  // long ones first
        const int64_t begin = strip * kStrip, rows = std::min(kStrip, scan_.tokens - begin);
        Array<float> left(kStrip * depth_.size());
        for (int64_t b = 0; b < blocks; ++b) {
          const Factors factors = workspace.Block(b);
          float* out = map == nullptr ? part(b, chunks_ + strip) : map + begin * scan_.tokens;
          if (map != nullptr) AddLocal(factors, begin, rows, map);
          HWY_DYNAMIC_DISPATCH(AddChunksBefore)
          (reduce_, factors, depth_, begin, rows, left.data(), out, scan_.tokens);
        }
      });
      if (mass == nullptr) continue;
      for (int64_t b = 0; b < blocks; ++b) {
        for (int64_t c = 0; c < groups[b].count(); ++c) {
          double sum = 0;
          for (int64_t p = 0; p < chunks_ + strips_; ++p) sum += part(b, p)[c];
          mass[(first + b) * depth_.channels + c] = static_cast<float>(sum);
        }
      }
    }
  }

 private:
  // C carries the 1 / channels of a mean.
  void PadBC() {
    const int64_t size = RoundUp(scan_.tokens, kPanel) * scan_.d_state;
    B_ = Array<float>(size);
    C_ = Array<float>(size);
    std::fill(B_.begin(), B_.end(), 0.0f);
    std::fill(C_.begin(), C_.end(), 0.0f);
    const float scale = reduce_ == Reduce::kMass ? 1.0f : 1.0f / static_cast<float>(count_);
    for (int64_t i = 0; i < scan_.tokens; ++i) {
      for (int64_t n = 0; n < scan_.d_state; ++n) {
        B_[i * scan_.d_state + n] = scan_.B[i * scan_.bc_stride + n];
        C_[i * scan_.d_state + n] = scan_.C[i * scan_.bc_stride + n] * scale;
      }
    }
  }

  // Zeros but for the diagonal, alpha[d, i, i] = delta[i, d] C[i] . B[i].
  void StartMap(float* map) {
    pool_.Split(scan_.tokens, 16, [&](int64_t begin, int64_t end) {
      std::fill_n(map + begin * scan_.tokens, (end - begin) * scan_.tokens, 0.0f);
      for (int64_t i = begin; i < end; ++i) {
        float self = 0, delta = 0;
        for (int64_t n = 0; n < scan_.d_state; ++n) {
          self += C_[i * scan_.d_state + n] * B_[i * scan_.d_state + n];
        }
        for (int64_t c = 0; c < count_; ++c) {
          delta += scan_.delta[i * scan_.d_inner + (channels_.empty() ? c : channels_[c])];
        }
        map[i * scan_.tokens + i] =
            (reduce_ == Reduce::kMagnitude ? std::fabs(self) : self) * delta;
      }
    });
  }

  // The part inside chunks, of rows [begin, begin + rows).
  void AddLocal(const Factors& factors, int64_t begin, int64_t rows, float* map) const {
    for (int64_t i = begin; i < begin + rows; ++i) {
      const int64_t chunk = i / kChunk * kChunk, base = i / kBase * kBase;
      float* to = map + i * scan_.tokens + chunk;
      const float* from = factors.local + i * kChunk;
      for (int64_t j = 0; j < base - chunk; ++j) to[j] += from[j];
    }
    for (int64_t base = begin; base < begin + rows; base += kBase) {
      const float* triangle = factors.triangles + base * (kBase / 2);
      for (int64_t half = 0; half < kBase / 2; ++half) {
        for (int64_t index = 1; index < kBase; ++index) {
          const auto [row, column] = EntryOf(half, index);
          if (base + row >= scan_.tokens) continue;
          map[(base + row) * scan_.tokens + base + column] += triangle[half * kBase + index];
        }
      }
    }
  }

  ThreadPool& pool_;
  const ScanParameters& scan_;
  const std::span<const int32_t> channels_;
  const int64_t count_;
  const Reduce reduce_;
  const int64_t chunks_, strips_;
  Depth depth_;
  int64_t blocks_;
  Array<float> B_, C_;
};

}  // namespace

void MeanMap(ThreadPool& pool, const ScanParameters& scan, float* map) {
  MapOfAll(pool, scan, {}, Reduce::kSum).Run(map, nullptr);
}

void MeanMapOfChannels(ThreadPool& pool, const ScanParameters& scan,
                       std::span<const int32_t> channels, float* map) {
  MS_CHECK(!channels.empty());
  for (const int32_t channel : channels) MS_CHECK(0 <= channel && channel < scan.d_inner);
  MapOfAll(pool, scan, channels, Reduce::kSum).Run(map, nullptr);
}

void AbsMeanMap(ThreadPool& pool, const ScanParameters& scan, float* map) {
  MapOfAll(pool, scan, {}, Reduce::kMagnitude).Run(map, nullptr);
}

void ChannelMass(ThreadPool& pool, const ScanParameters& scan, float* mass) {
  MapOfAll(pool, scan, {}, Reduce::kMass).Run(nullptr, mass);
}

}  // namespace mambascope::kernels
#endif
