"""Measures a trained model: accuracy on what was trained and on what was held out, agreement with
transformers, and whether knocking out the scan's view of the subject changes the answer."""

import argparse
import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import kernel
from bpe import TEXT_END_ID
from data import (FILLERS, TEMPLATES, UNSEEN_FILLERS, UNSEEN_TEMPLATES, ending, load_countries, make_prompts)
from model import Mamba

ROWS = 64
KNOCKOUT_EVERY = 8    # every 8th country


@dataclass
class Row:
    """One prompt with one of its answers, as ids, and what the model made of it."""

    question: int
    ids: list
    start: int            # of the answer
    subject: range
    first: bool = False   # greedy first token is the answer's
    whole: bool = False   # so are all the others and the full stop
    p: float = 0.0        # of the answer's first token


def make_rows(tokenizer, prompts, fillers):
    rows, cache = [], {}

    def encode(text):
        if text not in cache:
            cache[text] = tokenizer.encode(text, add_special_tokens=False).ids
        return cache[text]

    questions = [(p, f) for p in prompts for f in fillers]
    for question, (prompt, filler) in enumerate(questions):
        before, subject = prompt.opening()
        head = [TEXT_END_ID, *encode(before)]
        named = head + encode(subject)
        asked = named + encode(filler) + encode(prompt.after)
        for answer in prompt.answers:
            rows.append(Row(question, asked + encode(ending(answer)), len(asked), range(len(head), len(named))))
    return questions, rows


def same_length_batches(rows, length=lambda row: len(row.ids)):
    """Batches without padding."""
    by_length = defaultdict(list)
    for row in rows:
        by_length[length(row)].append(row)
    for group in by_length.values():
        for k in range(0, len(group), ROWS):
            yield group[k:k + ROWS]


@torch.no_grad()
def answer_rows(model, rows):
    """Greedy decoding writes an answer exactly if each of its tokens is the largest given the ones
    before, so one pass over prompt and answer tells."""
    for group in same_length_batches(rows):
        logits = model(torch.tensor([row.ids for row in group]))
        best = logits.argmax(-1).tolist()
        for k, row in enumerate(group):
            hits = [best[k][i - 1] == row.ids[i] for i in range(row.start, len(row.ids))]
            row.first, row.whole = hits[0], all(hits)
            row.p = logits[k, row.start - 1].softmax(-1)[row.ids[row.start]].item()


def score(model, tokenizer, prompts, fillers):
    """relation -> counts, any right answer counting, and the mean p of its likeliest right first token."""
    questions, rows = make_rows(tokenizer, prompts, fillers)
    answer_rows(model, rows)
    by_question = defaultdict(list)
    for row in rows:
        by_question[row.question].append(row)
    table = defaultdict(lambda: {"prompts": 0, "first": 0, "whole": 0, "p": 0.0})
    for question, (prompt, _) in enumerate(questions):
        entry, answers = table[prompt.relation], by_question[question]
        entry["prompts"] += 1
        entry["first"] += any(r.first for r in answers)
        entry["whole"] += any(r.whole for r in answers)
        entry["p"] += max(r.p for r in answers)
    for entry in table.values():
        entry["mean_p"] = round(entry.pop("p") / entry["prompts"], 4)
    return dict(table)


def total(table):
    """Accuracy over all relations."""
    prompts = sum(e["prompts"] for e in table.values())
    return {"prompts": prompts,
            "first_accuracy": round(sum(e["first"] for e in table.values()) / prompts, 4),
            "whole_accuracy": round(sum(e["whole"] for e in table.values()) / prompts, 4),
            "mean_p": round(sum(e["mean_p"] * e["prompts"] for e in table.values()) / prompts, 4)}


def scored(model, tokenizer, prompts, fillers):
    table = score(model, tokenizer, prompts, fillers)
    return {"all": total(table), **table}


def measure_wordings(model, tokenizer, countries):
    """Each unseen wording by itself: they fail or succeed one by one."""
    result = {}
    for relation, wordings in UNSEEN_TEMPLATES.items():
        for wording in wordings:
            prompts = make_prompts(countries, {relation: [wording]})
            result[wording] = total(score(model, tokenizer, prompts, [""]))
    return result


def rounded_to_bfloat16(model):
    copy = Mamba()
    copy.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    return copy


def knockout_groups(row):
    """Positions the last token is kept from seeing, by name; the paper's groups."""
    last = row.start - 1
    return {"subject": list(row.subject), "last subject token": [row.subject[-1]], "first": [0],
            "relation": [i for i in range(1, last) if i not in row.subject]}


