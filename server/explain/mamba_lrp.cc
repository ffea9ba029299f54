// MambaLRP (arXiv 2406.07592, section 4; methods.md, section 6): gradient x input under rules that
// conserve relevance. Mamba-2, Falcon-Mamba and contrasts are our extension of the paper's rules.
#include "server/explain/gradient_scores.h"

namespace mambascope::explain {

std::unique_ptr<const Method> NewMambaLrp() {
  return NewGradientScores("mamba_lrp", kernels::BackwardRule::kRelevance);
}

}  // namespace mambascope::explain
