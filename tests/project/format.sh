#!/usr/bin/env bash
# Fails if a C++ file is not formatted as .clang-format says.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v clang-format-16 >/dev/null || { echo "clang-format-16 is not installed"; exit 77; }
git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs clang-format-16 --dry-run -Werror
