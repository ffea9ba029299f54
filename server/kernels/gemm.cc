#include "server/kernels/gemm.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "server/base/check.h"
#include "server/kernels/gemm_parts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/gemm.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/gemm_columns-inl.h"
#include "server/kernels/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// ---- few rows: a GEMM bound by the bandwidth of the weights ----
//
// A lane holds one weight row, so that each output has the one chain over k that BLIS gives it.

#if HWY_NATIVE_FMA && HWY_TARGET != HWY_SCALAR

// Accumulators that fit beside the weights: AVX-512 has 32 registers, AVX2 16.
constexpr int64_t kMostRows = HWY_MAX_BYTES == 64 ? 24 : 8;
// A panel of weights is prefetched while the one before it is used, or of short rows (dt_proj) so
// many panels ahead that they make up as many bytes: one panel ahead takes 19 us instead of 16 for
// 1536 x 48 in bf16. 2048 bytes are no better.
constexpr int64_t kPrefetchedRowBytes = 1024;

// The rows of x are copied to this distance, for each block of k anew: one known when compiling.
// Otherwise each row wants a pointer, and beyond eight the compiler reloads them for every number:
// 16 rows took 86 GFLOP/s instead of 98, in bf16 102 instead of 114, with weights in the cache.
constexpr int64_t kRowStride = 512 + 16;  // never a multiple of a page

// w as T stores it: float, or uint16_t for bf16.
template <typename T>
struct Weights {
  explicit Weights(const WeightMatrix& w)
      : data(static_cast<const T*>(w.data)), rows(w.rows), cols(w.cols), stride(w.stride) {}
  const T* data;
  int64_t rows, cols, stride;
};

// sum (+)= x w^T over one block of k, for kRows rows of x, kRowStride apart, and kLanes rows of w.
// sum [kRows, kLanes]. `next` are the weights that will be wanted after these.
//
// 16 rows of weights at a time are read faster than 32, although 32 would fill the four cycles that
// a chain waits for each addition: one row of x, 3072 x 768 out of cache, 11.9 and 11.2 GB/s of
// fp32, 11.0 and 10.5 of bf16 (medians of 9 alternating rounds, one thread's CPU time, Sapphire
// Rapids VM under a load of 4). With AVX2 16 rows instead of 8 gain bf16 7 % and fp32 nothing.
template <int64_t kRows, typename T>
void AddBlock(const float* x, const T* w, int64_t stride, const T* next, int64_t length, bool first,
              float* sum) {
  const F32 d;
  Vec chain[kRows];
#pragma GCC unroll 24
  for (int64_t m = 0; m < kRows; ++m) chain[m] = hn::Zero(d);
  int64_t k = 0;
  for (; k + kStep<T> <= length; k += kStep<T>) {
    // A cache line is four steps long: each step asks for those of a quarter of the rows. All at
    // once would keep the loads waiting, and a line fewer is slower: the hardware does not guess
    // the next panel.
    const T* wanted = next + k / kStep<T> % 4 * (kLanes / 4) * stride + k;
#pragma GCC unroll 4
    for (int64_t j = 0; j < kLanes / 4; ++j) {
      __builtin_prefetch(wanted + j * stride, /*write=*/0, /*second-level cache*/ 2);
    }
    Vec word[4];
    LoadWords(d, w + k, stride, word);
#pragma GCC unroll 8
    for (int64_t c = 0; c < kStep<T>; ++c) {
      const Vec column = Column<T>(d, word, c);
#pragma GCC unroll 24
      for (int64_t m = 0; m < kRows; ++m) {
        chain[m] = hn::MulAdd(hn::Set(d, x[m * kRowStride + k + c]), column, chain[m]);
      }
    }
  }
  for (; k < length; ++k) {
    const Vec column = LoadColumn(d, w + k, stride);
#pragma GCC unroll 24
    for (int64_t m = 0; m < kRows; ++m) {
      chain[m] = hn::MulAdd(hn::Set(d, x[m * kRowStride + k]), column, chain[m]);
    }
  }
#pragma GCC unroll 24
  for (int64_t m = 0; m < kRows; ++m) {
    float* at = sum + m * kLanes;
    hn::Store(first ? chain[m] : hn::Add(hn::Load(d, at), chain[m]), d, at);
  }
}

