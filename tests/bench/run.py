"""Drives model_bench, the server and the peers alternately and prints the table of bars.

See run.sh. Each figure is the best of the rounds; a ratio compares figures of this run only.
"""
import argparse
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = ROOT / "build" / "bin"
DEMO = ROOT / "deploy" / "models" / "atlas-mamba" / "1"
WORKS = {
    "P1": ["prefill:512", "prefill:1024"],
    "P2": ["decode:64"],
    "P3": ["decode:64", "joined:32"],
    "P4": ["gemm", "prefill:512", "prefill:1024", "hidden_attention:512", "hidden_attention:1024"],
    "P5": ["prefill:1024", "prefill:16384", "raw_attention:1024", "attention_rollout:1024", "attention_rollout:16384"],
    "P6": ["prefill:512", "gradient_x_input:512", "mamba_lrp:512", "hidden_attention:512", "mamba_attribution:512"],
    "P7": ["prefill:512", "latim{norm:NORM_L2}:512"],
    "faithfulness": ["prefill:128", "deletions:128"],
    "P10": [],
    "P12": [],
    "P14": [],
}
# Of other models than the reference: (bar, model, label, works).
OTHERS = [
    ("P2", "mamba-130m-bf16", "bf16", ["decode:64"]),
    ("P3", "mamba-130m-bf16", "bf16", ["joined:32"]),
    ("P10", "mamba2-130m", "mamba2", ["prefill:512", "prefill:1024", "hidden_attention:1024"]),
]
ONCE = {"prefill:16384", "attention_rollout:16384"}  # long ones: one round


def peers_folder():
    return pathlib.Path(os.environ.get("MAMBASCOPE_PEERS", ROOT.parent / "shared" / "peers"))


def run_lines(command):
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def keep_best(results, lines):
    for line in lines:
        key = (line["peer"], line["work"])
        if key not in results or line["tokens_per_s"] > results[key]["tokens_per_s"]:
            results[key] = line


def make_models(args, wanted):
    """The folder that holds mamba-130m and, as far as wanted and possible, the others."""
    if args.peers:
        models = ROOT / "build" / "bench-peers"
        if not (models / "mamba-130m" / "model.safetensors").exists():
            subprocess.run([args.peers / "bin" / "python", peers_folder() / "make_models.py", models, "mamba-130m"], check=True)
        if {"P2", "P3", "P10"} & set(wanted):
            subprocess.run([args.peers / "bin" / "python", ROOT / "tests" / "bench" / "make_peer_models.py", models], check=True)
        return models
    models = ROOT / "build" / "bench-models"
    for name, kind in (("mamba-130m", []), ("mamba2-130m", ["mamba2"])):
        if not (models / name / "model.safetensors").exists():
            (models / name).mkdir(parents=True, exist_ok=True)
            subprocess.run([BIN / "model_bench", "--make", models / name, *kind], check=True)
    return models


def run_peers(args, models, results, wanted):
    python = args.peers / "bin" / "python"
    commands = []
    if {"P1", "P2"} & set(wanted):
        lengths = "512,1024" if "P1" in wanted else "128"
        commands += [[python, peers_folder() / "bench_peers.py", models, "--lengths", lengths, "--peers", peer,
                      "--threads", str(args.threads)] for peer in ("transformers", "f32", "bf16")]
    if "P10" in wanted:
        commands.append([python, ROOT / "tests" / "bench" / "peer_mamba2.py", models / "mamba2-130m", "512", "1024",
                         "--threads", str(args.threads)])
    for command in commands:
        try:
            keep_best(results, run_lines(command))
        except subprocess.CalledProcessError:
            print(f"a peer did not run; its bars say 'no peer': {' '.join(map(str, command[1:]))}", file=sys.stderr)


def run_ours(args, models, results, wanted, first):
    def bench(name, *rest):
        keep_best(results, run_lines([BIN / "model_bench", models / name, "--threads", str(args.threads), *rest]))

    works = list(dict.fromkeys(work for bar in wanted for work in WORKS[bar]))
    works = [work for work in works if first or work not in ONCE]
    if works:
        bench("mamba-130m", *works)
    for bar, name, label, works in OTHERS:
        if bar in wanted and (models / name).exists():
            bench(name, "--label", label, *works)


