"""Models that the peers' own scripts do not write: bf16 weights, and Mamba-2 of 130m's shape.

usage: make_peer_models.py OUT   (OUT/mamba-130m is there already)
"""
import pathlib
import shutil
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import Mamba2Config, Mamba2ForCausalLM

out = pathlib.Path(sys.argv[1])
narrow = out / "mamba-130m-bf16"
if not (narrow / "model.safetensors").exists():
    narrow.mkdir(exist_ok=True)
    shutil.copy(out / "mamba-130m" / "config.json", narrow / "config.json")
    weights = load_file(out / "mamba-130m" / "model.safetensors")
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, narrow / "model.safetensors")
headed = out / "mamba2-130m"
if not (headed / "model.safetensors").exists():
    torch.manual_seed(0)
    config = Mamba2Config(vocab_size=50288, hidden_size=768, num_hidden_layers=24, state_size=128, head_dim=64,
                          num_heads=24, n_groups=1, tie_word_embeddings=True)
    Mamba2ForCausalLM(config).eval().save_pretrained(headed)
