"""The C++ kernel as two differentiable torch functions, and the same in plain torch to check it."""

import ctypes
import os
import subprocess
from pathlib import Path

import torch
import torch.nn.functional as F

SOURCE = Path(__file__).with_name("kernel.cc")
# -march=native: the library is built where it runs and never shipped.  No -ffast-math: the
# reductions that may be reordered say so themselves (omp simd).
FLAGS = ["-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math",
         "-shared", "-fPIC"]
FUNCTIONS = ("conv_forward", "conv_backward", "scan_forward", "scan_backward")

_library = None


def build(folder):
    """Compiles the kernel into `folder` and loads it."""
    global _library
    path = Path(folder) / "libatlas_kernel.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(path)], check=True)
    _library = ctypes.CDLL(str(path.resolve()))
    for name in FUNCTIONS:
        getattr(_library, name).restype = None


def call(name, *arguments):
    """Calls a kernel function: tensors become pointers, numbers longs."""
    converted = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_long(a)
                 for a in arguments]
    getattr(_library, name)(*converted)


def token_stride(rows):
    """Floats between two tokens of a [batch, length, channels] view into wider rows."""
    batch, length, channels = rows.shape
    stride = rows.stride(1)
    if rows.dtype != torch.float32 or rows.stride(2) != 1 or (batch > 1 and rows.stride(0) != length * stride):
        raise ValueError("the kernel needs float32 rows of evenly spaced tokens")
    return stride


class ConvSilu(torch.autograd.Function):
    """silu(causal depthwise convolution): x [B, L, D], weight [D, K], bias [D]."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        taps_first = weight.t().contiguous()
        out = torch.empty(x.shape)
        call("conv_forward", x, token_stride(x), taps_first, bias, out, *x.shape, weight.shape[1])
        ctx.save_for_backward(x, taps_first, bias)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, taps_first, bias = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x, grad_taps, grad_bias = torch.zeros(x.shape), torch.zeros_like(taps_first), torch.zeros_like(bias)
        call("conv_backward", x, token_stride(x), taps_first, bias, grad, grad_x, grad_taps, grad_bias,
             *x.shape, taps_first.shape[0])
        return grad_x, grad_taps.t(), grad_bias


class GatedScan(torch.autograd.Function):
    """(scan(x) + skip x) silu(z): x, delta, z [B, L, D]; a [D, N] negative; b, c [B, L, N]."""

    @staticmethod
    def forward(ctx, x, delta, a, b, c, skip, z):
        x, delta, b, c = (t.contiguous() for t in (x, delta, b, c))
        states_first = a.t().contiguous()
        out = torch.empty(x.shape)
        call("scan_forward", x, delta, states_first, b, c, skip, z, token_stride(z), out, *x.shape, a.shape[1])
        ctx.save_for_backward(x, delta, states_first, b, c, skip, z)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, delta, states_first, b, c, skip, z = ctx.saved_tensors
        grad = grad.contiguous()
        grad_a, grad_skip = torch.zeros_like(states_first), torch.zeros_like(skip)
        grad_x, grad_delta, grad_z = (torch.empty(x.shape) for _ in range(3))
        grad_b, grad_c = torch.empty_like(b), torch.empty_like(c)
        call("scan_backward", x, delta, states_first, b, c, skip, z, token_stride(z), grad, grad_x, grad_delta,
             grad_a, grad_b, grad_c, grad_skip, grad_z, *x.shape, states_first.shape[0])
        return grad_x, grad_delta, grad_a.t(), grad_b, grad_c, grad_skip, grad_z


def conv_silu_reference(x, weight, bias):
    """ConvSilu in plain torch."""
    taps = weight.shape[1]
    padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0]).transpose(1, 2))


def gated_scan_reference(x, delta, a, b, c, skip, z):
    """GatedScan in plain torch, step by step."""
    state = torch.zeros(x.shape[0], *a.shape, dtype=x.dtype)
    rows = []
    for i in range(x.shape[1]):
        decay = torch.exp(delta[:, i, :, None] * a)
        state = decay * state + (delta[:, i] * x[:, i])[..., None] * b[:, i, None, :]
        rows.append((state * c[:, i, None, :]).sum(-1))
    return (torch.stack(rows, 1) + skip * x) * F.silu(z)