def run_load(args, model):
    """Throughput and latencies by the number of callers, in alternation: [{1: .., 2: .., 8: .., 64: ..}, ...]"""
    with tempfile.TemporaryDirectory() as folder:
        ports = pathlib.Path(folder) / "ports"
        server = subprocess.Popen([BIN / "mambascope-server", "--model", f"m={model}", "--grpc_address", "127.0.0.1:0",
                                   "--http_address", "", "--port_file", ports, "--log_level", "error"])
        try:
            while not ports.exists():
                if server.poll() is not None:
                    sys.exit("the server did not start")
                time.sleep(0.01)
            port = re.search(r"grpc=(\d+)", ports.read_text(encoding="utf-8")).group(1)
            command = [BIN / "load_bench", f"127.0.0.1:{port}", "m"]
            return [{callers: run_lines([*command, "--callers", str(callers), "--calls", str(calls)])[0]
                     for callers, calls in ((1, 8), (2, 16), (8, 64), (64, 256))} for _ in range(args.rounds)]
        finally:
            server.terminate()
            server.wait()


def start_to_serving(model):
    """(seconds until the port file stands, resident bytes then)"""
    with tempfile.TemporaryDirectory() as folder:
        ports = pathlib.Path(folder) / "ports"
        begin = time.perf_counter()
        server = subprocess.Popen([BIN / "mambascope-server", "--model", f"m={model}", "--grpc_address", "127.0.0.1:0",
                                   "--http_address", "", "--port_file", ports, "--log_level", "error"])
        while not ports.exists():
            if server.poll() is not None:
                sys.exit("the server did not start")
            time.sleep(0.005)
        seconds = time.perf_counter() - begin
        status = pathlib.Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
        server.terminate()
        server.wait()
        return seconds, int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) * 1024


class Table:
    def __init__(self, results):
        self.results, self.rows = results, []

    def rate(self, work, peer="mambascope"):
        line = self.results.get((peer, work))
        return line["tokens_per_s"] if line else None

    def seconds(self, work):
        return self.results[("mambascope", work)]["seconds"]

    def add(self, bar, what, figure, limit, at_least, unit="x", note=""):
        if figure is None:
            self.rows.append([bar, what, "no peer", f"{'>=' if at_least else '<='} {limit}{unit}", "-", note])
            return
        met = figure >= limit if at_least else figure <= limit
        self.rows.append([bar, what, f"{figure:.2f} {unit}", f"{'>=' if at_least else '<='} {limit} {unit}",
                          "met" if met else "NOT MET", note])

    def against(self, bar, work, peer, factor, ours=None):
        ours, theirs = self.rate(ours or work), self.rate(work, peer)
        note = f"{ours:.0f} tok/s" + (f" against {theirs:.0f}" if theirs else "")
        self.add(bar, f"{work} against {peer}", ours / theirs if theirs else None, factor, True, note=note)

    def text(self):
        widths = [max(len(row[i]) for row in self.rows) for i in range(6)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in self.rows)


