"""Compares mambascope with transformers on a random model of mamba-130m's size.

    python check_130m.py path/to/mambascope [--tokens 200] [--folder DIR]

Needs torch and transformers; takes about a minute and 0.6 GB in DIR (a temporary folder by default).
Not part of the test run. Exit code 1 when a logit differs by more than 1e-4 of the largest.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file

BOUND = 1e-4  # of the largest logit: float32 sums of 24 layers in two orders


def model_of_130m():
    torch.manual_seed(5)
    config = transformers.MambaConfig(
        vocab_size=50280, hidden_size=768, state_size=16, num_hidden_layers=24, conv_kernel=4,
        expand=2, time_step_rank=48, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model = transformers.MambaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("conv1d.bias"):
                weight.uniform_(-0.2, 0.2)
            elif name.endswith("dt_proj.bias"):
                weight.uniform_(-4, 0)
            elif weight.dim() == 2 and not name.endswith("A_log"):
                weight.normal_(std=weight.shape[1] ** -0.5)
    return model


def ours(program, folder, tokens, output):
    command = [program, "predict", "--model", str(folder), "--tokens",
               ",".join(str(token) for token in tokens.tolist()), "--logits",
               "--output", str(output)]
    subprocess.run(command, check=True)
    return load_file(output)["logits"].flatten()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="the mambascope command")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--folder", type=pathlib.Path, help="where the model is written")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or pathlib.Path(scratch) / "model"
        model = model_of_130m()
        model.save_pretrained(folder, safe_serialization=True)
        tokens = torch.randint(0, model.config.vocab_size, (options.tokens,))
        with torch.no_grad():
            expected = model(tokens[None], use_cache=False).logits[0, -1].float()
        got = ours(options.program, folder, tokens, pathlib.Path(scratch) / "logits.safetensors")

    if got.shape != expected.shape:
        print(f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
        return 1
    largest = expected.abs().max().item()
    difference = (got - expected).abs().max().item()
    passed = difference <= BOUND * largest  # false for NaN, too
    print(f"{'ok' if passed else 'FAILED'}: max |difference| {difference:.3e}, max |logit| {largest:.3f}, "
          f"ratio {difference / largest:.2e} (bound {BOUND:.0e}), same token: "
          f"{got.argmax().item() == expected.argmax().item()}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
