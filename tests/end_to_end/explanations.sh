#!/usr/bin/env bash
# Every method on every golden model through server and command line: the tensors of --output against
# the float64 oracle, then what a person sees and what is refused.
set -euo pipefail
source "$(dirname "$0")/../support/live_server.sh"
models=()
for folder in tests/golden/*/; do
  [ -f "$folder/relevance.safetensors" ] && models+=(--model "$(basename "$folder")=$folder")
done
start_server "${models[@]}" --model atlas-mamba=deploy/models/atlas-mamba/1
cli=$bin/mambascope
python3 - "$cli" "127.0.0.1:$grpc" "$work" <<'PY'
import array, concurrent.futures, json, os, pathlib, struct, subprocess, sys

cli, server, work = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])

# Largest |difference| by tolerance class, times s = max(0.1, largest |value|) but for P.
BOUNDS = {"F": 5e-5, "M": 5e-5, "G": 5e-5, "R": 1e-3, "Z": 1e-3, "P": 5e-5, "exact": 0}


def read(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, info in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = info["data_offsets"]
            kind = {"F64": "d", "F32": "f", "I32": "i"}[info["dtype"]]
            tensors[name] = array.array(kind, data[8 + size + begin:8 + size + end])
    return tensors


def predict(model, *arguments):
    return subprocess.run([cli, "predict", "--server", server, "--model", model, *arguments],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def methods(models):
    """By model, the names of those that explain it."""
    names = [part for model in models for part in ("--model", model)]
    run = subprocess.run([cli, "models", "--server", server, *names, "--json"], stdout=subprocess.PIPE, check=True)
    answers = map(json.loads, run.stdout.splitlines())
    return {answer["model"]["name"]: [method["name"] for method in answer["methods"]] for answer in answers}


def write_image(path, values):
    header = json.dumps({"image": {"dtype": "F32", "shape": [3, 16, 16], "data_offsets": [0, 12 * 256]}})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + array.array("f", values).tobytes())


class Input:
    """One input of a golden model: how it is given, and what the oracle says of it."""

    def __init__(self, folder, files, name, given, about):
        self.files, self.name, self.folder = files, name, folder
        self.contrast, self.token = given["contrast"], about.get("replacement_token")
        self.text, self.methods = "tokens" in given, about["methods"]
        self.layers = sum(f"{name}/layer{k}/mean" in files["attention"] for k in range(64))
        config = json.loads((folder / "config.json").read_text().replace("Infinity", "0"))
        self.classes = not self.text or "ForSequenceClassification" in str(config.get("architectures"))
        if self.text:
            self.what = ["--tokens", ",".join(map(str, given["tokens"]))]
        else:
            images = next(iter(read(folder / "images.safetensors").values()))
            half = len(images) // 2 * int(name[-1])
            write_image(work / f"{name}.safetensors", images[half:half + len(images) // 2])
            self.what = ["--image", str(work / f"{name}.safetensors")]

    def golden(self, file, names):
        """The named tensors one after the other; of a name with {} all layers'. None if the oracle has none."""
        names = [names.format(k) for k in range(self.layers)] if "{}" in names else [names]
        tensors = [self.files[file].get(f"{self.name}/{name}") for name in names]
        return None if None in tensors else [value for tensor in tensors for value in tensor]


# option: the tensors of its output, each with the oracle's file and name and its tolerance class
def maps():
    return {
        "hidden_attention:id=mean": {"mean": ("attention", "layer{}/mean", "M")},
        "hidden_attention:id=abs,reduction=abs_mean": {"abs": ("attention", "layer{}/absmean", "M")},
        "hidden_attention:id=top,reduction=top_k,top_k=3": {
            "top": ("attention", "layer{}/topk3", "M"), "top/indices": ("attention", "layer{}/topk3_indices", "exact")},
        "hidden_attention:id=mixer,scope=mixer": {"mixer": ("attention", "layer{}/unified_mean", "M")},
        "raw_attention:id=raw": {"raw": ("aggregation", "start0/raw", "M")},
        "raw_attention:id=raw_abs,reduction=abs_mean": {"raw_abs": ("aggregation", "start0/raw_absmean", "M")},
        "attention_rollout:id=row": {"row": ("aggregation", "start0/rollout_row_paper", "M")},
        "attention_rollout:id=map,rows=all": {"map": ("aggregation", "start0/rollout_paper", "M")},
        "attention_rollout:id=sums,normalization=row_sum": {"sums": ("aggregation", "start0/rollout_row_row_sum", "R")},
        "attention_rollout:id=sum_map,normalization=row_sum,rows=all": {
            "sum_map": ("aggregation", "start0/rollout_row_sum", "R")},
        "attention_rollout:id=abs_map,reduction=abs_mean,rows=all": {
            "abs_map": ("aggregation", "start0/rollout_absmean_row_sum", "R")},
        "mamba_attribution:id=attribution": {
            "attribution": ("aggregation", "start0/attribution_source", "G"),
            "attribution/without_self": ("aggregation", "start0/attribution_without_self", "G")},
        "mamba_attribution:id=output,broadcast=output": {"output": ("aggregation", "start0/attribution_output", "G")},
        "latim:id=l1,norm=l1,rows=all": {"l1": ("latim", "layer{}/gate/l1", "M")},
        "latim:id=l2,norm=l2,rows=all": {"l2": ("latim", "layer{}/gate/l2", "M")},
        "latim:id=alti,norm=alti,rows=all": {"alti": ("latim", "layer{}/gate/alti_mixer", "R")},
    }


def scores(of, side):
    contrast = "" if side == "target" else f",contrast={'class:' if of.classes else ''}{of.contrast}"
    baseline = f",baseline_token_id={of.token}" if of.text else ""
    latim, alti = f"latim_{side}", f"alti_logit_gate/{side}/"
    return {
        f"latim:id={latim}{contrast}": {
            latim: ("latim", alti + "tokens", "M"),
            **{f"{latim}/{name}": ("latim", alti + name, "M")
               for name in ("per_layer", "embedding", "embedding_tokens", "constant")}},
        f"gradient_x_input:id=gradient_{side}{contrast}": {
            f"gradient_{side}": ("relevance", f"{side}/gradient_x_input", "G")},
        f"integrated_gradients:id=ig_{side}{baseline}{contrast}": {
            f"ig_{side}": ("relevance", f"{side}/integrated_gradients", "G")},
    }


def others(of):
    def occlusion(id, kind):
        return {id + suffix: ("relevance", f"occlusion_{kind}/{name}", "F") for suffix, name in (
            ("", "logit_drop"), ("/logprob_drop", "logprob_drop"), ("/perplexity_ratio", "perplexity_ratio"))}

    def curves(kind):
        names = [f"{way}_{first}{hit}" for way in ("deletion", "insertion") for first in ("most", "least")
                 for hit in ("", "_hit")]
        return {f"lrp_{kind}": ("relevance", "target/lrp", "G"), **{
            f"lrp_{kind}/faithfulness/{name}": ("faithfulness", f"{kind}/{name}", "exact" if "hit" in name else "P")
            for name in names}}

    contrast = f"contrast={'class:' if of.classes else ''}{of.contrast}"
    positions = "+".join(map(str, of.golden("lens", "positions")))
    cases = {
        f"mamba_lrp:id=lrp,{contrast}": {"lrp": ("relevance", "contrast/lrp", "G")},
        "integrated_gradients:id=ig_zero,zero_baseline": {
            "ig_zero": ("relevance", "target/integrated_gradients_zero", "Z")},
        "occlusion": occlusion("occlusion", "zero"),
        "latim:id=rollout,norm=alti_rollout,rows=all": {"rollout": ("latim", "rollout_gate", "R")},
        f"logit_lens:id=lens,top=3,positions={positions}": {},
        f"edge_lens:id=edges,top=3,sources={positions}": {},
    }
    for removal in ("zero", "delete", f"token:{of.token}") if of.text else ("zero",):
        kind = removal.split(":")[0]
        cases[f"mamba_lrp:id=lrp_{kind},faithfulness={removal},faithfulness_draws=0,faithfulness_points=513"] = (
            curves(kind))
    if of.text:
        cases[f"occlusion:id=occlusion_token,replacement_token_id={of.token}"] = occlusion("occlusion_token", "token")
    return cases


def lens_top(of, which, end):
    """The first three of the oracle's best tokens of each cell."""
    width = len(of.golden("lens", f"{which}/{end}")) // (of.layers * len(of.golden("lens", "positions")))
    values = of.golden("lens", f"{which}/{end}")
    return [value for i in range(0, len(values), width) for value in values[i:i + 3]]


def compare(of, name, got, expected, kind):
    assert len(got) == len(expected), (of.folder.name, of.name, name, len(got), len(expected))
    scale = 1 if kind == "P" else max(0.1, max(map(abs, expected), default=0))
    error = max((abs(a - b) for a, b in zip(got, expected)), default=0) / scale
    assert error <= BOUNDS[kind], (of.folder.name, of.name, name, error, kind)


def explain(of, options):
    """The tensors of all explanations; a request holds 16."""
    got = {}
    for first in range(0, len(options), 16):
        parts = [part for option in options[first:first + 16] for part in ("--explain", option)]
        output = work / f"{of.folder.name}-{of.name}.safetensors"
        run = predict(of.folder.name, *of.what, *parts, "--output", str(output))
        assert run.returncode == 0, (of.folder.name, of.name, run.stdout)
        got.update(read(output))
    return got


def check(of):
    cases = {**maps(), **scores(of, "target"), **scores(of, "contrast"), **others(of)}
    cases = {option: tensors for option, tensors in cases.items() if option.split(":")[0] in of.methods}
    got = explain(of, list(cases))
    compared = []
    for tensors in cases.values():
        for name, (file, golden, kind) in tensors.items():
            expected = of.golden(file, golden)
            if expected is not None:
                compared.append(compare(of, name, got[name], expected, kind))
    for id, which, kind in (("lens", "logit_lens", "F"), ("edges", "edge_lens", "M")):
        compared.append(compare(of, id, got[id], lens_top(of, which, "values"), kind))
        compared.append(compare(of, id + "/ids", got[id + "/ids"], lens_top(of, which, "ids"), "exact"))
    return len(compared)


def inputs():
    folders = sorted(file.parent for file in pathlib.Path("tests/golden").glob("*/relevance.safetensors"))
    explaining = methods([folder.name for folder in folders])
    for folder in folders:
        files = {name: read(folder / f"{name}.safetensors")
                 for name in ("attention", "aggregation", "latim", "relevance", "lens", "faithfulness")}
        about = {**json.loads((folder / "inputs.json").read_text()), "methods": explaining[folder.name]}
        for name, given in about["inputs"].items():
            yield Input(folder, files, name, given, about)


