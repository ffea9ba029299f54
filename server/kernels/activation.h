#pragma once

namespace mambascope::kernels {

// The convolution's activation f; the gate is always SiLU (methods.md, section 1).
enum class Activation { kSilu, kRelu, kIdentity };

}  // namespace mambascope::kernels
