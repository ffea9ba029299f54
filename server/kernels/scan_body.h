#pragma once

#include <cmath>

#include "server/kernels/host_device.h"
#include "server/kernels/math_body.h"

// One token's arithmetic of the selective scan, of Mamba-2's scan, of the convolution and of the
// norms (methods.md, section 1).
namespace mambascope::kernels::body {

struct ScanStep {  // one token's effect on one state: h -> decay * h + drive
  float decay, drive;
};

// `A` is times log2(e), which callers fold in once.
MS_HOST_DEVICE inline ScanStep Discretize(float delta, float A, float B, float x) {
  return {DecayPower(delta * A), delta * x * B};
}

MS_HOST_DEVICE inline float Advance(ScanStep step, float h) {
  return fmaf(step.decay, h, step.drive);
}

// `first`, then `second`, as one step. Associative, so a scan may regroup tokens; rounding still
// depends on the grouping, which is why the kernels here keep the order of the tokens.
MS_HOST_DEVICE inline ScanStep Then(ScanStep first, ScanStep second) {
  return {first.decay * second.decay, fmaf(second.decay, first.drive, second.drive)};
}

MS_HOST_DEVICE inline float Gate(float y, float D, float x, float z) {
  return fmaf(D, x, y) * Silu(z);
}

MS_HOST_DEVICE inline float ClampedDelta(float dt, float bias, float low, float high) {
  float delta = Softplus(dt + bias);
  delta = delta < low ? low : delta;
  return delta > high ? high : delta;
}

// One tap of the convolution; the last is the current token's.
MS_HOST_DEVICE inline float Tap(float weight, float input, float sum) {
  return fmaf(weight, input, sum);
}

MS_HOST_DEVICE inline float RmsScale(float sum_of_squares, float count, float eps) {
  return 1.0f / sqrtf(sum_of_squares / count + eps);
}

// One token of the adjoint scan (section 9, no. 2) for one state: the adjoint state after the
// token's own v C has entered. Leaving the token it is times `decay`.
MS_HOST_DEVICE inline float EnterAdjoint(float v, float C, float g) { return g + v * C; }

}  // namespace mambascope::kernels::body
