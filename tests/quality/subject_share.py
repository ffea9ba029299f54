"""The table of tests/quality/run.sh: CLI SERVER QUESTIONS."""

import base64
import json
import math
import struct
import subprocess
import sys

COUNTRIES = """France Germany Italy Spain Portugal Poland Norway Sweden Finland Denmark Greece Turkey Egypt Kenya
Nigeria Ghana Ethiopia Morocco Algeria Tunisia Japan China India Thailand Vietnam Indonesia Malaysia Mongolia Nepal
Pakistan Iran Iraq Jordan Lebanon Israel Canada Mexico Cuba Peru Chile Argentina Bolivia Ecuador Colombia Venezuela
Uruguay Paraguay Australia Fiji Kazakhstan""".split()

METHODS = [
    ("raw_attention", "raw_attention"),
    ("raw_attention, abs_mean", "raw_attention:reduction=abs_mean"),
    ("attention_rollout", "attention_rollout"),
    ("attention_rollout, abs_mean", "attention_rollout:reduction=abs_mean"),
    ("mamba_attribution, without self", "mamba_attribution"),
    ("latim, alti_logit", "latim"),
    ("latim, alti_rollout", "latim:norm=alti_rollout"),
    ("mamba_lrp", "mamba_lrp"),
    ("gradient_x_input", "gradient_x_input"),
    ("integrated_gradients", "integrated_gradients:steps=32,baseline_token_id=1"),
    ("occlusion", "occlusion"),
]


def ask(cli, server, country):
    text = f"The capital of {country} is"
    command = [cli, "predict", "--server", server, "--model", "atlas", "--text", text, "--json",
               "--faithfulness", "--faithfulness_draws", "30"]
    for i, (_, options) in enumerate(METHODS):
        command += ["--explain", options + ("," if ":" in options else ":") + f"id=m{i}"]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if run.returncode != 0:
        sys.exit(run.stderr)
    return text, [json.loads(line) for line in run.stdout.splitlines()]


def scores_of(events, wanted):
    found = {}
    for event in events:
        chunk = event.get("tensor_chunk")
        if chunk is None or chunk.get("explanation_id") is None:
            continue
        key = (chunk["explanation_id"], chunk["tensor"])
        found[key] = found.get(key, b"") + base64.b64decode(chunk["data"])
    data = found[wanted]
    return struct.unpack(f"<{len(data) // 4}f", data)


def main():
    cli, server, questions = sys.argv[1], sys.argv[2], int(sys.argv[3])
    shares = [[] for _ in METHODS]
    deletion = [[] for _ in METHODS]
    token_shares, right = [], 0
    for country in COUNTRIES[:questions]:
        text, events = ask(cli, server, country)
        tokens = next(e["started"] for e in events if "started" in e)["tokens"]
        begin = len(text.encode()) - len(f" {country} is".encode())
        end = begin + len(f" {country}".encode())
        subject = [not t.get("special") and t.get("begin_byte", 0) < end and t.get("end_byte", 0) > begin for t in tokens]
        token_shares.append(sum(subject) / len(subject))
        right += any("token" in e for e in events)
        ends = {e["explanation_finished"]["explanation_id"]: e["explanation_finished"] for e in events if "explanation_finished" in e}
        for i, (name, options) in enumerate(METHODS):
            method = options.split(":")[0]
            tensor = "without_self" if method == "mamba_attribution" else method
            values = [abs(v) for v in scores_of(events, (f"m{i}", tensor))]
            total = sum(values)
            shares[i].append(sum(v for v, s in zip(values, subject) if s) / total if total > 0 else 0)
            auc = ends[f"m{i}"]["faithfulness"]["deletion_most_auc"]
            deletion[i].append((auc["value"], auc["random_mean"]))
    tokens_share = sum(token_shares) / len(token_shares)
    print(f"{len(token_shares)} capital questions; the subject is {100 * tokens_share:.0f} % of the tokens.\n")
    print("| Method | subject's share of the scores | times its share of tokens | deletion AUC, most relevant first | random order | difference, 95 % |")
    print("|---|---|---|---|---|---|")
    good = 0
    for (name, _), share, pairs in zip(METHODS, shares, deletion):
        mean = sum(share) / len(share)
        good += mean >= 1.5 * tokens_share
        differences = [value - random for value, random in pairs]
        center = sum(differences) / len(differences)
        spread = math.sqrt(sum((d - center) ** 2 for d in differences) / max(1, len(differences) - 1))
        half = 2.02 * spread / math.sqrt(len(differences))
        print(f"| {name} | {100 * mean:.0f} % | {mean / tokens_share:.2f} | {sum(v for v, _ in pairs) / len(pairs):.3f} "
              f"| {sum(r for _, r in pairs) / len(pairs):.3f} | {center:+.3f} ± {half:.3f} |")
    print(f"\n{good} of {len(METHODS)} methods give the subject at least 1.5 times its share.")
    sys.exit(0 if good >= 3 else 1)


if __name__ == "__main__":
    main()
