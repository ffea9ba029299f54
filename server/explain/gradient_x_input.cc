// Gradient x input: sum_m e_jm df/de_jm (methods.md, section 6).
#include "server/explain/gradient_scores.h"

namespace mambascope::explain {

std::unique_ptr<const Method> NewGradientXInput() {
  return NewGradientScores("gradient_x_input", kernels::BackwardRule::kGradient);
}

}  // namespace mambascope::explain
