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
    "P4": ["gemm", "prefill:512", "prefill:1024", "hidden_attention:512", "hidden_attention:1024"],
    "P5": ["prefill:1024", "prefill:16384", "raw_attention:1024", "attention_rollout:1024", "attention_rollout:16384"],
    "P14": [],
}
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


def make_model(args):
    if args.peers:
        models = ROOT / "build" / "bench-peers"
        if not (models / "mamba-130m" / "model.safetensors").exists():
            subprocess.run([args.peers / "bin" / "python", peers_folder() / "make_models.py", models, "mamba-130m"], check=True)
        return models / "mamba-130m"
    folder = ROOT / "build" / "bench-model"
    if not (folder / "model.safetensors").exists():
        subprocess.run([BIN / "model_bench", "--make", folder], check=True)
    return folder


def run_peers(args, model, results, wanted):
    lengths = "512,1024" if "P1" in wanted else "128"
    for peer in ["transformers", "f32", "bf16"]:
        command = [args.peers / "bin" / "python", peers_folder() / "bench_peers.py", model.parent,
                   "--lengths", lengths, "--peers", peer, "--threads", str(args.threads)]
        try:
            keep_best(results, run_lines(command))
        except subprocess.CalledProcessError:
            print(f"peer {peer} did not run; its bars say 'no peer'", file=sys.stderr)


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

    def against(self, bar, work, peer, factor):
        ours, theirs = self.rate(work), self.rate(work, peer)
        note = f"{ours:.0f} tok/s" + (f" against {theirs:.0f}" if theirs else "")
        self.add(bar, f"{work} against {peer}", ours / theirs if theirs else None, factor, True, note=note)

    def print(self):
        widths = [max(len(row[i]) for row in self.rows) for i in range(6)]
        for row in self.rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def fill(table, wanted, serving):
    if "P1" in wanted:
        for length in (512, 1024):
            table.against("P1", f"prefill {length}", "llama.cpp f32", 2.5)
            table.against("P1", f"prefill {length}", "transformers", 6)
    if "P2" in wanted:
        table.against("P2", "decode", "llama.cpp f32", 1.1)
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
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := set(wanted) - WORKS.keys():
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(WORKS)}")

    model = make_model(args)
    results, serving = {}, []
    works = list(dict.fromkeys(work for bar in wanted for work in WORKS[bar]))
    for round_number in range(args.rounds):
        ours = [work for work in works if round_number == 0 or work not in ONCE]
        if ours:
            keep_best(results, run_lines([BIN / "model_bench", model, "--threads", str(args.threads), *ours]))
        if args.peers and {"P1", "P2"} & set(wanted):
            run_peers(args, model, results, wanted)
    if "P14" in wanted:
        for name, folder, limit in (("demo", DEMO, 1.5), ("130m", model, 3.0)):
            runs = [start_to_serving(folder) for _ in range(2 * args.rounds)]
            weights = (folder / "model.safetensors").stat().st_size
            serving.append((name, limit, weights, (min(r[0] for r in runs), statistics.median(r[1] for r in runs))))
            serving[-1] = (*serving[-1][:3], (serving[-1][3][0], int(serving[-1][3][1])))

    table = Table(results)
    fill(table, wanted, serving)
    print(machine())
    table.print()
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": table.rows,
                                         "measurements": list(results.values())}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
