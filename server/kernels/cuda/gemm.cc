#include "server/kernels/cuda/gemm.h"

#include <cublasLt.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/status.h"
#include "server/kernels/cuda/device.h"
#include "server/kernels/cuda/gemm_parts.h"

namespace mambascope::kernels::cuda {
namespace {

// The batch for which Linear's algorithm is chosen: 1024 rows, a prompt. It serves every other
// number of rows too, because another choice could add in another order.
constexpr int64_t kPlannedBlocks = 16;
constexpr int kCandidates = 16;
constexpr int64_t kAlignment = 16;  // bytes, of every pointer that a caller gives

absl::Status ToStatus(cublasStatus_t status, absl::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string message = absl::StrCat(what, ": cuBLASLt: ", cublasLtGetStatusName(status));
  return status == CUBLAS_STATUS_ALLOC_FAILED ? absl::ResourceExhaustedError(message)
                                              : absl::InternalError(message);
}

// What an algorithm is chosen by, in our row-major words: c [rows, cols] (+)= a [rows, depth] b
// [cols, depth]^T, `count` times.
struct Shape {
  int64_t rows, cols, depth, count;
  int64_t a_stride, b_stride, c_stride;
  int64_t a_step, b_step, c_step;
  cudaDataType_t type;
  bool accumulate;
  auto Key() const {
    return std::tie(rows, cols, depth, count, a_stride, b_stride, c_stride, a_step, b_step, c_step,
                    type, accumulate);
  }
  bool operator<(const Shape& other) const { return Key() < other.Key(); }
};

// cuBLASLt's descriptions of one problem, freed together. It is column-major: its first matrix is
// our b, its columns are our rows.
class Problem {
 public:
  Problem() = default;
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;
  ~Problem() {
    if (c_ != nullptr) cublasLtMatrixLayoutDestroy(c_);
    if (b_ != nullptr) cublasLtMatrixLayoutDestroy(b_);
    if (a_ != nullptr) cublasLtMatrixLayoutDestroy(a_);
    if (operation_ != nullptr) cublasLtMatmulDescDestroy(operation_);
  }

  absl::Status Describe(const Shape& shape) {
    // Pedantic: fp32 stays fp32, without TF32 or emulation.
    const auto compute =
        shape.type == CUDA_R_32F ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
    RETURN_IF_ERROR(ToStatus(cublasLtMatmulDescCreate(&operation_, compute, CUDA_R_32F), "GEMM"));
    const cublasOperation_t transposed = CUBLAS_OP_T;
    RETURN_IF_ERROR(ToStatus(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA,
                                                            &transposed, sizeof(transposed)),
                             "GEMM"));
    RETURN_IF_ERROR(Layout(&b_, shape.type, shape.depth, shape.cols, shape.b_stride, shape.count,
                           shape.b_step));
    RETURN_IF_ERROR(Layout(&a_, shape.type, shape.depth, shape.rows, shape.a_stride, shape.count,
                           shape.a_step));
    return Layout(&c_, CUDA_R_32F, shape.cols, shape.rows, shape.c_stride, shape.count,
                  shape.c_step);
  }

