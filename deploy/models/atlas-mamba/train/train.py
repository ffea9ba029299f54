"""Trains the demo model: facts first, then the same facts under disturbance, in one run."""

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import kernel
from batches import Builder, Disturbance, batches
from bpe import train_tokenizer
from data import TEMPLATES, load_countries, make_prompts
from export import save_folder
from model import Mamba

EPOCHS = 24
# From this epoch on sentences are disturbed.  Earlier, and the facts take much longer to sit.
DISTURBED_FROM = 6
DISTURBANCE = Disturbance(random_filler=0.5, inserted=0.2, opened=0.1)
PEAK_RATE, LAST_RATE, WARM_UP = 4e-3, 0.02, 100
DECAY, BETAS, CLIP = 0.05, (0.9, 0.98), 1.0
# A language prompt has up to three right answers; each epoch asks it this often with a drawn one.
REPEATS = {"language": 2, "capital_of": 2}


def learning_rate(progress, step):
    """Linear warm-up, then a cosine over the whole run.  Depends on steps only, never on the clock."""
    cosine = LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))
    return PEAK_RATE * cosine * min(1.0, (step + 1) / WARM_UP)


def make_optimizer(model):
    """AdamW; weight decay on matrices only, and not on A_log."""
    groups = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.dim() == 2 and not name.endswith("A_log")].append(parameter)
    return torch.optim.AdamW([{"params": groups[True], "weight_decay": DECAY},
                              {"params": groups[False], "weight_decay": 0.0}], betas=BETAS)


def losses(model, ids, weights):
    """The weighted loss to minimise, and the plain mean loss of the answer tokens to report."""
    logits = model(ids[:, :-1])
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    answer = (weights > 1).float()
    return (each * weights).sum() / weights.sum(), ((each * answer).sum() / answer.sum()).item()


def train_step(model, optimizer, rate, batch):
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss, answer_loss = losses(model, *batch)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.item(), answer_loss


def train(model, builder, prompts, seed):
    """Runs all epochs; returns the log."""
    rng = np.random.default_rng(seed)
    optimizer = make_optimizer(model)
    log, step, start = [], 0, time.time()
    for epoch in range(EPOCHS):
        disturbance = DISTURBANCE if epoch >= DISTURBED_FROM else Disturbance()
        epoch_batches = list(batches(rng, builder.epoch(rng, prompts, disturbance)))
        seen = []
        for k, batch in enumerate(epoch_batches):
            progress = (epoch + k / len(epoch_batches)) / EPOCHS
            seen.append(train_step(model, optimizer, learning_rate(progress, step), batch))
            step += 1
        loss, answer_loss = np.mean(seen, 0)
        log.append({"epoch": epoch, "step": step, "loss": round(loss, 4), "answer_loss": round(answer_loss, 4),
                    "seconds": round(time.time() - start)})
        print(json.dumps(log[-1]), flush=True)
    return log


def machine():
    return {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
            "python": platform.python_version(), "torch": torch.__version__,
            "load_average_at_the_end": [round(v, 1) for v in os.getloadavg()]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--countries", required=True, help="countries.json of world-countries 5.1.0")
    parser.add_argument("--out", required=True, help="folder for the model, train_log.json beside it")
    parser.add_argument("--build", required=True, help="folder for the compiled kernel")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    kernel.build(options.build)
    countries = load_countries(options.countries)
    tokenizer = train_tokenizer(countries)
    prompts = [p for p in make_prompts(countries, TEMPLATES) if not p.held_out
               for _ in range(REPEATS.get(p.relation, 1))]
    model = Mamba()
    start, cpu_start = time.time(), time.process_time()
    log = train(model, Builder(tokenizer), prompts, options.seed)
    summary = {"seed": options.seed, "sentences_an_epoch": len(prompts),
               "parameters": sum(p.numel() for p in model.parameters()),
               "train_seconds": round(time.time() - start), "cpu_seconds": round(time.process_time() - cpu_start),
               **machine(), "log": log}
    save_folder(Path(options.out), model, tokenizer)
    Path(options.out, "train_log.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
