// Maps over all channels as products of matrices (methods.md, section 9, no. 1). Decays are
// factored at the borders of chunks; what one chunk sees of an earlier one is then left right^T.
//
// Channel block after channel block: one task factors a chunk and adds what it sees of itself, one
// task adds to a strip of rows what it sees of earlier chunks. The strips of a block run beside the
// chunks of the next. An element is written by one task at a time and in the order of the blocks,
// so threads change no bit.
#include <algorithm>
#include <cmath>
#include <optional>

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

int64_t Lanes() { return kLanes; }

void FactorChunk(Reduce reduce, const ScanParameters& scan, const PaddedBC& bc,
                 const ChannelGroup& group, const Depth& depth, int64_t chunk, const Factors& out,
                 float* map, float* mass) {
  switch (reduce) {
    case Reduce::kSum:
      return FactorChunkFor<Reduce::kSum>(scan, bc, group, depth, chunk, out, map, mass);
    case Reduce::kMagnitude:
      return FactorChunkFor<Reduce::kMagnitude>(scan, bc, group, depth, chunk, out, map, mass);
    case Reduce::kMass:
      return FactorChunkFor<Reduce::kMass>(scan, bc, group, depth, chunk, out, map, mass);
  }
}

// What rows [begin, begin + rows) of one chunk see of all earlier chunks. `out` is the map's row
// `begin`, or with kMass the mass of each channel. `scratch` [rows rounded up, depth].
template <Reduce kReduce>
void AddChunksBeforeFor(const Factors& factors, const Depth& depth, int64_t begin, int64_t rows,
                        float* scratch, float* out, int64_t stride) {
  const F32 d;
  const int64_t size = depth.size();
  Array<float> tile_mass(kReduce == Reduce::kMass ? depth.channels * kWidest : 0);
  std::fill(tile_mass.begin(), tile_mass.end(), 0.0f);
  const float* left = factors.left + begin * size;
  for (int64_t chunk = begin / kChunk - 1; chunk >= 0; --chunk) {
    float* to = kReduce == Reduce::kMass ? tile_mass.data() : out + chunk * kChunk;
    Multiply<kReduce>(left, factors.right + chunk * kChunk * size, depth, rows, kChunk, to, stride);
    if (chunk == 0) break;
    ScaleRows(left, RoundUp(rows, kBase), size, factors.carry + chunk * size, scratch);
    left = scratch;
  }
  if constexpr (kReduce == Reduce::kMass) {
    for (int64_t c = 0; c < depth.channels; ++c) {
      out[c] = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, tile_mass.data() + c * kWidest)));
    }
  }
}