// Columns [begin, end) of kRows rows of y. Weights up to `wanted` will be read afterwards.
template <int64_t kRows, typename T>
void RowsOf(const float* x, Weights<T> w, const float* bias, BlockLengths block, int64_t begin,
            int64_t end, int64_t wanted, Matrix y) {
  const int64_t ahead = kLanes * ((kPrefetchedRowBytes - 1) / (w.cols * sizeof(T)) + 1);
  HWY_ALIGN float sum[kRows * kLanes];
  for (int64_t first = begin; first < end; first += kLanes) {
    // At the end neighbours fill the register; only the columns from `first` on are kept.
    const int64_t n = std::min(first, w.rows - kLanes);
    const int64_t following = n + ahead < wanted ? std::min(n + ahead, w.rows - kLanes) : n;
    const T* weights = w.data + n * w.stride;
    const T* next = w.data + following * w.stride;
    const float* rows = x;
    for (int64_t k = 0; k < w.cols; rows += kRows * kRowStride) {
      const int64_t length = block.At(k, w.cols);
      AddBlock<kRows>(rows, weights + k, w.stride, next + k, length, k == 0, sum);
      k += length;
    }
    for (int64_t m = 0; m < kRows; ++m) {
      for (int64_t c = first - n; c < std::min(kLanes, end - n); ++c) {
        const float v = sum[m * kLanes + c];
        y.data[m * y.stride + n + c] = bias == nullptr ? v : v + bias[n + c];
      }
    }
  }
}

template <int64_t kRows, typename T>
void Rows(const float* x, Weights<T> w, const float* bias, BlockLengths block, int64_t begin,
          int64_t end, int64_t wanted, Matrix y) {
  if constexpr (kRows > 0) {
    if (y.rows == kRows) return RowsOf<kRows>(x, w, bias, block, begin, end, wanted, y);
    Rows<kRows - 1>(x, w, bias, block, begin, end, wanted, y);
  }
}

// Copies rows of x for RowsOf: [blocks of k, rows, kRowStride].
void CopyRows(ConstMatrix x, BlockLengths block, float* to) {
  for (int64_t k = 0; k < x.cols; k += block.At(k, x.cols)) {
    for (int64_t m = 0; m < x.rows; ++m, to += kRowStride) {
      std::copy_n(x.data + m * x.stride + k, block.At(k, x.cols), to);
    }
  }
}

template <typename T>
void Panels(ConstMatrix x, Weights<T> w, const float* bias, BlockLengths block, int64_t begin,
            int64_t end, Matrix y) {
  const int64_t passes = (x.rows + kMostRows - 1) / kMostRows;
  const auto first_row = [&](int64_t pass) { return x.rows * pass / passes; };
  const int64_t row_size = (x.cols / block.length + 1) * kRowStride;
  thread_local std::vector<float> copies;
  copies.resize(std::max<size_t>(copies.size(), x.rows * row_size));
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t m = first_row(pass), rows = first_row(pass + 1) - m;
    CopyRows({x.data + m * x.stride, rows, x.cols, x.stride}, block, &copies[m * row_size]);
  }
  // Panels that stay in the second-level cache while the next rows of x pass over them.
  constexpr int64_t kPanel = 4 * kLanes;
  for (int64_t n = begin; n < end; n += kPanel) {
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t m = first_row(pass), rows = first_row(pass + 1) - m;
      const int64_t wanted = pass == 0 ? end : n;
      Rows<kMostRows>(&copies[m * row_size], w, bias, block, n, std::min(n + kPanel, end), wanted,
                      {y.data + m * y.stride, rows, y.cols, y.stride});
    }
  }
}

bool FewRows(ConstMatrix x, WeightMatrix w, const float* bias, BlockLengths block, int64_t begin,
             int64_t end, Matrix y) {
  if (block.longest > kRowStride) return false;
  if (w.type == ElementType::kF32) {
    Panels(x, Weights<float>(w), bias, block, begin, end, y);
  } else {
    Panels(x, Weights<uint16_t>(w), bias, block, begin, end, y);
  }
  return true;
}

#else

// Without a fused multiply-add the order of BLIS cannot be followed.
bool FewRows(ConstMatrix, WeightMatrix, const float*, BlockLengths, int64_t, int64_t, Matrix) {
  return false;
}

#endif

void Widen(const uint16_t* from, int64_t count, float* to) {
  const hn::ScalableTag<uint32_t> d;
  const hn::Rebind<uint16_t, decltype(d)> narrow;
  const F32 out;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(d, hn::LoadU(narrow, from + i)));
    hn::StoreU(hn::BitCast(out, bits), out, to + i);
  }
  for (; i < count; ++i) to[i] = std::bit_cast<float>(uint32_t{from[i]} << 16);
}

void AddBias(const float* bias, Matrix y) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t m = 0; m < y.rows; ++m) {
    float* row = y.data + m * y.stride;
    int64_t n = 0;
    for (; n + lanes <= y.cols; n += lanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, row + n), hn::LoadU(d, bias + n)), d, row + n);
    }
    for (; n < y.cols; ++n) row[n] += bias[n];
  }
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <chrono>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"

