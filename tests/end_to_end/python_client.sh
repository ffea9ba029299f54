#!/usr/bin/env bash
# The Python program of the README, as it stands there, against a live server.
set -euo pipefail
source "$(dirname "$0")/../support/live_server.sh"
source tests/support/python_tools.sh
python_tools grpcio-tools==1.76.0 numpy==2.3.5
start_server --model atlas-mamba=deploy/models/atlas-mamba/1
"$venv/bin/python" -m grpc_tools.protoc -Iproto --python_out="$work" --grpc_python_out="$work" \
  google/rpc/status.proto mambascope/v1/explanation.proto mambascope/v1/prediction.proto
sed -n '/^```python$/,/^```$/p' README.md | sed '1d;$d' | sed "s/127.0.0.1:8500/127.0.0.1:$grpc/" >"$work/client.py"
[ -s "$work/client.py" ] || fail "no Python program in README.md"
PYTHONPATH=$work "$venv/bin/python" "$work/client.py" >"$work/out" 2>&1 || { cat "$work/out"; fail "it failed"; }
expect " Paris" "$work/out"
