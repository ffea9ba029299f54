#pragma once

namespace mambascope::kernels {

// How a nonlinear step hands a gradient back (methods.md, section 6): by its derivative, or by the
// rules of MambaLRP (arXiv 2406.07592), which take f(v) for v times a frozen f(v) / v, half of a
// product for each factor, and a norm's scale for a constant.
enum class BackwardRule { kGradient, kRelevance };

}  // namespace mambascope::kernels
