// BLIS: which of its micro-kernels runs here, its own GEMM, and the same in loops of ours.
//
// Its micro-kernels are assembly, but its packing is plain C where nobody wrote it by hand: with
// AVX-512, copying both matrices into panels one number at a time took 11 % of a GEMM of 512 rows,
// more of fewer, and bf16 was widened first. PackedGemm transposes in registers, widens on the way,
// and calls the same micro-kernel on the same blocks of k in the same order, which is all that an
// output's bits depend on.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/kernels/gemm_parts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/gemm_blis.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/gemm_columns-inl.h"
#include "server/kernels/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// to[k * width + j] = row j at k, for `width` rows of which `rows` exist; 0 for the others. May
// write kLanes numbers too many.
template <typename T>
void PackPanel(const T* from, int64_t rows, int64_t stride, int64_t width, int64_t length,
               float* to) {
  for (int64_t j = 0; j < width; j += kLanes) {
    // Where the width is no whole number of registers, they overlap, or a single one writes more,
    // which the next k overwrites.
    const int64_t first = std::max<int64_t>(std::min(j, width - kLanes), 0);
    float* at = to + first;
#if HWY_TARGET != HWY_SCALAR
    if (rows - first >= kLanes) {
      const F32 d;
      const T* row = from + first * stride;
      const T* next = rows - first >= 2 * kLanes ? row + kLanes * stride : row;
      int64_t k = 0;
      for (; k + kStep<T> <= length; k += kStep<T>) {
        const T* wanted = next + k / kStep<T> % 4 * (kLanes / 4) * stride + k;
        for (int64_t i = 0; i < kLanes / 4; ++i) {
          __builtin_prefetch(wanted + i * stride, /*write=*/0, /*second-level cache*/ 2);
        }
        Vec word[4];
        LoadWords(d, row + k, stride, word);
#pragma GCC unroll 8
        for (int64_t c = 0; c < kStep<T>; ++c) {
          hn::StoreU(Column<T>(d, word, c), d, at + (k + c) * width);
        }
      }
      for (; k < length; ++k) hn::StoreU(LoadColumn(d, row + k, stride), d, at + k * width);
      continue;
    }
#endif
    for (int64_t i = 0; i < std::min(width - first, kLanes); ++i) {
      const bool exists = first + i < rows;
      for (int64_t k = 0; k < length; ++k) {
        at[k * width + i] = exists ? Widened(from[(first + i) * stride + k]) : 0.0f;
      }
    }
  }
}

template <typename T>
void PackPanels(const T* from, int64_t rows, int64_t stride, int64_t width, int64_t length,
                float* to) {
  for (int64_t j = 0; j < rows; j += width, to += width * length) {
    PackPanel(from + j * stride, rows - j, stride, width, length, to);
  }
}

