#!/usr/bin/env bash
# Start-up failures say why and exit 2; SIGTERM ends running calls and exits 0; a client that leaves
# stops its work.
set -euo pipefail
source "$(dirname "$0")/../support/live_server.sh"
cli=$bin/mambascope

refuses() {   # refuses TEXT FLAGS...
  local text=$1
  shift
  [[ "$*" == *--grpc_address* ]] || set -- --grpc_address 127.0.0.1:0 "$@"
  expect_exit 2 "$bin/mambascope-server" --http_address "" "$@"
  expect "$text" "$work/out"
}
tiny=tests/golden/mamba1-tiny
refuses "--model"
refuses "unknown_flag" --unknown_flag
refuses "config.json" --model "x=$work/missing"
broken() {   # broken NAME: a copy of the tiny model to break
  rm -rf "$work/$1"; mkdir "$work/$1"; cp $tiny/config.json $tiny/model.safetensors "$work/$1"; chmod u+w "$work/$1"/*
}
broken truncated; truncate -s 5000 "$work/truncated/model.safetensors"
refuses "model.safetensors" --model "x=$work/truncated"
broken other; sed -i 's/"mamba"/"llama"/' "$work/other/config.json"
refuses "llama" --model "x=$work/other"
broken shape; sed -i 's/"hidden_size": 32/"hidden_size": 48/' "$work/shape/config.json"
refuses "backbone.embeddings.weight" --model "x=$work/shape"

start_server --model tiny=$tiny --drain_timeout_s 0.2
refuses "in use" --model tiny=$tiny --grpc_address "127.0.0.1:$grpc"

"$cli" predict --server "127.0.0.1:$grpc" --model tiny --tokens 1,2,3 --max_tokens 4000 --json >"$work/long" 2>&1 &
client=$!
metric() { curl -s "http://127.0.0.1:$http/metrics" | sed -n "s/^$1 //p"; }
for _ in $(seq 200); do [ -s "$work/long" ] && break; sleep 0.02; done
kill -9 "$client"; wait "$client" 2>/dev/null || true
for _ in $(seq 200); do [ "$(metric mambascope_calls_in_flight)" = 0 ] && break; sleep 0.02; done
[ "$(metric mambascope_running_sequences)" = 0 ] || fail "a killed client's sequence still runs"
steps=$(metric 'mambascope_decode_steps_total{model="tiny"}')
sleep 0.2
[ "$(metric 'mambascope_decode_steps_total{model="tiny"}')" = "$steps" ] || fail "it still decodes"

"$cli" predict --server "127.0.0.1:$grpc" --model tiny --tokens 1,2,3 --max_tokens 4096 --json >"$work/term" 2>&1 &
client=$!
for _ in $(seq 200); do [ -s "$work/term" ] && break; sleep 0.02; done
kill -TERM "$server"
sleep 0.05
kill -TERM "$server" 2>/dev/null || true   # a second one changes nothing
code=0; wait "$server" || code=$?
[ "$code" -eq 0 ] || fail "SIGTERM: exit $code"
server=
wait "$client" || true   # 3 if it was cut, 0 if it had ended by itself
expect '"finished"' "$work/term"
