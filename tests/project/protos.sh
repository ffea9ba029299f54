#!/usr/bin/env bash
# buf's lint, format and breaking-change checks of proto/. The baseline is the contract of the last
# release; each release writes it anew: (cd proto && buf build -o baseline.binpb)
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/support/python_tools.sh
python_tools buf-bin==1.75.0
cd proto
"$venv/bin/buf" lint
"$venv/bin/buf" format --diff --exit-code
"$venv/bin/buf" breaking --against baseline.binpb