def fill(table, wanted, serving, load):
    if "P1" in wanted:
        for length in (512, 1024):
            table.against("P1", f"prefill {length}", "llama.cpp f32", 2.5)
            table.against("P1", f"prefill {length}", "transformers", 6)
    if "P2" in wanted:
        table.against("P2", "decode", "llama.cpp f32", 1.1)
        if table.rate("bf16 decode"):
            table.against("P2", "decode", "llama.cpp bf16", 1.1, ours="bf16 decode")
    if "P3" in wanted:
        for label in ("", "bf16 "):
            one, eight = table.rate(f"{label}decode"), table.rate(f"{label}joined 8")
            if one and eight:
                table.add("P3", f"{label}decode, 8 sequences joined against one", eight / one, 5, True,
                          note=f"{eight:.0f} tok/s against {one:.0f}")
    if "P4" in wanted:
        gemm = table.rate("gemm")
        for length in (512, 1024):
            seconds = table.seconds(f"hidden_attention {length}")
            flops = 24 * length * length * 1536 * 16  # half the square, two operations
            table.add("P4", f"all maps, L = {length}: share of the GEMM rate", flops / seconds / gemm, 0.75, True, "",
                      f"{seconds:.2f} s, {flops / seconds / 1e9:.0f} of {gemm / 1e9:.0f} GFLOP/s")
            table.add("P4", f"all maps, L = {length}: own prefills", seconds / table.seconds(f"prefill {length}"),
                      2 if length == 512 else 3.5, False)
    if "P5" in wanted:
        prefill = table.seconds("prefill 1024")
        for method in ("raw_attention", "attention_rollout"):
            table.add("P5", f"{method} row, L = 1024: own prefills", table.seconds(f"{method} 1024") / prefill, 1, False,
                      note=f"{table.seconds(f'{method} 1024'):.3f} s")
        table.add("P5", "rollout row, L = 16384 against 1024",
                  table.seconds("attention_rollout 16384") / table.seconds("attention_rollout 1024"), 20, False)
    if "P6" in wanted:
        prefill, gradient = table.seconds("prefill 512"), table.seconds("gradient_x_input 512")
        for method in ("gradient_x_input", "mamba_lrp"):
            seconds = table.seconds(f"{method} 512")
            table.add("P6", f"{method}, L = 512, forward included: own prefills", 1 + seconds / prefill, 3, False,
                      note=f"{seconds:.2f} s beyond it")
        table.add("P6", "mamba_attribution, L = 512, against gradient and maps",
                  table.seconds("mamba_attribution 512") / (gradient + table.seconds("hidden_attention 512")), 1, False,
                  note=f"{table.seconds('mamba_attribution 512'):.2f} s")
    if "P7" in wanted:
        seconds = table.seconds("latim{norm:NORM_L2} 512")
        table.add("P7", "LaTIM row, all layers, L = 512, forward included: own prefills",
                  1 + seconds / table.seconds("prefill 512"), 4, False, note=f"{seconds:.2f} s beyond it")
    if "faithfulness" in wanted:
        seconds = table.seconds("deletions 128")
        table.add("-", "32 deletions of a 128-token prompt: own prefills", seconds / table.seconds("prefill 128"), 12, False,
                  note=f"{seconds:.2f} s")
    if "P10" in wanted:
        for length in (512, 1024):
            table.against("P10", f"mamba2 prefill {length}", "transformers", 2)
        table.add("P10", "mamba2 all maps, L = 1024: own prefills",
                  table.seconds("mamba2 hidden_attention 1024") / table.seconds("mamba2 prefill 1024"), 0.5, False,
                  note=f"{table.seconds('mamba2 hidden_attention 1024'):.3f} s")
    if "P12" in wanted:
        best = max(load, key=lambda by: by[64]["tokens_per_s"] / by[1]["tokens_per_s"])
        one, many = best[1], best[64]
        table.add("P12", "64 callers against one: throughput", many["tokens_per_s"] / one["tokens_per_s"], 4, True,
                  note=f"{many['tokens_per_s']:.0f} tok/s against {one['tokens_per_s']:.0f}")
        table.add("P12", "64 callers: p99 / p50", many["p99_s"] / many["p50_s"], 4, False,
                  note=f"{many['p50_s']:.2f} s, {many['p99_s']:.2f} s")
        two, eight = best[2]["tokens_per_s"], best[8]["tokens_per_s"]
        table.add("P12", "8 callers against 2, in sum", eight / two, 1, True, note=f"{eight:.0f} tok/s against {two:.0f}")
    for name, limit, weights, (seconds, resident) in serving:
        table.add("P14", f"start to SERVING, {name}", seconds, limit, False, "s")
        table.add("P14", f"resident, {name}", resident / (1.15 * weights + (300 << 20)), 1, False,
                  "of the bound", f"{resident >> 20} MiB for {weights >> 20} MiB of weights")


def machine():
    cpu = "unknown CPU"
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    load = os.getloadavg()[0]
    return f"{cpu}, {os.cpu_count()} CPUs, load {load:.1f}, {platform.system()} {platform.release()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=pathlib.Path)
    parser.add_argument("--only", default=",".join(WORKS))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--results", type=pathlib.Path, help="write the table as Markdown")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := set(wanted) - WORKS.keys():
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(WORKS)}")

    models = make_models(args, wanted)
    model = models / "mamba-130m"
    results, serving = {}, []
    for round_number in range(args.rounds):
        run_ours(args, models, results, wanted, round_number == 0)
        if args.peers:
            run_peers(args, models, results, wanted)
    load = run_load(args, model) if "P12" in wanted else []
    if "P14" in wanted:
        for name, folder, limit in (("demo", DEMO, 1.5), ("130m", model, 3.0)):
            runs = [start_to_serving(folder) for _ in range(2 * args.rounds)]
            weights = (folder / "model.safetensors").stat().st_size
            serving.append((name, limit, weights, (min(r[0] for r in runs), statistics.median(r[1] for r in runs))))
            serving[-1] = (*serving[-1][:3], (serving[-1][3][0], int(serving[-1][3][1])))

    table = Table(results)
    fill(table, wanted, serving, load)
    text = f"{machine()}\n{table.text()}"
    print(text)
    if args.results:
        args.results.write_text(f"# Results of the last full run\n\n{time.strftime('%Y-%m-%d')}, `bash tests/bench/run.sh "
                                f"--peers DIR --results tests/bench/RESULTS.md`, best of {args.rounds} rounds.\n\n"
                                f"```\n{text}\n```\n", encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": table.rows,
                                         "measurements": list(results.values())}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
