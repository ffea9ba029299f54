#!/usr/bin/env bash
# grpcurl lists and calls the services by reflection; grpc-health-probe answers.
set -euo pipefail
source "$(dirname "$0")/../support/live_server.sh"
tools=$PWD/build-tools/go
version() { go version 2>/dev/null | sed -n 's/.*go1\.\([0-9]*\).*/\1/p'; }
if [ ! -x "$tools/grpcurl" ] || [ ! -x "$tools/grpc-health-probe" ]; then
  [ "$(version || true)" -ge 24 ] 2>/dev/null || { echo "Go 1.24 or newer is not installed: grpcurl cannot be built"; exit 77; }
  GOTOOLCHAIN=local GOBIN=$tools go install github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3 \
    github.com/grpc-ecosystem/grpc-health-probe@v0.4.63 2>"$work/go" ||
    GOTOOLCHAIN=local GOBIN=$tools bash -c 'go install github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3 &&
      go install github.com/grpc-ecosystem/grpc-health-probe@v0.4.63' 2>"$work/go" ||
    { tail -n 1 "$work/go"; echo "the Go tools could not be built"; exit 77; }
fi
start_server --model atlas-mamba=deploy/models/atlas-mamba/1
call() { "$tools/grpcurl" -plaintext "$@" >"$work/out" 2>&1; }

call "127.0.0.1:$grpc" list
for service in mambascope.v1.PredictionService mambascope.v1.ModelService; do expect $service "$work/out"; done
call "127.0.0.1:$grpc" describe mambascope.v1.PredictRequest
expect "explanations" "$work/out"
call -d '{"model": "atlas-mamba", "text": "The capital of France is", "explanations": [{"attention_rollout": {}}]}' \
  "127.0.0.1:$grpc" mambascope.v1.PredictionService/Predict
expect '" Paris"' "$work/out"
expect '"within_tolerance": true' "$work/out"
call "127.0.0.1:$grpc" mambascope.v1.ModelService/ListModels
expect '"atlas-mamba"' "$work/out"
"$tools/grpc-health-probe" -addr "127.0.0.1:$grpc"
"$tools/grpc-health-probe" -addr "127.0.0.1:$grpc" -service mambascope.v1.PredictionService