  absl::StatusOr<cublasLtMatmulAlgo_t> Choose(cublasLtHandle_t handle, const Shape& shape) const {
    cublasLtMatmulPreference_t preference = nullptr;
    RETURN_IF_ERROR(ToStatus(cublasLtMatmulPreferenceCreate(&preference), "GEMM"));
    const std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>,
                          decltype(&cublasLtMatmulPreferenceDestroy)>
        owner(preference, &cublasLtMatmulPreferenceDestroy);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      return ToStatus(
          cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
          "GEMM");
    };
    RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, size_t{0}));
    RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                           static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE)));
    const int64_t size = shape.type == CUDA_R_32F ? 4 : 2;
    const uint32_t a = Alignment({shape.a_stride, shape.a_step}, size);
    const uint32_t b = Alignment({shape.b_stride, shape.b_step}, size);
    const uint32_t c = Alignment({shape.c_stride, shape.c_step}, 4);
    RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b));
    RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a));
    RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c));
    RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c));

    cublasLtMatmulHeuristicResult_t results[kCandidates];
    int count = 0;
    RETURN_IF_ERROR(
        ToStatus(cublasLtMatmulAlgoGetHeuristic(handle, operation_, b_, a_, c_, c_, preference,
                                                kCandidates, results, &count),
                 absl::StrCat("no GEMM for [", shape.rows, ", ", shape.depth, "] x [", shape.cols,
                              ", ", shape.depth, "]")));
    for (int i = 0; i < count; ++i) {
      if (results[i].state == CUBLAS_STATUS_SUCCESS && results[i].workspaceSize == 0 &&
          AddsInOnePlace(results[i].algo)) {
        return results[i].algo;
      }
    }
    return absl::InternalError(absl::StrCat("no GEMM that adds in one place for [", shape.rows,
                                            ", ", shape.depth, "] x [", shape.cols, ", ",
                                            shape.depth, "] among ", count));
  }

  absl::Status Run(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm, const void* a,
                   const void* b, float* c, bool accumulate, cudaStream_t stream) const {
    const float alpha = 1, beta = accumulate ? 1.0f : 0.0f;
    return ToStatus(cublasLtMatmul(handle, operation_, &alpha, b, b_, a, a_, &beta, c, c_, c, c_,
                                   &algorithm, nullptr, 0, stream),
                    "GEMM");
  }

 private:
  static absl::Status Layout(cublasLtMatrixLayout_t* layout, cudaDataType_t type, int64_t rows,
                             int64_t cols, int64_t stride, int64_t count, int64_t step) {
    RETURN_IF_ERROR(ToStatus(cublasLtMatrixLayoutCreate(layout, type, rows, cols, stride), "GEMM"));
    const auto batch = static_cast<int32_t>(count);
    RETURN_IF_ERROR(
        ToStatus(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                  &batch, sizeof(batch)),
                 "GEMM"));
    return ToStatus(cublasLtMatrixLayoutSetAttribute(
                        *layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof(step)),
                    "GEMM");
  }

  // The largest power of two <= kAlignment that divides every row's and every problem's start.
  static uint32_t Alignment(std::initializer_list<int64_t> elements, int64_t size) {
    int64_t alignment = kAlignment;
    for (const int64_t count : elements) {
      while (count * size % alignment != 0) alignment /= 2;
    }
    return static_cast<uint32_t>(alignment);
  }

  static bool AddsInOnePlace(const cublasLtMatmulAlgo_t& algorithm) {
    int32_t split = 0;
    uint32_t scheme = 0;
    size_t written = 0;
    const bool known =
        cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split,
                                             sizeof(split), &written) == CUBLAS_STATUS_SUCCESS &&
        cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                             &scheme, sizeof(scheme),
                                             &written) == CUBLAS_STATUS_SUCCESS;
    return known && (split == 0 || split == 1) && scheme == CUBLASLT_REDUCTION_SCHEME_NONE;
  }

  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
};

// bf16 rows of activations and of parts start on 16 bytes.
int64_t PartsStride(int64_t cols) { return (cols + 7) / 8 * 8; }

}  // namespace

struct Gemm::State {
  ~State() {
    if (handle != nullptr) cublasLtDestroy(handle);
  }
  cublasLtHandle_t handle = nullptr;
  std::map<Shape, cublasLtMatmulAlgo_t> algorithms;

  // Runs `count` problems of `shape`, whose own count names the one that the algorithm is for.
  absl::Status Run(Shape shape, int64_t count, const void* a, const void* b, float* c,
                   cudaStream_t stream) {
    auto found = algorithms.find(shape);
    if (found == algorithms.end()) {
      Problem planned;
      RETURN_IF_ERROR(planned.Describe(shape));
      ASSIGN_OR_RETURN(const cublasLtMatmulAlgo_t algorithm, planned.Choose(handle, shape));
      found = algorithms.emplace(shape, algorithm).first;
    }
    shape.count = count;
    Problem problem;
    RETURN_IF_ERROR(problem.Describe(shape));
    return problem.Run(handle, found->second, a, b, c, shape.accumulate, stream);
  }
};