// Rows [begin, end) of m at [k, k + length): panels of `width` rows, one after the other.
void Pack(WeightMatrix m, int64_t begin, int64_t end, int64_t width, int64_t k, int64_t length,
          float* to) {
  const int64_t offset = begin * m.stride + k;
  if (m.type == ElementType::kF32) {
    PackPanels(static_cast<const float*>(m.data) + offset, end - begin, m.stride, width, length,
               to);
  } else {
    PackPanels(static_cast<const uint16_t*>(m.data) + offset, end - begin, m.stride, width, length,
               to);
  }
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <blis.h>

#include <cstdlib>

#include "hwy/aligned_allocator.h"

namespace mambascope::kernels {
namespace {

HWY_EXPORT(Pack);

// The micro-kernels that BLIS runs with here, chosen once.
struct Blis {
  cntx_t* context = nullptr;
  arch_t architecture = BLIS_ARCH_GENERIC;
  BlockLengths block;
  // The micro-kernel adds width_a rows of one matrix times width_b of the other to a tile. It wants
  // the tile's rows consecutive or its columns: c is stored by rows, so a x b or b x a.
  sgemm_ukr_ft kernel = nullptr;
  bool by_rows = false;
  int64_t width_a = 0, width_b = 0;
  int64_t block_a = 0, block_b = 0;  // rows that are packed at a time, as many as caches hold
};

Blis ChooseBlis() {
  Blis blis{bli_gks_query_cntx(), bli_arch_query_id(), {}};
#ifdef BLIS_CONFIG_SKX
  // BLIS counts a CPU's AVX-512 units by its model name, and takes AVX2 for a name it does not
  // know, such as a virtual machine's plain "Xeon Processor": 65 GFLOP/s a core instead of 106 at M
  // = 1024 (medians of 7 rounds in one run on such a VM under load; the best of 6 on another run 71
  // and 143). Decided by the instruction set, never by a clock: the block lengths differ, so the
  // choice is part of a result's bits. Who sets BLIS_ARCH_TYPE keeps what was asked for.
  if (blis.architecture == BLIS_ARCH_HASWELL && (hwy::SupportedTargets() & HWY_AVX3) != 0 &&
      std::getenv("BLIS_ARCH_TYPE") == nullptr) {
    blis.context = bli_gks_lookup_nat_cntx(BLIS_ARCH_SKX);
    blis.architecture = BLIS_ARCH_SKX;
  }
#endif
  blis.block.length = bli_cntx_get_blksz_def_dt(BLIS_FLOAT, BLIS_KC, blis.context);
  blis.block.longest = bli_cntx_get_blksz_max_dt(BLIS_FLOAT, BLIS_KC, blis.context);
  const auto size = [&](bszid_t id) {
    return bli_cntx_get_blksz_def_dt(BLIS_FLOAT, id, blis.context);
  };
  blis.width_a = size(BLIS_MR);
  blis.width_b = size(BLIS_NR);
  blis.block_a = size(BLIS_MC);
  blis.block_b = size(BLIS_NC);
  blis.by_rows = bli_cntx_l3_nat_ukr_prefers_rows_dt(BLIS_FLOAT, BLIS_GEMM_UKR, blis.context);
  // A panel may be longer in memory than in use, which no micro-kernel of ours has.
  if (bli_cntx_get_blksz_max_dt(BLIS_FLOAT, BLIS_MR, blis.context) == blis.width_a &&
      bli_cntx_get_blksz_max_dt(BLIS_FLOAT, BLIS_NR, blis.context) == blis.width_b) {
    blis.kernel = reinterpret_cast<sgemm_ukr_ft>(
        bli_cntx_get_l3_nat_ukr_dt(BLIS_FLOAT, BLIS_GEMM_UKR, blis.context));
  }
  return blis;
}

const Blis& TheBlis() {
  static const Blis blis = ChooseBlis();
  return blis;
}

}  // namespace

namespace {

// c = beta c + a b, b's rows and columns so far apart.
void BlisGemm(ConstMatrix a, const float* b, int64_t row_stride, int64_t column_stride, float beta,
              Matrix c) {
  rntm_t one_thread = BLIS_RNTM_INITIALIZER;
  bli_rntm_set_num_threads(1, &one_thread);
  bli_rntm_disable_l3_sup(&one_thread);
  float alpha = 1;
  bli_sgemm_ex(BLIS_NO_TRANSPOSE, BLIS_NO_TRANSPOSE, c.rows, c.cols, a.cols, &alpha,
               const_cast<float*>(a.data), a.stride, 1, const_cast<float*>(b), row_stride,
               column_stride, &beta, c.data, c.stride, 1, TheBlis().context, &one_thread);
}

}  // namespace

void BlisGemm(ConstMatrix a, ConstMatrix b, float beta, Matrix c) {
  BlisGemm(a, b.data, 1, b.stride, beta, c);
}

void BlisGemmTransposed(ConstMatrix a, ConstMatrix b, float beta, Matrix c) {
  BlisGemm(a, b.data, b.stride, 1, beta, c);
}

namespace {

// Widened weights that BLIS packs next: a thread keeps room for as many.
constexpr int64_t kWidened = 512 * 1024;
constexpr int64_t kWidenedRows = 96;  // a multiple of it is widened: whole micro-tiles

// Room for a thread's panels; grows, and is never given back.
class Panels {
 public:
  float* OfAtLeast(int64_t numbers) {
    if (numbers > size_) {
      // Micro-kernels read ahead, and packing writes a register too much.
      constexpr int64_t kBeyond = 64;
      numbers_ = hwy::AllocateAligned<float>(numbers + kBeyond);
      MS_CHECK(numbers_ != nullptr);
      size_ = numbers;
    }
    return numbers_.get();
  }

 private:
  hwy::AlignedFreeUniquePtr<float[]> numbers_;
  int64_t size_ = 0;
};

int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// c = beta c + a b^T of packed panels; c [rows_a, rows_b], its rows and columns so far apart.
void Tiles(float* a, int64_t rows_a, float* b, int64_t rows_b, int64_t length, float beta, float* c,
           int64_t row_stride, int64_t column_stride) {
  const Blis& blis = TheBlis();
  float alpha = 1;
  auxinfo_t next = {};
  for (int64_t j = 0; j < rows_b; j += blis.width_b) {
    for (int64_t i = 0; i < rows_a; i += blis.width_a) {
      const bool last = i + blis.width_a >= rows_a, very_last = j + blis.width_b >= rows_b;
      bli_auxinfo_set_next_ab(last ? a : a + (i + blis.width_a) * length,
                              b + (last && !very_last ? j + blis.width_b : j) * length, &next);
      blis.kernel(std::min(blis.width_a, rows_a - i), std::min(blis.width_b, rows_b - j), length,
                  &alpha, a + i * length, b + j * length, &beta,
                  c + i * row_stride + j * column_stride, row_stride, column_stride, &next,
                  blis.context);
    }
  }
}

}  // namespace

BlockLengths BlisBlockLengths() { return TheBlis().block; }

std::string BlisName() {
  return absl::StrCat("BLIS ", bli_info_get_version_str(), " ",
                      bli_arch_string(TheBlis().architecture));
}

void BlisLinear(ConstMatrix x, WeightMatrix w, Matrix y) {
  if (w.type == ElementType::kF32) {
    BlisGemm(x, {static_cast<const float*>(w.data), w.rows, w.cols, w.stride}, 0.0f, y);
    return;
  }
  thread_local std::vector<float> widened;
  const int64_t K = w.cols,
                most = std::max<int64_t>(1, kWidened / std::max<int64_t>(1, K) / kWidenedRows) *
                       kWidenedRows;
  for (int64_t n = 0; n < w.rows; n += most) {
    const int64_t columns = std::min(most, w.rows - n);
    widened.resize(std::max<int64_t>(widened.size(), columns * K));
    for (int64_t c = 0; c < columns; ++c) WidenRow(w, n + c, widened.data() + c * K);
    BlisGemm(x, {widened.data(), columns, K, K}, 0.0f, {y.data + n, y.rows, columns, y.stride});
  }
}

bool PackedGemm(ConstMatrix x, WeightMatrix w, bool accumulate, Matrix y) {
  return PackedGemm(
      x,
      [w](int64_t begin, int64_t end, int64_t width, int64_t k, int64_t length, float* to) {
        HWY_DYNAMIC_DISPATCH(Pack)(w, begin, end, width, k, length, to);
      },
      accumulate, y);
}

bool PackedGemm(ConstMatrix x, PackPanels pack_w, bool accumulate, Matrix y) {
  const Blis& blis = TheBlis();
  if (blis.kernel == nullptr || x.cols == 0) return false;
  const auto of_x = [x](int64_t begin, int64_t end, int64_t width, int64_t k, int64_t length,
                        float* to) {
    HWY_DYNAMIC_DISPATCH(Pack)(x, begin, end, width, k, length, to);
  };
  const PackPanels pack_x = of_x;
  const PackPanels pack_a = blis.by_rows ? pack_x : pack_w;
  const PackPanels pack_b = blis.by_rows ? pack_w : pack_x;
  const int64_t rows_a = blis.by_rows ? y.rows : y.cols;
  const int64_t rows_b = blis.by_rows ? y.cols : y.rows;
  const int64_t row_stride = blis.by_rows ? y.stride : 1;
  const int64_t column_stride = blis.by_rows ? 1 : y.stride;
  thread_local Panels room_a, room_b;
  const int64_t longest = std::min(blis.block.longest, x.cols);
  float* const panels_a =
      room_a.OfAtLeast(RoundUp(std::min(rows_a, blis.block_a), blis.width_a) * longest);
  float* const panels_b =
      room_b.OfAtLeast(RoundUp(std::min(rows_b, blis.block_b), blis.width_b) * longest);
  for (int64_t j = 0; j < rows_b; j += blis.block_b) {
    const int64_t j_end = std::min(j + blis.block_b, rows_b);
    for (int64_t k = 0, length; k < x.cols; k += length) {
      length = blis.block.At(k, x.cols);
      pack_b(j, j_end, blis.width_b, k, length, panels_b);
      for (int64_t i = 0; i < rows_a; i += blis.block_a) {
        const int64_t i_end = std::min(i + blis.block_a, rows_a);
        pack_a(i, i_end, blis.width_a, k, length, panels_a);
        Tiles(panels_a, i_end - i, panels_b, j_end - j, length, accumulate || k > 0 ? 1.0f : 0.0f,
              y.data + i * row_stride + j * column_stride, row_stride, column_stride);
      }
    }
  }
  return true;
}

}  // namespace mambascope::kernels
#endif
