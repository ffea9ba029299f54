#!/usr/bin/env bash
# The metrics page parses with promtool, and counts what happened.
set -euo pipefail
command -v promtool >/dev/null || { echo "promtool (package prometheus) is not installed"; exit 77; }
source "$(dirname "$0")/../support/live_server.sh"
start_server --model atlas-mamba=deploy/models/atlas-mamba/1
for _ in 1 2 3; do
  "$bin/mambascope" predict --server "127.0.0.1:$grpc" --model atlas-mamba --text "The capital of France is" \
    --explain raw_attention --json >/dev/null
done
curl -s "http://127.0.0.1:$http/metrics" >"$work/metrics"
promtool check metrics <"$work/metrics"
expect 'mambascope_request_duration_seconds_count{code="OK",method="Predict",model="atlas-mamba"} 3' "$work/metrics"
expect 'mambascope_explain_duration_seconds_count{code="OK",method="raw_attention",model="atlas-mamba"} 3' "$work/metrics"
for phase in tokenize queue prefill explain; do
  expect "mambascope_phase_duration_seconds_count{model=\"atlas-mamba\",phase=\"$phase\"} 3" "$work/metrics"
done