def knockout_windows(layers):
    """Single layers, three in a row, all."""
    windows = [range(k, k + width) for width in (1, 3) for k in range(layers - width + 1)]
    return {"-".join(map(str, sorted({w[0], w[-1]}))): w for w in [*windows, range(layers)]}


@torch.no_grad()
def answers_without(model, rows, group, window):
    """Hits and p of rows of one prompt length, the last token's scan cut off from a group in some layers."""
    hidden = torch.zeros(len(rows), rows[0].start, dtype=torch.bool)
    for k, row in enumerate(rows):
        hidden[k, knockout_groups(row)[group]] = True
    logits = model(torch.tensor([row.ids[:row.start] for row in rows]), hidden, window)[:, -1]
    wanted = torch.tensor([row.ids[row.start] for row in rows])
    p = logits.softmax(-1).gather(1, wanted[:, None])
    return (logits.argmax(-1) == wanted).sum().item(), p.sum().item()


def knockout(model, tokenizer, prompts):
    """Hit rate and mean p of the answer's first token, of prompts answered right before."""
    _, rows = make_rows(tokenizer, [p for p in prompts if len(p.answers) == 1], ["", FILLERS[2]])
    answer_rows(model, rows)
    rows = [row for row in rows if row.first]
    groups = list(same_length_batches(rows, lambda row: row.start))
    table = {}
    for name in ("subject", "last subject token", "relation", "first"):
        for window, layers in knockout_windows(len(model.backbone.layers)).items():
            sums = [answers_without(model, group, name, layers) for group in groups]
            table.setdefault(name, {})[window] = [round(sum(v) / len(rows), 3) for v in zip(*sums)]
    return {"prompts": len(rows), "clean_mean_p": round(sum(r.p for r in rows) / len(rows), 4),
            "hit_rate_and_mean_p": table}


@torch.no_grad()
def compare_with_transformers(folder, model):
    """Largest logit difference, relative to the largest logit, and the answer everyone asks for first."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = ["The capital of France is", "Japan, as every atlas says, speaks",
             "The currency of Kenya is the Kenyan shilling. A person from the Netherlands is called", "Oslo"]
    worst = 0.0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        wanted = theirs(ids).logits
        worst = max(worst, ((model(ids) - wanted).abs().max() / wanted.abs().max()).item())
    ids = tokenizer(texts[0], return_tensors="pt").input_ids
    return {"largest_relative_logit_difference": float(f"{worst:.2e}"),
            texts[0]: tokenizer.decode(theirs(ids).logits[0, -1].argmax())}


def evaluate(folder, countries):
    model = Mamba()
    model.load_state_dict(load_file(str(folder / "model.safetensors")))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = make_prompts(countries, TEMPLATES)
    trained, held = [p for p in prompts if not p.held_out], [p for p in prompts if p.held_out]
    sample = [p for p in make_prompts(countries[::KNOCKOUT_EVERY], TEMPLATES)
              if p.relation in ("capital", "continent", "currency", "language")]
    result = {
        "model_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "trained, no filler": scored(model, tokenizer, trained, [""]),
        "trained, every trained filler": scored(model, tokenizer, trained, FILLERS),
        "held-out pairs, no filler": scored(model, tokenizer, held, [""]),
        "held-out pairs, every trained filler": scored(model, tokenizer, held, FILLERS),
        "trained, weights rounded to bf16": scored(rounded_to_bfloat16(model), tokenizer, trained, [""]),
        "unseen fillers": {f: scored(model, tokenizer, trained, [f]) for f in UNSEEN_FILLERS},
        "unseen wordings": measure_wordings(model, tokenizer, countries),
        "transformers": compare_with_transformers(folder, model),
        "knockout": knockout(model, tokenizer, sample),
    }
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--countries", required=True)
    parser.add_argument("--model", required=True, help="folder written by train.py")
    parser.add_argument("--build", required=True)
    parser.add_argument("--out", required=True, help="JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernel.build(options.build)
    result = evaluate(Path(options.model), load_countries(options.countries))
    Path(options.out).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for name in result:
        if isinstance(result[name], dict) and "all" in result[name]:
            print(f"{name}: {result[name]['all']}")
    print(json.dumps({k: result[k] for k in ("unseen wordings", "transformers")}, indent=1, ensure_ascii=False))
    if result["trained, every trained filler"]["all"]["first_accuracy"] < 0.99:
        raise SystemExit("below 99 % on trained prompts")


if __name__ == "__main__":
    main()
