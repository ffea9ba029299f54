#!/usr/bin/env bash
# The CUDA configuration on a machine without a GPU: compiler and LibTorch 2.x from wheels, the whole
# server and its tests built for every architecture, the CPU's tests run against that LibTorch. Device
# tests skip here; tests/gpu/run.sh runs them where there is a GPU. The last line is the sum.
#
#   bash tests/cuda/run.sh    after tests/run.sh, which installs Debian's packages
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/support/checks.sh

begin=$(date +%s)
say() { printf '\n== %s (%d s)\n' "$1" $(($(date +%s) - begin)); }
cuda=$PWD/build-tools/cuda

say "toolkit: CUDA 13.2 and LibTorch from wheels"
if ! bash tests/cuda/toolkit.sh "$cuda"; then
  failed=1 failures=("the wheels of tests/cuda/requirements.txt could not be installed")
  finish
fi
torch=$(echo "$cuda"/python/lib/python3*/site-packages/torch)

say "build for sm_80, sm_90 and sm_100"
export PATH=$cuda/toolkit/bin:$PATH
# The wheel brings a protoc of another version than Debian's library.
cmake --preset cuda -DMAMBASCOPE_BENCH=OFF -DCMAKE_PREFIX_PATH="$torch" \
  -DProtobuf_PROTOC_EXECUTABLE="$(command -v protoc)" -DCMAKE_CUDA_COMPILER="$cuda/toolkit/bin/nvcc" \
  -DCUDAToolkit_ROOT="$cuda/toolkit" -DCUDA_TOOLKIT_ROOT_DIR="$cuda/toolkit" >"$cuda/configure.log" 2>&1 ||
  { tail -n 40 "$cuda/configure.log"; exit 1; }
cmake --build --preset cuda | sed -u -n '/FAILED\|error:\|warning:/p;$p'

say "unit tests against LibTorch $(sed -n "s/^__version__ = '\(.*\)'/\1/p" "$torch/version.py")"
for program in build-cuda/bin/tests/*_test; do
  check_gtest "cuda: $(basename "$program")" "$program"
done

echo
finish