void AddChunksBefore(Reduce reduce, const Factors& factors, const Depth& depth, int64_t begin,
                     int64_t rows, float* scratch, float* out, int64_t stride) {
  switch (reduce) {
    case Reduce::kSum:
      return AddChunksBeforeFor<Reduce::kSum>(factors, depth, begin, rows, scratch, out, stride);
    case Reduce::kMagnitude:
      return AddChunksBeforeFor<Reduce::kMagnitude>(factors, depth, begin, rows, scratch, out,
                                                    stride);
    case Reduce::kMass:
      return AddChunksBeforeFor<Reduce::kMass>(factors, depth, begin, rows, scratch, out, stride);
  }
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(FactorChunk);
HWY_EXPORT(AddChunksBefore);
HWY_EXPORT(Lanes);

// Rows of one strip: each column panel comes into the first cache once for all of them. 128 rows
// were no faster and leave fewer tasks.
constexpr int64_t kStrip = 64;
// Depth of a channel block where d_state allows: a column panel of it, 32 KiB, stays in the first
// cache.
constexpr int64_t kDepth = 256;

// One call: a scan, its channels and what to reduce.
class MapOfAll {
 public:
  MapOfAll(ThreadPool& pool, const ScanParameters& scan, const MapPart& part, Reduce reduce)
      : pool_(pool),
        scan_(scan),
        channels_(part.channels),
        count_(ChannelCount(scan, channels_)),
        scale_(reduce == Reduce::kMass ? 1.0f : 1.0f / static_cast<float>(part.of)),
        add_(part.add),
        reduce_(reduce),
        padded_(RoundUp(scan.tokens, kWidestPanel)),
        chunks_(RoundUp(scan.tokens, kChunk) / kChunk),
        strips_(RoundUp(scan.tokens, kStrip) / kStrip) {
    MS_CHECK(count_ > 0);
    for (const int32_t channel : channels_) MS_CHECK(0 <= channel && channel < scan.d_inner);
    const int64_t wanted = std::max<int64_t>(kDepth / scan.d_state, 1);
    depth_ = {scan.d_state, RoundUp(std::min(wanted, count_), HWY_DYNAMIC_DISPATCH(Lanes)()), 0};
    depth_.live = std::min(depth_.channels, count_);
    blocks_ = RoundUp(count_, depth_.channels) / depth_.channels;
    PadBC();
    for (Array<float>& factors : factors_) {
      factors = Array<float>((2 * padded_ + chunks_) * depth_.size());
    }
  }

  void Map(float* map) {
    StartMap(map);
    RunBlocks([map](int64_t, int64_t) { return map; });
  }

  void Mass(float* mass) {
    const int64_t parts = chunks_ + strips_;
    Array<float> part(blocks_ * parts * depth_.channels);
    std::fill(part.begin(), part.end(), 0.0f);  // the first chunk's strips are not run
    const auto part_of = [&](int64_t block, int64_t index) {
      return part.data() + (block * parts + index) * depth_.channels;
    };
    RunBlocks(part_of);
    for (int64_t c = 0; c < count_; ++c) {
      double sum = 0;
      for (int64_t p = 0; p < parts; ++p)
        sum += part_of(c / depth_.channels, p)[c % depth_.channels];
      mass[c] = static_cast<float>(sum);
    }
  }

 private:
  // out(block, part) is where a part of a block goes: chunks first, then strips.
  template <class Out>
  void RunBlocks(const Out& out) {
    for (int64_t block = 0; block <= blocks_; ++block) {
      // The first chunk's strips see no earlier one.
      const int64_t strips = block > 0 ? std::max<int64_t>(strips_ - kChunk / kStrip, 0) : 0;
      const int64_t chunks = block < blocks_ ? chunks_ : 0;
      std::optional<ChannelGroup> group;
      if (chunks > 0) group.emplace(scan_, channels_, block * depth_.channels, depth_.channels);
      pool_.Run(chunks + strips, [&](int64_t task) {  // long ones first
        if (task >= chunks) {
          const int64_t strip = strips_ - 1 - (task - chunks);
          AddStrip(block - 1, strip, out(block - 1, chunks_ + strip));
        } else {
          const int64_t chunk = task;
          float* to = out(block, chunk);
          HWY_DYNAMIC_DISPATCH(FactorChunk)
          (reduce_, scan_, {B_.data(), C_.data()}, *group, depth_, chunk, FactorsOf(block), to, to);
        }
      });
    }
  }

  void AddStrip(int64_t block, int64_t strip, float* out) {
    const int64_t begin = strip * kStrip, rows = std::min(kStrip, scan_.tokens - begin);
    Array<float> scratch(kStrip * depth_.size());
    if (reduce_ != Reduce::kMass) out += begin * scan_.tokens;
    HWY_DYNAMIC_DISPATCH(AddChunksBefore)
    (reduce_, FactorsOf(block), depth_, begin, rows, scratch.data(), out, scan_.tokens);
  }

  Factors FactorsOf(int64_t block) {
    float* left = factors_[block % 2].data();
    float* right = left + padded_ * depth_.size();
    return {left, right, right + padded_ * depth_.size()};
  }

  // Where B_ and C_ hold a token's state.
  int64_t At(int64_t token, int64_t n) const {
    return (token / kBase * scan_.d_state + n) * kBase + token % kBase;
  }

  // C carries the weight in a mean.
  void PadBC() {
    B_ = Array<float>(padded_ * scan_.d_state);
    C_ = Array<float>(padded_ * scan_.d_state);
    std::fill(B_.begin(), B_.end(), 0.0f);
    std::fill(C_.begin(), C_.end(), 0.0f);
    for (int64_t i = 0; i < scan_.tokens; ++i) {
      for (int64_t n = 0; n < scan_.d_state; ++n) {
        B_[At(i, n)] = scan_.B[i * scan_.bc_stride + n];
        C_[At(i, n)] = scan_.C[i * scan_.bc_stride + n] * scale_;
      }
    }
  }

  // Zeros, unless adding, but for the diagonal, alpha[d, i, i] = delta[i, d] C[i] . B[i].
  void StartMap(float* map) {
    pool_.Split(scan_.tokens, 16, [&](int64_t begin, int64_t end) {
      if (!add_) std::fill_n(map + begin * scan_.tokens, (end - begin) * scan_.tokens, 0.0f);
      for (int64_t i = begin; i < end; ++i) {
        float self = 0, delta = 0;
        for (int64_t n = 0; n < scan_.d_state; ++n) {
          self += C_[At(i, n)] * B_[At(i, n)];
        }
        for (int64_t c = 0; c < count_; ++c) {
          delta += scan_.delta[i * scan_.d_inner + (channels_.empty() ? c : channels_[c])];
        }
        map[i * scan_.tokens + i] +=
            (reduce_ == Reduce::kMagnitude ? std::fabs(self) : self) * delta;
      }
    });
  }

  ThreadPool& pool_;
  const ScanParameters& scan_;
  const std::span<const int32_t> channels_;
  const int64_t count_;
  const float scale_;
  const bool add_;
  const Reduce reduce_;
  const int64_t padded_, chunks_, strips_;
  Depth depth_;
  int64_t blocks_;
  Array<float> B_, C_;
  Array<float> factors_[2];  // of the block whose strips run and of the one whose chunks run
};

}  // namespace

void MeanMap(ThreadPool& pool, const ScanParameters& scan, float* map) {
  PartOfMeanMap(pool, scan, {{}, scan.d_inner, false}, map);
}

void MeanMapOfChannels(ThreadPool& pool, const ScanParameters& scan,
                       std::span<const int32_t> channels, float* map) {
  MS_CHECK(!channels.empty());
  PartOfMeanMap(pool, scan, {channels, static_cast<int64_t>(channels.size()), false}, map);
}

void PartOfMeanMap(ThreadPool& pool, const ScanParameters& scan, const MapPart& part, float* map) {
  MapOfAll(pool, scan, part, Reduce::kSum).Map(map);
}

void AbsMeanMap(ThreadPool& pool, const ScanParameters& scan, float* map) {
  PartOfAbsMeanMap(pool, scan, {{}, scan.d_inner, false}, map);
}

void PartOfAbsMeanMap(ThreadPool& pool, const ScanParameters& scan, const MapPart& part,
                      float* map) {
  MapOfAll(pool, scan, part, Reduce::kMagnitude).Map(map);
}

void ChannelMass(ThreadPool& pool, const ScanParameters& scan, float* mass) {
  MapOfAll(pool, scan, {}, Reduce::kMass).Mass(mass);
}

}  // namespace mambascope::kernels
#endif
