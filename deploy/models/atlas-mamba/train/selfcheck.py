"""Compares the C++ kernel with plain torch in float64: outputs and all gradients."""

import sys

import torch

from kernel import ConvSilu, GatedScan, build, conv_silu_reference, gated_scan_reference

TOLERANCE = 2e-5    # of the largest value; float32 against float64


def conv_inputs(batch, length, channels, taps):
    # The two halves of one wide row, as the model has them: the kernel must respect the stride.
    wide = torch.randn(batch, length, 2 * channels)
    return wide[..., :channels], torch.randn(channels, taps), torch.randn(channels)


def scan_inputs(batch, length, channels, states):
    wide = torch.randn(batch, length, 2 * channels)
    return (torch.randn(batch, length, channels), torch.rand(batch, length, channels),
            -torch.rand(channels, states) * states, torch.randn(batch, length, states),
            torch.randn(batch, length, states), torch.randn(channels), wide[..., channels:])


def run(function, inputs, weights):
    """The output and the gradients of sum(weights * output) in every input."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def largest_difference(kernel, reference, inputs):
    weights = torch.randn(inputs[0].shape)
    got = run(kernel, inputs, weights)
    wanted = run(reference, [t.double() for t in inputs], weights.double())
    return max(((g - w).abs().max() / w.abs().max()).item() for g, w in zip(got, wanted))


def main(build_folder):
    torch.manual_seed(0)
    build(build_folder)
    cases = [("conv, 2 taps", ConvSilu.apply, conv_silu_reference, conv_inputs(3, 9, 40, 2)),
             ("conv, 4 taps, 3 tokens", ConvSilu.apply, conv_silu_reference, conv_inputs(2, 3, 256, 4)),
             ("conv, 1 token", ConvSilu.apply, conv_silu_reference, conv_inputs(1, 1, 7, 2)),
             ("scan, 256 channels", GatedScan.apply, gated_scan_reference, scan_inputs(3, 33, 256, 16)),
             ("scan, odd sizes", GatedScan.apply, gated_scan_reference, scan_inputs(2, 11, 37, 5)),
             ("scan, 1 token", GatedScan.apply, gated_scan_reference, scan_inputs(1, 1, 5, 3))]
    worst = 0.0
    for name, kernel, reference, inputs in cases:
        difference = largest_difference(kernel, reference, inputs)
        worst = max(worst, difference)
        print(f"{name}: largest relative difference {difference:.1e}")
    print("kernel agrees with plain torch" if worst < TOLERANCE else "KERNEL DIFFERS FROM PLAIN TORCH")
    return 0 if worst < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
