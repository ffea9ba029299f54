#!/usr/bin/env bash
# Searches for bytes that break the readers of files and pictures, with libFuzzer and the address and
# undefined-behaviour sanitizers: SECONDS (default 60) for each target, or for the named ones.
#
#   bash tests/fuzz/run.sh [SECONDS [TARGET...]]       targets: safetensors config index image
#
# Needs clang-16, libclang-rt-16-dev and the packages of deploy/packages.sh. What was found is kept in
# build-fuzz/: a corpus for the next run, and the bytes of a fault under build-fuzz/<target>-*. A fault
# becomes a test of tests/model/ and a fix.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=${1:-60}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(safetensors config index image)

command -v clang++-16 >/dev/null || { echo "clang-16 is not installed"; exit 77; }
out=build-fuzz
mkdir -p "$out"
echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' >"$out/probe.cc"
clang++-16 -fsanitize=fuzzer "$out/probe.cc" -o "$out/probe" 2>/dev/null ||
  { echo "libclang-rt-16-dev is not installed"; exit 77; }

flags=(-std=c++20 -g -O1 -I. -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined)
sources() {
  echo "tests/fuzz/$1_fuzz.cc"
  case $1 in
    safetensors) echo server/model/safetensors.cc ;;
    config) echo server/model/{config,json_reader,image_preprocessing}.cc ;;
    index) echo server/model/{checkpoint,config_file,safetensors}.cc ;;
    image) echo server/model/{image,image_preprocessing,image_resample,image_source,json_reader}.cc ;;
    *) echo "unknown target $1" >&2; return 2 ;;
  esac
}
libraries=($(pkg-config --libs absl_statusor absl_strings) -lpng -ljpeg)

seeds() {   # seeds TARGET FOLDER
  case $1 in
    safetensors)
      printf '\1{"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[0],"data_offsets":[8,8]}}\0abcdefgh' >"$2/two"
      printf '\0\2\0\0\0\0\0\0\0{}' >"$2/empty"
      ;;
    config)
      for config in tests/golden/*/config.json deploy/models/*/*/config.json; do
        cp "$config" "$2/$(tr / - <<<"$config")"
      done
      printf '{"do_resize":true,"size":{"height":48,"width":40},"resample":2,"crop_size":32,"image_mean":[0.5,0.5,0.5],"image_std":[1,1,1]}' >"$2/preprocessor"
      ;;
    index) printf '{"metadata":{"total_size":2},"weight_map":{"a":"a.safetensors","b":"b.safetensors"}}' >"$2/two" ;;
    image) cp tests/golden/image/*.png tests/golden/image/*.jpg "$2" ;;
  esac
}

for target in "${targets[@]}"; do
  clang++-16 "${flags[@]}" $(sources "$target") "${libraries[@]}" -o "$out/$target"
  mkdir -p "$out/corpus-$target"
  seeds "$target" "$out/corpus-$target"
  options=(-max_total_time="$seconds" -max_len=20000 -rss_limit_mb=1024 -timeout=20 -print_final_stats=1
           -artifact_prefix="$out/$target-")
  [ "$target" = image ] || options+=(-dict=tests/fuzz/json.dict)
  if ! "$out/$target" "${options[@]}" "$out/corpus-$target" >"$out/$target.log" 2>&1; then
    tail -n 60 "$out/$target.log"
    echo "$target: a fault; its bytes lie under $out/$target-*"
    exit 1
  fi
  echo "$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$out/$target.log") inputs in $seconds s, no fault; $(
    grep -o 'cov: [0-9]*' "$out/$target.log" | tail -n 1)"
done
