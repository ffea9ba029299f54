#!/usr/bin/env bash
# The device kernels on a GPU: built from source by the machine's own nvcc, held against the CPU
# reference and against their promises (a row's bits depend on that row alone), timed against
# rooflines; then whole models against the oracle and the CPU, where PyTorch brings LibTorch. Needs
# nvcc, cuBLAS (of the toolkit or of PyTorch's wheels), g++ and build-gpu/needs (tests/gpu/pack.sh);
# no gRPC, no protobuf. Skips where there is no GPU. The last line is the sum.
#
#   bash tests/gpu/run.sh [--build]    --build: compiles for sm_90 even where there is no GPU
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/support/checks.sh

out=build-gpu
skip_all() {
  echo "SKIP  device tests: $1"
  skipped=$(cat tests/gpu/*_test.cc | grep -c '^TEST')
  finish
  exit 0
}
begin=$(date +%s)
say() { printf '\n== %s (%d s)\n' "$1" $(($(date +%s) - begin)); }

capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .) || true
gpu=true
if ! [[ $capability =~ ^[0-9]+$ ]]; then gpu=false capability=90; fi
$gpu || [ "${1:-}" = --build ] || skip_all "no GPU here"
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null) || skip_all "no nvcc here"
[ -d "$out/needs" ] || { echo "build-gpu/needs is missing: run tests/gpu/pack.sh on Debian and carry it"; exit 1; }

# cuBLAS: the toolkit's, or that of PyTorch's wheels.
toolkit=$(dirname "$(dirname "$(realpath "$nvcc")")")
wheels=$(python3 -c 'import nvidia; print(*nvidia.__path__)' 2>/dev/null || true)
find_file() {
  local root found
  for root in "$toolkit" $wheels; do
    found=$(find -L "$root" -name "$1" -not -path '*/stubs/*' 2>/dev/null | sort | tail -n 1)
    if [ -n "$found" ]; then echo "$found"; return; fi
  done
}
cublas_header=$(find_file cublasLt.h) cublas=$(find_file 'libcublasLt.so*')
runtime_header=$(find_file cuda_runtime_api.h) runtime=$(find_file libcudart_static.a)
for file in "$cublas_header" "$cublas" "$runtime_header" "$runtime"; do
  [ -n "$file" ] || skip_all "no cuBLAS or CUDA headers below $toolkit $wheels"
done

# Whole models need LibTorch for reading weights.
torch=$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])' 2>/dev/null || true)
models=true
[ -n "$torch" ] && [ -f "$torch/include/ATen/ATen.h" ] && [ -f "$out/needs/lib/libblis.a" ] || models=false

say "build with $("$nvcc" --version | grep release) for sm_$capability"
include="-I. -isystem $out/needs/include -isystem $(dirname "$runtime_header") -isystem $(dirname "$cublas_header")"
device="-std=c++20 -O3 -DNDEBUG --fmad=false --ftz=true -arch=sm_$capability -Xptxas=-v"
host="-std=c++20 -O2 -DNDEBUG -ffp-contract=off -Wall -Wextra -DMAMBASCOPE_CUDA=1 -DMAMBASCOPE_SOURCE_DIR=\"$PWD\""
if $models; then host+=" -isystem $torch/include"; fi
# Each variant in its folder: as it is served, and without the one function that a CPU lacks, so
# that bits can be compared.
compile() {   # compile VARIANT SOURCE
  local object define=""
  object=$out/$1/$(tr / _ <<<"$2").o
  if [ "$1" = bits ]; then define=-DMAMBASCOPE_CUDA_SAME_BITS; fi
  case $2 in
    *.cu) "$nvcc" $device $define $include -c "$2" -o "$object" >"$object.log" 2>&1 ;;
    *) g++ $host $define $include -c "$2" -o "$object" >"$object.log" 2>&1 ;;
  esac || { echo "FAILED: $2"; cat "$object.log"; return 1; }
}
export -f compile
export out nvcc device host include
mkdir -p "$out/fast" "$out/bits"
kernels="server/base/thread_pool.cc tests/support/scalar_kernels.cc $(ls server/kernels/cuda/*.cu server/kernels/cuda/*.cc)"
tests=$(ls tests/gpu/*_test.cc | grep -v model_test)
whole=""
if $models; then
  whole="tests/gpu/model_test.cc $(ls server/kernels/*.cc) $(ls server/model/cuda/*.cc)
    $(printf 'server/model/%s.cc ' checkpoint config config_file device inventory json_reader layer_trace mamba_block \
      mamba_model mixer model_head recurrent_state safetensors vision weights)"
fi
for variant in fast bits; do
  printf "$variant %s\n" $kernels $tests
done | { cat; printf 'fast %s\n' tests/gpu/bench.cc $whole; } | xargs -P "$(nproc)" -L 1 bash -c 'compile "$1" "$2"' _ ||
  { failed=1 failures=("build"); finish; }
# Registers spilled to memory are a slow kernel, whatever its results.
spills=$(grep -h 'bytes stack frame' "$out"/fast/*.cu.o.log | grep -vc ' 0 bytes stack frame' || true)
echo "kernels with a stack frame: $spills"

link() {   # link PROGRAM OBJECTS...
  local program=$1
  shift
  "$nvcc" -arch="sm_$capability" -o "$program" "$@" -Xlinker --start-group "$out"/needs/lib/*.a -Xlinker --end-group \
    -L"$(dirname "$runtime")" -Xlinker "$cublas" -Xlinker -rpath="$(dirname "$cublas")" -lpthread
}
objects() { printf "$out/$1/%s.o\n" $(tr / _ <<<"$2"); }
for variant in fast bits; do
  link "$out/$variant/gpu_test" $(objects $variant "$(echo $kernels $tests)")
done
if $models; then
  link "$out/model_test" $(objects fast "$(echo $kernels $whole)") -Xlinker --exclude-libs=libblis.a \
    -Xlinker "$out/needs/lib/libhwy.so.1" -Xlinker -rpath="$PWD/$out/needs/lib" -Xlinker "$torch/lib/libtorch_cpu.so" \
    -Xlinker "$torch/lib/libc10.so" -Xlinker -rpath="$torch/lib" -Xlinker --unresolved-symbols=ignore-in-shared-libs -ldl
fi
link "$out/bench" $(objects fast "$(echo $kernels tests/gpu/bench.cc)")
$gpu || skip_all "no GPU here; everything compiled"

say "tests"
check_gtest "device kernels" "$out/fast/gpu_test"
check_gtest "device kernels, bit for bit" "$out/bits/gpu_test" --gtest_filter=-'*Bf16*'

if $models; then
  check_gtest "models on the device" "$out/model_test"
else
  skipped=$((skipped + 1))
  echo "SKIP  models on the device: no PyTorch with headers here, or build-gpu/needs is of an older pack.sh"
fi

say "speed"
"$out/bench" || { failed=$((failed + 1)); failures+=("benchmark"); }

say "done"
finish
