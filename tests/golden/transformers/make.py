"""Makes the small random Mamba of this folder and the logits that transformers gives for it.

    python make.py        # in an environment with torch and transformers

Writes config.json, model.safetensors and expected.safetensors (tokens, logits) beside itself. The
logits come from transformers' own path without fused kernels, in float32. Run again only to change
the model: the test compares with what is committed.
"""

import pathlib

import torch
import transformers
from safetensors.torch import save_file

FOLDER = pathlib.Path(__file__).parent
LENGTH = 50


def random_model():
    torch.manual_seed(11)
    config = transformers.MambaConfig(
        vocab_size=211, hidden_size=64, state_size=16, num_hidden_layers=3, conv_kernel=4, expand=2,
        use_bias=False, use_conv_bias=True, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model = transformers.MambaForCausalLM(config).float().eval()
    # The initial values of training leave most of the model near zero; these reach every part of it.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "norm_f.weight", ".D")):
                weight.uniform_(0.5, 1.5)
            elif name.endswith("conv1d.weight"):
                weight.uniform_(-0.8, 0.8)
            elif name.endswith("conv1d.bias"):
                weight.uniform_(-0.2, 0.2)
            elif name.endswith("dt_proj.bias"):
                weight.uniform_(-4, 0)
            elif name.endswith("A_log"):
                weight.uniform_(-1, 2.5)
            elif weight.dim() == 2:
                weight.normal_(std=weight.shape[1] ** -0.5)
    return model


def main():
    model = random_model()
    tokens = torch.randint(0, model.config.vocab_size, (LENGTH,))
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0]
    model.save_pretrained(FOLDER, safe_serialization=True)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)
    save_file({"tokens": tokens.to(torch.int32), "logits": logits.float().contiguous()},
              FOLDER / "expected.safetensors")
    print("transformers", transformers.__version__, "torch", torch.__version__,
          "max |logit|", logits.abs().max().item())


if __name__ == "__main__":
    main()
