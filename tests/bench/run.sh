#!/usr/bin/env bash
# The performance table: every bar as a ratio taken in this run.
#
#   bash tests/bench/run.sh [--peers DIR] [--only P1,P4] [--json FILE] [--results FILE.md] [--rounds N]
#                            [--threads N]
#
# --peers DIR   a virtual environment with the peers (torch, transformers, llama-cpp-python, gguf); without it
#               the bars against them say "no peer". The scripts that make it and drive the peers are looked
#               for in ../shared/peers, or where $MAMBASCOPE_PEERS says.
set -euo pipefail
cd "$(dirname "$0")/../.."
cmake --preset release -DMAMBASCOPE_BENCH=ON >/dev/null
cmake --build --preset release --target model_bench load_bench mambascope-server mambascope | tail -n 1
exec python3 tests/bench/run.py "$@"
