"""Compares mambascope with transformers on random models of published sizes.

    python check_sizes.py path/to/mambascope [SIZE...] [--tokens 200]

Needs torch and transformers; about five minutes and 4 GB of temporary files for all sizes. Not part of
the test run. Exit code 1 when a logit differs by more than 1e-4 of the largest.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file

BOUND = 1e-4  # of the largest logit: float32 sums in two orders


def mamba(width, layers):
    return transformers.MambaForCausalLM(transformers.MambaConfig(
        vocab_size=50280, hidden_size=width, state_size=16, num_hidden_layers=layers))


def mamba2(width, layers):
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(
        vocab_size=50288, hidden_size=width, state_size=128, head_dim=64, num_heads=width // 32, n_groups=1,
        num_hidden_layers=layers, tie_word_embeddings=True))


def falcon(width, layers):
    return transformers.FalconMambaForCausalLM(transformers.FalconMambaConfig(
        vocab_size=65024, hidden_size=width, state_size=16, num_hidden_layers=layers, intermediate_size=2 * width,
        tie_word_embeddings=False))


# Four layers of the larger ones: the widths are what matters, and they fit a small machine.
SIZES = {
    "mamba-130m": lambda: mamba(768, 24),
    "mamba-370m": lambda: mamba(1024, 48),
    "mamba-2.8b-cut": lambda: mamba(2560, 4),
    "mamba2-130m": lambda: mamba2(768, 24),
    "mamba2-370m": lambda: mamba2(1024, 48),
    "mamba2-2.7b-cut": lambda: mamba2(2560, 4),
    "falcon-mamba-7b-cut": lambda: falcon(4096, 4),
}


def randomise(model):
    """Weights at the scales of a trained model, so that every part matters."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("conv1d.bias"):
                weight.uniform_(-0.2, 0.2)
            elif name.endswith(("dt_proj.bias", "dt_bias")):
                weight.uniform_(-4, 0)
            elif name.endswith("A_log"):
                weight.uniform_(-1, 2.5)
            elif weight.dim() == 2:
                weight.normal_(std=weight.shape[1] ** -0.5)
    return model


def ours(program, folder, tokens, output):
    command = [program, "predict", "--model", str(folder), "--tokens",
               ",".join(str(token) for token in tokens.tolist()), "--logits",
               "--output", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return load_file(output)["logits"].flatten()


def check(program, name, count):
    torch.manual_seed(5)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "model"
        model = randomise(SIZES[name]().float().eval())
        model.save_pretrained(folder, safe_serialization=True)
        tokens = torch.randint(0, model.config.vocab_size, (count,))
        with torch.no_grad():
            expected = model(tokens[None], use_cache=False).logits[0, -1].float()
        got = ours(program, folder, tokens, pathlib.Path(scratch) / "logits.safetensors")
    largest = expected.abs().max().item()
    difference = (got - expected).abs().max().item() if got.shape == expected.shape else float("nan")
    passed = difference <= BOUND * largest  # false for NaN, too
    print(f"{'ok' if passed else 'FAILED'}: {name}: max |difference| {difference:.3e}, max |logit| {largest:.3f}, "
          f"ratio {difference / largest:.2e} (bound {BOUND:.0e})", flush=True)
    return passed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="the mambascope command")
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=", ".join(SIZES))
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    results = [check(options.program, name, options.tokens) for name in options.sizes or SIZES]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