Gemm::Gemm(std::unique_ptr<State> state) : state_(std::move(state)) {}
Gemm::Gemm(Gemm&&) noexcept = default;
Gemm& Gemm::operator=(Gemm&&) noexcept = default;
Gemm::~Gemm() = default;

absl::StatusOr<Gemm> Gemm::Create() {
  auto state = std::make_unique<State>();
  RETURN_IF_ERROR(ToStatus(cublasLtCreate(&state->handle), "starting cuBLASLt"));
  return Gemm(std::move(state));
}

int64_t Gemm::LinearScratchBytes(const WeightMatrix& w, int64_t rows) {
  if (w.type == ElementType::kF32) return 0;
  const int64_t covered = RowsCovered(kParts * rows);
  return covered * (PartsStride(w.cols) * 2 + w.rows * 4);
}

absl::Status Gemm::Linear(const float* x, int64_t x_stride, int64_t rows, const WeightMatrix& w,
                          const float* bias, float* y, int64_t y_stride, void* scratch,
                          cudaStream_t stream) {
  MS_CHECK(x_stride >= w.cols && y_stride >= w.rows && w.stride >= w.cols);
  if (rows == 0) return absl::OkStatus();
  const bool narrow = w.type == ElementType::kBF16;
  Shape shape = {};
  shape.rows = kRowBlock;
  shape.cols = w.rows;
  shape.depth = w.cols;
  shape.count = kPlannedBlocks;
  shape.a_stride = narrow ? PartsStride(w.cols) : x_stride;
  shape.b_stride = w.stride;
  shape.c_stride = narrow ? w.rows : y_stride;
  shape.a_step = kRowBlock * shape.a_stride;
  shape.b_step = 0;  // every problem has the same weights
  shape.c_step = kRowBlock * shape.c_stride;
  shape.type = narrow ? CUDA_R_16BF : CUDA_R_32F;
  if (!narrow) {
    RETURN_IF_ERROR(state_->Run(shape, RowsCovered(rows) / kRowBlock, x, w.data, y, stream));
    return bias == nullptr ? absl::OkStatus() : AddBias(bias, rows, w.rows, y, y_stride, stream);
  }
  MS_CHECK(scratch != nullptr);
  const int64_t covered = RowsCovered(kParts * rows);
  auto* sums = static_cast<float*>(scratch);                           // [covered, N]
  auto* parts = reinterpret_cast<uint16_t*>(sums + covered * w.rows);  // [covered, PartsStride]
  RETURN_IF_ERROR(SplitRows(x, x_stride, rows, w.cols, shape.a_stride, parts, stream));
  RETURN_IF_ERROR(state_->Run(shape, covered / kRowBlock, parts, w.data, sums, stream));
  return JoinRows(sums, bias, rows, w.rows, y, y_stride, stream);
}

absl::Status Gemm::AddBlocks(const Blocks& blocks, cudaStream_t stream) {
  if (blocks.count == 0 || blocks.rows == 0 || blocks.cols == 0) return absl::OkStatus();
  Shape shape = {};
  shape.rows = blocks.rows;
  shape.cols = blocks.cols;
  shape.depth = blocks.depth;
  shape.count = blocks.count;
  shape.a_stride = blocks.a_stride;
  shape.b_stride = blocks.b_stride;
  shape.c_stride = blocks.c_stride;
  shape.a_step = blocks.a_step;
  shape.b_step = blocks.b_step;
  shape.c_step = blocks.c_step;
  shape.type = CUDA_R_32F;
  shape.accumulate = true;
  return state_->Run(shape, blocks.count, blocks.a, blocks.b, blocks.c, stream);
}

}  // namespace mambascope::kernels::cuda
