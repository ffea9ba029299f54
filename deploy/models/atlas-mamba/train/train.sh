#!/usr/bin/env bash
# Trains the demo model from nothing: environment, data, kernel, training, evaluation.
#
#   bash deploy/models/atlas-mamba/train/train.sh [OUT_DIR]
#
# Writes the Hugging Face folder, train_log.json and evaluation.json to OUT_DIR.
# The default lies under build/ (not in git), so a run never touches the committed model.
# WORK_DIR holds what is downloaded and compiled; VENV an environment to use instead of a new one.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../../.." && pwd)
out=${1:-$root/build/atlas-mamba/1}
work=${WORK_DIR:-$root/build/atlas-mamba/work}
venv=${VENV:-$work/venv}
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
mkdir -p "$out" "$work"

if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet -r "$here/requirements.txt"
fi
countries=$work/node_modules/world-countries/countries.json
if [ ! -f "$countries" ]; then
  npm install --prefix "$work" --no-save --ignore-scripts --no-audit --no-fund world-countries@5.1.0
fi

cd "$here"
"$venv/bin/python" selfcheck.py "$work"
"$venv/bin/python" train.py --countries "$countries" --out "$out" --build "$work"
"$venv/bin/python" evaluate.py --countries "$countries" --model "$out" --build "$work" --out "$out/evaluation.json"
echo "model in $out"
