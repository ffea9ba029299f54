#!/usr/bin/env bash
# All tests, from a bare Debian 12: installs, builds, runs. The last line is the sum.
#
#   bash tests/run.sh [--no-install] [--fast]
#
# --fast   the release build's unit tests and the project checks only (under a minute when built)
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/support/checks.sh

install=true fast=false
for option in "$@"; do
  case "$option" in
    --no-install) install=false ;;
    --fast) fast=true ;;
    *) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done
begin=$(date +%s)
say() { printf '\n== %s (%d s)\n' "$1" $(($(date +%s) - begin)); }

build() {   # build PRESET [TARGETS...]
  local preset=$1
  shift
  cmake --preset "$preset" -DMAMBASCOPE_TESTS=ON -DMAMBASCOPE_BENCH="$([ "$preset" = release ] && echo ON || echo OFF)" >/dev/null
  cmake --build --preset "$preset" ${1:+--target "$@"} | sed -u -n '/FAILED\|error\|warning/p;$p'
}

if $install; then say "packages"; bash deploy/packages.sh --tests; fi

say "release build"
build release

say "unit tests"
for program in build/bin/tests/*_test; do
  check_gtest "$(basename "$program")" "$program"
done

say "project"
check "include direction" python3 tests/project/include_direction.py
check "shell syntax" bash tests/project/shell_syntax.sh
check "format" bash tests/project/format.sh
if ! $fast; then
  check "protos: buf lint, format, breaking" bash tests/project/protos.sh

  say "end to end"
  for script in tests/end_to_end/*.sh; do check "$(basename "$script" .sh)" bash "$script"; done

  say "address and undefined-behaviour sanitizers"
  build asan
  for program in build-asan/bin/tests/*_test; do
    check_gtest "asan: $(basename "$program")" "$program"
  done

  say "thread sanitizer"
  # Debian's gRPC is not instrumented, so what runs under it stays with the other builds.
  build tsan base_test kernels_test model_test serving_test
  for name in base_test kernels_test model_test serving_test; do
    TSAN_OPTIONS="suppressions=$PWD/tests/support/tsan.supp" check_gtest "tsan: $name" "build-tsan/bin/tests/$name"
  done
fi

echo
finish
