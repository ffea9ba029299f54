"""Times transformers on Mamba-2, in the format of the peers' benchmark.

usage: peer_mamba2.py FOLDER LENGTH... [--threads N]
"""
import argparse
import json
import time

import torch
from transformers import Mamba2ForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("lengths", type=int, nargs="+")
parser.add_argument("--threads", type=int, default=2)
args = parser.parse_args()
torch.set_num_threads(args.threads)
model = Mamba2ForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
with torch.no_grad():
    for length in args.lengths:
        ids = torch.randint(0, 50000, (1, length))
        best = float("inf")
        for _ in range(2):
            begin = time.perf_counter()
            model(ids)
            best = min(best, time.perf_counter() - begin)
        print(json.dumps({"peer": "transformers", "work": f"mamba2 prefill {length}", "tokens": length,
                          "seconds": round(best, 4), "tokens_per_s": round(length / best, 1)}), flush=True)