namespace mambascope::kernels {
namespace {

HWY_EXPORT(FewRows);
HWY_EXPORT(Widen);
HWY_EXPORT(AddBias);

ConstMatrix Rows(ConstMatrix m, int64_t begin, int64_t end) {
  return {m.data + begin * m.stride, end - begin, m.cols, m.stride};
}
WeightMatrix Rows(WeightMatrix m, int64_t begin, int64_t end) {
  const int64_t size = m.type == ElementType::kF32 ? sizeof(float) : sizeof(uint16_t);
  return {static_cast<const char*>(m.data) + begin * m.stride * size, m.type, end - begin, m.cols,
          m.stride};
}

void CheckShapes(ConstMatrix a, WeightMatrix b, Matrix c) {
  MS_CHECK(a.cols == b.cols && c.rows == a.rows && c.cols == b.rows);
  MS_CHECK(a.stride >= a.cols && b.stride >= b.cols && c.stride >= c.cols);
}

std::vector<float> RandomNumbers(int64_t count) {
  std::minstd_rand bits(1);
  std::uniform_real_distribution<float> value(-1, 1);
  std::vector<float> numbers(count);
  for (float& number : numbers) number = value(bits);
  return numbers;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Tiles of y, one a task.
struct Grid {
  int64_t row_parts, column_parts;
};

// Each tile packs its rows of x and of w anew: as square as the thread count allows.
Grid ChooseGrid(int64_t rows, int64_t columns, int64_t threads) {
  Grid best{1, 1};
  int64_t least = 0;
  for (int64_t column_parts = 1; column_parts <= threads; ++column_parts) {
    const int64_t row_parts = threads / column_parts;
    const int64_t tile_rows = (rows + row_parts - 1) / row_parts;
    const int64_t tile_columns = (columns + column_parts - 1) / column_parts;
    const int64_t cost = tile_rows * tile_columns + 32 * (tile_rows + tile_columns);
    if (column_parts == 1 || cost <= least) {
      least = cost;
      best = {row_parts, column_parts};
    }
  }
  return best;
}

// Inner borders of a split: whole micro-tiles of every micro-kernel.
constexpr int64_t kTile = 96;

}  // namespace

void WidenRow(WeightMatrix w, int64_t row, float* out) {
  const void* data = Rows(w, row, row + 1).data;
  if (w.type == ElementType::kF32) {
    std::memcpy(out, data, w.cols * sizeof(float));
  } else {
    HWY_DYNAMIC_DISPATCH(Widen)(static_cast<const uint16_t*>(data), w.cols, out);
  }
}

void FewRowsLinear(ConstMatrix x, WeightMatrix w, const float* bias, int64_t begin, int64_t end,
                   Matrix y) {
  HWY_DYNAMIC_DISPATCH(FewRows)(x, w, bias, BlisBlockLengths(), begin, end, y);
}

bool FewRowsHaveTheBitsOfBlis() {
  const BlockLengths block = BlisBlockLengths();
  for (const int64_t K :
       {int64_t{5}, block.length + 1, block.longest, 2 * block.length + 7, 2 * block.longest + 1}) {
    const int64_t N = 3 * kFewestColumns + 3, M = 129;
    const std::vector<float> x = RandomNumbers(M * K), w = RandomNumbers(N * K);
    std::vector<float> expected(M * N), actual(M * N);
    BlisLinear({x.data(), M, K, K}, {w.data(), N, K, K}, {expected.data(), M, N, N});
    for (int64_t m = 0, rows = 1; m < M; m += rows, rows = std::min(2 * rows, M - m)) {
      if (!HWY_DYNAMIC_DISPATCH(FewRows)({x.data() + m * K, rows, K, K}, {w.data(), N, K, K},
                                         nullptr, block, 0, N,
                                         {actual.data() + m * N, rows, N, N})) {
        return false;
      }
    }
    if (!SameBits(actual, expected)) return false;
  }
  return true;
}

bool PackedGemmHasTheBitsOfBlis() {
  const BlockLengths block = BlisBlockLengths();
  for (const int64_t K : {int64_t{1}, int64_t{6}, block.longest, 2 * block.longest + 1}) {
    const int64_t N = 75, M = 53;  // whole tiles and parts of them
    const std::vector<float> x = RandomNumbers(M * K), w = RandomNumbers(N * K);
    std::vector<float> expected = RandomNumbers(M * N), actual = expected;
    for (const bool accumulate : {true, false}) {
      BlisGemm({x.data(), M, K, K}, {w.data(), N, K, K}, accumulate ? 1.0f : 0.0f,
               {expected.data(), M, N, N});
      if (!PackedGemm({x.data(), M, K, K}, {w.data(), N, K, K}, accumulate,
                      {actual.data(), M, N, N}) ||
          !SameBits(actual, expected)) {
        return false;
      }
    }
  }
  return true;
}

bool LeaveFewRowsToOurKernel() {
  static const bool leave = FewRowsHaveTheBitsOfBlis();
  return leave;
}

bool LeaveLoopsToUs() {
  static const bool leave = PackedGemmHasTheBitsOfBlis();
  return leave;
}

void GemmBlock(ConstMatrix a, ConstMatrix b, bool accumulate, Matrix c) {
  CheckShapes(a, b, c);
  if (LeaveLoopsToUs() && PackedGemm(a, b, accumulate, c)) return;
  BlisGemm(a, b, accumulate ? 1.0f : 0.0f, c);
}

void ForTiles(ThreadPool& pool, int64_t M, int64_t N, int64_t K,
              absl::FunctionRef<void(int64_t, int64_t, int64_t, int64_t)> run) {
  const Grid grid = M * N * K < kGemmWorthSplitting ? Grid{1, 1} : ChooseGrid(M, N, pool.threads());
  const int64_t row_units = (M + kTile - 1) / kTile, column_units = (N + kTile - 1) / kTile;
  pool.Run(grid.row_parts * grid.column_parts, [&](int64_t task) {
    const int64_t r = task / grid.column_parts, c = task % grid.column_parts;
    const int64_t m = row_units * r / grid.row_parts * kTile;
    const int64_t m_end = std::min(row_units * (r + 1) / grid.row_parts * kTile, M);
    const int64_t n = column_units * c / grid.column_parts * kTile;
    const int64_t n_end = std::min(column_units * (c + 1) / grid.column_parts * kTile, N);
    if (m < m_end && n < n_end) run(m, m_end, n, n_end);
  });
}

void Linear(ThreadPool& pool, ConstMatrix x, WeightMatrix w, const float* bias, Matrix y) {
  CheckShapes(x, w, y);
  const int64_t M = y.rows, N = y.cols;
  const bool alone = M * N * x.cols < kGemmWorthSplitting;
  if (M <= kFewRowsLimit && N >= kFewestColumns && LeaveFewRowsToOurKernel()) {
    pool.Split(N, alone ? N : kFewestColumns,
               [&](int64_t begin, int64_t end) { FewRowsLinear(x, w, bias, begin, end, y); });
    return;
  }
  const bool packed = LeaveLoopsToUs();
  ForTiles(pool, M, N, x.cols, [&](int64_t m, int64_t m_end, int64_t n, int64_t n_end) {
    const Matrix tile{y.data + m * y.stride + n, m_end - m, n_end - n, y.stride};
    const ConstMatrix rows = Rows(x, m, m_end);
    const WeightMatrix columns = Rows(w, n, n_end);
    if (!packed || !PackedGemm(rows, columns, /*accumulate=*/false, tile)) {
      BlisLinear(rows, columns, tile);
    }
    if (bias != nullptr) HWY_DYNAMIC_DISPATCH(AddBias)(bias + n, tile);
  });
}

GemmReport CheckGemm(ThreadPool& pool) {
  GemmReport report;
  report.implementation =
      absl::StrCat(BlisName(), LeaveLoopsToUs() ? " in our loops" : "",
                   LeaveFewRowsToOurKernel() ? ", few rows by our kernel" : ", few rows too");
  const int64_t M = 4 * kTile, N = 8 * kTile, K = 800;
  const std::vector<float> x = RandomNumbers(M * K), w = RandomNumbers(N * K);
  std::vector<float> whole(M * N), rows(M * N);
  const auto linear = [&](int64_t begin, int64_t end, std::vector<float>& y) {
    Linear(pool, Rows(ConstMatrix{x.data(), M, K, K}, begin, end), {w.data(), N, K, K}, nullptr,
           {y.data() + begin * N, end - begin, N, N});
  };
  for (int i = 0; i < 3; ++i) {  // the first one also warms the caches up
    const auto start = std::chrono::steady_clock::now();
    linear(0, M, whole);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    report.gflops = std::max(report.gflops, 2e-9 * M * N * K / taken.count());
  }
  // 1, 2, 3, ... rows at a time, which our kernel takes; the whole is past its limit.
  for (int64_t begin = 0, count = 1; begin < M; begin += count, ++count) {
    count = std::min(count, M - begin);
    linear(begin, begin + count, rows);
  }
  report.row_invariant = SameBits(rows, whole);
  return report;
}

}  // namespace mambascope::kernels
#endif