# Most of the time goes into starting the command line.
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    counts = list(pool.map(check, inputs()))
assert sum(counts) >= 2031, (sum(counts), counts)
PY

# What a person sees.
at=(--server "127.0.0.1:$grpc" --model atlas-mamba)
text="The capital of France is"
expect_exit 0 "$cli" predict "${at[@]}" --text "$text" --top_logprobs 5 --faithfulness=delete --faithfulness_draws 5 \
  --explain mamba_lrp:words,sentences,spans=4-10 --explain mamba_attribution --explain logit_lens:top=3 \
  --explain hidden_attention --explain latim
for part in "deletion area, best first" "5 random orders" "not shown: nearly all of it is the target's own" \
    "position  best tokens" "words" "sentences" "the rest" "itself  entropy" "the parts sum to" "within the tolerance" \
    "decomposition error" "agreement" "Kendall"; do
  expect "$part" "$work/out"
done
expect_exit 0 "$cli" predict "${at[@]}" --text "$text" --max_tokens 3 --target gen:1-2 \
  --explain gradient_x_input --explain occlusion:target=gen:0
expect "why the generated tokens 1 to 2: sum of logits" "$work/out"
expect "generated token 0: logit" "$work/out"
expect_exit 0 "$cli" models --server "127.0.0.1:$grpc" --model atlas-mamba
expect "seconds" "$work/out"
expect "integrated_gradients" "$work/out"

