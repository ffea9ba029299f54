#!/usr/bin/env bash
# The command line against a live server, as a person and as a script use it.
set -euo pipefail
source "$(dirname "$0")/../support/live_server.sh"
start_server --model atlas-mamba=deploy/models/atlas-mamba/1
cli=$bin/mambascope
at=(--server "127.0.0.1:$grpc" --model atlas-mamba)
text="The capital of France is"

expect_exit 0 "$cli" predict "${at[@]}" --text "$text" --explain raw_attention --explain attention_rollout
expect "Paris" "$work/out"
expect "raw_attention" "$work/out"
expect "attention_rollout" "$work/out"
! grep -q $'\x1b' "$work/out" || fail "escape sequences on a pipe"

expect_exit 0 "$cli" predict "${at[@]}" --text "$text" --json --logits \
  --explain hidden_attention:id=map,layers=0-1+3,reduction=abs_mean --output "$work/all.safetensors"
python3 - "$work/out" "$work/all.safetensors" <<'PY'
import json, struct, sys
events = [json.loads(line) for line in open(sys.argv[1])]
kinds = [next(k for k in event if k != "request_id") for event in events]
assert kinds[0] == "started" and kinds[-1] == "finished" and kinds.count("finished") == 1, kinds
assert any(e.get("token", {}).get("text") == " Paris" for e in events)
quality = next(e["explanation_finished"]["quality"] for e in events if "explanation_finished" in e)
assert quality["within_tolerance"], quality
data = open(sys.argv[2], "rb").read()
header = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])
tokens = len(events[0]["started"]["tokens"])
assert header["map"]["shape"] == [3, tokens, tokens], header
assert header["logits"]["shape"] == [2048], header
PY

expect_exit 0 "$cli" tokenize "${at[@]}" --text "$text"
expect "Ġcapital" "$work/out"
expect_exit 0 "$cli" models --server "127.0.0.1:$grpc"
expect "atlas-mamba" "$work/out"
expect_exit 0 "$cli" health --server "127.0.0.1:$grpc"
expect "SERVING" "$work/out"

# Exit codes: 2 usage, 3 the server's refusal, 4 not reachable.
expect_exit 2 "$cli" predict "${at[@]}"
expect_exit 2 "$cli" predict "${at[@]}" --text x --explain nonsense
expect_exit 3 "$cli" predict "${at[@]}" --text "$text" --max_tokens 0
expect "generation.max_tokens" "$work/out"
expect_exit 3 "$cli" predict --server "127.0.0.1:$grpc" --model nope --text x
expect "atlas-mamba@" "$work/out"
expect_exit 4 "$cli" predict --server 127.0.0.1:1 --model x --text x

# Without --server: the server is embedded.
expect_exit 0 "$cli" predict --model deploy/models/atlas-mamba/1 --text "$text"
expect "Paris" "$work/out"
expect_exit 2 "$cli" predict --model "$work" --text x

# What could not be written is no success.
"$cli" models --server "127.0.0.1:$grpc" >/dev/full 2>"$work/out" && fail "a full disk is a success"
expect "could not be written" "$work/out"
expect_exit 2 "$bin/mambascope-server" --model atlas-mamba=deploy/models/atlas-mamba/1 --grpc_address 127.0.0.1:99999
expect "port 99999 is outside 0 to 65535" "$work/out"
