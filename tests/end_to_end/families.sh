#!/usr/bin/env bash
# Every golden model through server and command line: logits against the float64 oracle, pictures,
# classes, and what is refused.
set -euo pipefail
source "$(dirname "$0")/../support/live_server.sh"
models=()
for folder in tests/golden/*/; do
  [ -f "$folder/forward.safetensors" ] && models+=(--model "$(basename "$folder")=$folder")
done
start_server "${models[@]}"
cli=$bin/mambascope
python3 - "$cli" "127.0.0.1:$grpc" "$work" <<'PY'
import array, json, pathlib, struct, subprocess, sys, zlib

cli, server, work = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])


def read(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    tensors = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        kind = {"F64": "d", "F32": "f", "I32": "i"}[info["dtype"]]
        tensors[name] = array.array(kind, data[8 + size + begin:8 + size + end])
    return tensors


def predict(model, *arguments):
    return subprocess.run([cli, "predict", "--server", server, "--model", model, *arguments],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def write_image(path, side, values):
    header = json.dumps({"image": {"dtype": "F32", "shape": [3, side, side], "data_offsets": [0, 12 * side * side]}})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + array.array("f", values).tobytes())


compared = 0
for folder in sorted(pathlib.Path("tests/golden").iterdir()):
    if not (folder / "forward.safetensors").exists():
        continue
    golden = read(folder / "forward.safetensors")
    for name, given in json.loads((folder / "inputs.json").read_text())["inputs"].items():
        if "tokens" in given:
            what = ["--tokens", ",".join(map(str, given["tokens"]))]
        else:
            images = next(iter(read(folder / "images.safetensors").values()))
            half = len(images) // 2
            write_image(work / "image.safetensors", 16, images[half * int(name[-1]):half * (int(name[-1]) + 1)])
            what = ["--image", str(work / "image.safetensors")]
        run = predict(folder.name, *what, "--logits", "--output", str(work / "out.safetensors"))
        assert run.returncode == 0, (folder.name, name, run.stdout)
        got = read(work / "out.safetensors")["logits"]
        expected = golden[f"{name}/logits"][-len(got):]
        bound = 5e-5 * max(0.1, max(map(abs, golden[f"{name}/logits"])))
        worst = max(abs(a - b) for a, b in zip(got, expected))
        assert worst <= bound, (folder.name, name, worst, bound)
        compared += 1
assert compared == 29, compared


def png(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"".join(b"\0" + bytes((x * 7 + y * 3 + c * 50) % 256 for x in range(width) for c in range(3))
                    for y in range(height))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


picture = work / "picture.png"
picture.write_bytes(png(40, 30))
run = predict("vim-tiny", "--image", str(picture))
assert run.returncode == 0 and "prediction" in run.stdout and "class" in run.stdout, run.stdout
events = [json.loads(line) for line in predict("vim-tiny", "--image", str(picture), "--json").stdout.splitlines()]
assert [k for e in events for k in e if k != "request_id"] == ["started", "classification", "finished"], events
assert len(events[1]["classification"]["top"]) == 5
assert events[2]["finished"]["finish_reason"] == "FINISH_REASON_CLASSIFIED"
assert events[2]["finished"]["usage"]["prompt_tokens"] == 17

# Mamba-2 explains by heads, classifiers by class.
run = predict("mamba2-tiny", "--tokens", "1,2,3,4", "--explain", "hidden_attention:reduction=channels,channels=0-7",
              "--explain", "attention_rollout", "--explain", "raw_attention", "--json")
ends = [e["explanation_finished"] for e in map(json.loads, run.stdout.splitlines()) if "explanation_finished" in e]
assert len(ends) == 3 and all(e["quality"]["within_tolerance"] for e in ends), run.stdout
run = predict("mamba2-classifier-tiny", "--tokens", "1,2,3", "--explain", "raw_attention", "--target", "class:2")
assert run.returncode == 0, run.stdout

run = predict("vim-tiny", "--image", str(picture), "--explain", "raw_attention",
              "--explain", "hidden_attention:direction=backward", "--json")
ends = [e["explanation_finished"] for e in map(json.loads, run.stdout.splitlines()) if "explanation_finished" in e]
assert len(ends) == 2 and all(e["quality"]["within_tolerance"] for e in ends), run.stdout

refused = {  # what to say, and what must be in the answer
    ("vim-tiny", "--tokens", "1"): "takes an image only",
    ("vim-tiny", "--image", "tests/golden/vim-tiny/config.json"): "image.encoded",
    ("mamba1-tiny", "--image", str(picture)): "no image",
    ("mamba1-classifier-tiny", "--tokens", "1", "--explain", "raw_attention:variant=code"): "pools the mean",
    ("mamba2-classifier-tiny", "--tokens", "1,2", "--max_tokens", "3"): "answers with classes",
    ("mamba2-classifier-tiny", "--tokens", "1,2", "--explain", "raw_attention", "--target", "class:3"): "outside 0 to 2",
    ("mamba2-classifier-tiny", "--tokens", "1,2", "--explain", "raw_attention", "--target", "0:1"): "give class_id",
    ("mamba2-tiny", "--tokens", "1,2", "--explain", "raw_attention", "--target", "class:1"): "give token_id",
    ("mamba2-tiny", "--tokens", "1,2", "--explain", "hidden_attention:reduction=channels,channels=8"): "8 is outside [0, 8)",
}
for arguments, expected in refused.items():
    run = predict(*arguments)
    assert run.returncode == 3 and expected in run.stdout, (arguments, run.returncode, run.stdout)
(work / "wide.safetensors").write_bytes(b"")
write_image(work / "small.safetensors", 8, [0.0] * 192)
run = predict("vim-tiny", "--image", str(work / "small.safetensors"))
assert run.returncode == 3 and "3 x 8 x 8 is not the model's 3 x 16 x 16" in run.stdout, run.stdout
run = predict("vim-tiny", "--image", str(work / "wide.safetensors"))
assert run.returncode == 2, run.stdout
PY
expect_exit 0 "$cli" models --server "127.0.0.1:$grpc" --model vim-tiny
expect "images, 16 x 16 pixels, 17 tokens" "$work/out"
expect_exit 0 "$cli" models --server "127.0.0.1:$grpc" --model mamba2-tiny
expect "head_dim" "$work/out"
