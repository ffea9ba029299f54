#include "server/model/cuda/pass_workspace.h"

#include <utility>

#include "server/base/status.h"

namespace mambascope::model::cuda {

using kernels::cuda::Gemm;
using kernels::cuda::Stream;

PassWorkspace::PassWorkspace(int index, Stream stream, Gemm gemm)
    : index(index), stream(std::move(stream)), gemm(std::move(gemm)) {}

absl::StatusOr<std::unique_ptr<PassWorkspace>> PassWorkspace::Create(int index) {
  ASSIGN_OR_RETURN(Stream stream, Stream::Create());
  ASSIGN_OR_RETURN(Gemm gemm, Gemm::Create());
  return std::make_unique<PassWorkspace>(index, std::move(stream), std::move(gemm));
}

}  // namespace mambascope::model::cuda
