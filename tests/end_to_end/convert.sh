#!/usr/bin/env bash
# Published checkpoints become served ones: client/python's converter on synthetic checkpoints, the
# result's logits in transformers and in the server compared with the source's. Python with torch: $MAMBASCOPE_PEERS_PYTHON, else python3.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${MAMBASCOPE_PEERS_PYTHON:-python3}
for module in torch safetensors transformers; do
  "$python" -c "import $module" 2>/dev/null ||
    { echo "$python cannot import $module; MAMBASCOPE_PEERS_PYTHON may name another python"; exit 77; }
done
MAMBASCOPE_CLI=$PWD/${MAMBASCOPE_BIN:-build/bin}/mambascope PYTHONPATH=client/python PYTHONDONTWRITEBYTECODE=1 "$python" tests/client/python/convert_test.py
