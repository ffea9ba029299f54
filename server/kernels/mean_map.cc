// First version, by whole channel maps: correct, not yet fast.
#include <cmath>
#include <vector>

#include "server/base/array.h"
#include "server/base/check.h"
#include "server/kernels/channel_group.h"
#include "server/kernels/hidden_attention.h"

namespace mambascope::kernels {
namespace {

template <class Add>
void ForEachChannelMap(ThreadPool& pool, const ScanParameters& scan,
                       std::span<const int32_t> channels, const Add& add) {
  const int64_t count = ChannelCount(scan, channels), size = scan.tokens * scan.tokens;
  const int64_t batch = std::clamp<int64_t>((int64_t{8} << 20) / size, 1, 64);
  Array<float> maps(batch * size);
  for (int64_t first = 0; first < count; first += batch) {
    std::vector<int32_t> part;
    for (int64_t c = first; c < std::min(count, first + batch); ++c) {
      part.push_back(channels.empty() ? static_cast<int32_t>(c) : channels[c]);
    }
    ChannelMaps(pool, scan, part, maps.data());
    for (size_t c = 0; c < part.size(); ++c) add(first + c, maps.data() + c * size);
  }
}

void Mean(ThreadPool& pool, const ScanParameters& scan, std::span<const int32_t> channels,
          bool absolute, float* map) {
  const int64_t size = scan.tokens * scan.tokens;
  const float scale = 1.0f / static_cast<float>(ChannelCount(scan, channels));
  std::fill_n(map, size, 0.0f);
  ForEachChannelMap(pool, scan, channels, [&](int64_t, const float* alpha) {
    pool.Split(size, 64, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        map[i] += scale * (absolute ? std::fabs(alpha[i]) : alpha[i]);
      }
    });
  });
}

}  // namespace

void MeanMap(ThreadPool& pool, const ScanParameters& scan, float* map) {
  Mean(pool, scan, {}, false, map);
}

void MeanMapOfChannels(ThreadPool& pool, const ScanParameters& scan,
                       std::span<const int32_t> channels, float* map) {
  MS_CHECK(!channels.empty());
  Mean(pool, scan, channels, false, map);
}

void AbsMeanMap(ThreadPool& pool, const ScanParameters& scan, float* map) {
  Mean(pool, scan, {}, true, map);
}

void ChannelMass(ThreadPool& pool, const ScanParameters& scan, float* mass) {
  ForEachChannelMap(pool, scan, {}, [&](int64_t channel, const float* alpha) {
    double sum = 0;
    for (int64_t i = 0; i < scan.tokens * scan.tokens; ++i) sum += std::fabs(alpha[i]);
    mass[channel] = static_cast<float>(sum);
  });
}

}  // namespace mambascope::kernels
