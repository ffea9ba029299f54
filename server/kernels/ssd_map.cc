// A task takes a block of columns from its diagonal down. For each of its columns j and each head
// it carries share[h, j] = prod_{k = j+1..i} exp(delta[k, h] A[h]) delta[j, h] / heads from row to
// row; C B^T comes from the library, strip of rows after strip.
#include "server/kernels/ssd_map.h"

#include <algorithm>

#include "server/base/array.h"
#include "server/base/check.h"
#include "server/kernels/gemm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/ssd_map.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/vector_math-inl.h"

#ifndef MAMBASCOPE_KERNELS_SSD_MAP_SIZES_
#define MAMBASCOPE_KERNELS_SSD_MAP_SIZES_
namespace mambascope::kernels {
constexpr int64_t kColumns = 64;  // of a task; a multiple of any register
constexpr int64_t kRows = 128;    // of a product C B^T
}  // namespace mambascope::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// decay[h] = exp(delta[h] A[h]) of one token, the scan's own.
void DecayRow(const float* delta, const float* A, int64_t heads, float* decay) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  const Vec log2_e = hn::Set(d, 1.44269504f);
  int64_t h = 0;
  for (; h + lanes <= heads; h += lanes) {
    const Vec rate = hn::Mul(hn::LoadU(d, A + h), log2_e);
    hn::StoreU(Exp2NonPositive(d, hn::Mul(hn::LoadU(d, delta + h), rate)), d, decay + h);
  }
  if (h < heads) {
    const Vec rate = hn::Mul(LoadPart(d, A + h, heads - h), log2_e);
    const Vec step = LoadPart(d, delta + h, heads - h);
    StorePart(Exp2NonPositive(d, hn::Mul(step, rate)), d, decay + h, heads - h);
  }
}

// One row of a block for one group: product [kColumns], the row of C B^T, becomes the group's part
// of the map, with magnitudes if `absolute`. share [heads, kColumns] moves on to the next row,
// whose decay is `next`.
void GroupRow(const float* next, int64_t heads, bool absolute, float* share, float* product) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  constexpr int kVecs = 4;
  for (int64_t c = 0; c < kColumns; c += kVecs * lanes) {
    Vec sum[kVecs];
    for (int v = 0; v < kVecs; ++v) sum[v] = hn::Zero(d);
    for (int64_t h = 0; h < heads; ++h) {
      const Vec decay = hn::Set(d, next[h]);
      for (int v = 0; v < kVecs; ++v) {
        float* at = share + h * kColumns + c + v * lanes;
        const Vec now = hn::Load(d, at);
        sum[v] = hn::Add(sum[v], now);
        hn::Store(hn::Mul(now, decay), d, at);
      }
    }
    for (int v = 0; v < kVecs; ++v) {
      float* at = product + c + v * lanes;
      const Vec dot = hn::Load(d, at);
      hn::Store(hn::Mul(absolute ? hn::Abs(dot) : dot, sum[v]), d, at);
    }
  }
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(DecayRow);
HWY_EXPORT(GroupRow);

// Columns [first, first + kColumns) of the map, as far as there are.
void MapColumns(const SsdMapInputs& in, const float* decay, bool absolute, int64_t first,
                float* map) {
  const auto group_row = HWY_DYNAMIC_DISPATCH(GroupRow);
  const int64_t L = in.tokens, width = std::min(kColumns, L - first);
  const int64_t heads = in.heads / in.groups;  // of a group
  const float mean = 1.0f / static_cast<float>(in.heads);
  Array<float> share(in.heads * kColumns), product(kRows * kColumns);
  std::fill(share.begin(), share.end(), 0.0f);
  std::fill(product.begin(), product.end(), 0.0f);  // columns that are not there
  for (int64_t i = 0; i < first; ++i) std::fill_n(map + i * L + first, width, 0.0f);
  for (int64_t strip = first; strip < L; strip += kRows) {
    const int64_t rows = std::min(kRows, L - strip);
    for (int64_t g = 0; g < in.groups; ++g) {
      const float* C = in.C + strip * in.bc_stride + g * in.d_state;
      const float* B = in.B + first * in.bc_stride + g * in.d_state;
      GemmBlock({C, rows, in.d_state, in.bc_stride}, {B, width, in.d_state, in.bc_stride},
                /*accumulate=*/false, {product.data(), rows, width, kColumns});
      for (int64_t i = strip; i < strip + rows; ++i) {
        float* group_share = share.data() + g * heads * kColumns;
        const float* delta = in.delta + i * in.heads + g * heads;
        for (int64_t h = 0; h < heads && i < first + width; ++h) {
          group_share[h * kColumns + i - first] = delta[h] * mean;
        }
        float* part = product.data() + (i - strip) * kColumns;
        group_row(decay + std::min(i + 1, L - 1) * in.heads + g * heads, heads, absolute,
                  group_share, part);
        const int64_t seen = std::min(width, i + 1 - first);  // up to the diagonal
        float* row = map + i * L + first;
        if (g == 0) std::fill_n(row, width, 0.0f);
        for (int64_t j = 0; j < seen; ++j) row[j] += part[j];
      }
    }
  }
}

void MapOfHeads(ThreadPool& pool, const SsdMapInputs& in, bool absolute, float* map) {
  MS_CHECK(in.heads >= 1 && in.groups >= 1 && in.heads % in.groups == 0 && in.d_state >= 1);
  MS_CHECK(in.bc_stride >= in.groups * in.d_state);
  Array<float> decay(in.tokens * in.heads);
  pool.Split(in.tokens, 64, [&](int64_t begin, int64_t end) {
    const auto row = HWY_DYNAMIC_DISPATCH(DecayRow);
    for (int64_t i = begin * in.heads; i < end * in.heads; i += in.heads) {
      row(in.delta + i, in.A, in.heads, decay.data() + i);
    }
  });
  pool.Run((in.tokens + kColumns - 1) / kColumns, [&](int64_t block) {  // long ones first
    MapColumns(in, decay.data(), absolute, block * kColumns, map);
  });
}

}  // namespace

void SsdMeanMap(ThreadPool& pool, const SsdMapInputs& in, float* map) {
  MapOfHeads(pool, in, /*absolute=*/false, map);
}

void SsdAbsMeanMap(ThreadPool& pool, const SsdMapInputs& in, float* map) {
  MapOfHeads(pool, in, /*absolute=*/true, map);
}

}  // namespace mambascope::kernels
#endif
