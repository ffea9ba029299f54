#!/usr/bin/env bash
# What each method says about the demo model's capital questions: how much of its scores the subject
# has, against its share of the tokens, and how deletion in the order of the scores does against
# random orders. Prints the README's table.
#   bash tests/quality/run.sh [questions]        after a build of preset `release`
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/support/live_server.sh
start_server --model atlas=deploy/models/atlas-mamba/1
python3 tests/quality/subject_share.py "$bin/mambascope" "127.0.0.1:$grpc" "${1:-40}"
