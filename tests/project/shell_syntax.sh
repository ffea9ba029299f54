#!/usr/bin/env bash
# Every shell script parses.
set -euo pipefail
cd "$(dirname "$0")/../.."
git ls-files '*.sh' .ci/run | while read -r script; do bash -n "$script"; done