# However it travels, --output holds dense floats.
python3 - "$cli" "127.0.0.1:$grpc" "$work" <<'PY'
import array, json, pathlib, struct, subprocess, sys

cli, server, work = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])


def maps(*delivery):
    path = work / "maps.safetensors"
    subprocess.run([cli, "predict", "--server", server, "--model", "atlas-mamba", "--text", "The capital of France is",
                    "--explain", "hidden_attention", "--output", str(path), *delivery],
                   check=True, stdout=subprocess.DEVNULL)
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    info = json.loads(data[8:8 + size])["hidden_attention"]
    assert info["dtype"] == "F32", info
    return info["shape"], array.array("f", data[8 + size:][slice(*info["data_offsets"])])


shape, exact = maps()
largest = max(map(abs, exact))
for delivery, bound in {("--delivery", "fp16"): 2 ** -11 * largest, ("--delivery", "uint8"): largest / 254,
                        ("--sparse", "mass:1"): 0, ("--sparse", f"top_k:{shape[-1]}"): 0,
                        ("--sparse", "threshold:0.01", "--delivery", "fp16"): 0.01}.items():
    other, values = maps(*delivery)
    assert other == shape, (delivery, other)
    assert max(abs(a - b) for a, b in zip(exact, values)) <= bound * 1.01, delivery
assert sum(value != 0 for value in maps("--sparse", "top_k:1")[1]) == shape[0] * shape[1]
PY

# What is refused, and how.
expect_exit 2 "$cli" predict "${at[@]}" --text x --faithfulness --explain logit_lens
expect "gives one score for each token" "$work/out"
expect_exit 2 "$cli" predict "${at[@]}" --text x --explain occlusion:replace=3
expect "replacement_token_id" "$work/out"
expect_exit 3 "$cli" predict "${at[@]}" --text x --explain occlusion --delivery uint8 --sparse top_k:3
expect "delivery.sparse_top_k" "$work/out"
