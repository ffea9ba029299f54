#!/usr/bin/env bash
# Installs what a build needs from Debian 12's packages; with --tests also what the tests need.
# Does nothing when all is there.
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache pkg-config ca-certificates
  libtorch-dev libopenblas0-pthread   # without the second, LibTorch gets the slow reference BLAS
  libblis-serial-dev libhwy-dev
  libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libabsl-dev
  prometheus-cpp-dev libcpp-httplib-dev libcli11-dev nlohmann-json3-dev libssl-dev
  libpng-dev libjpeg62-turbo-dev
  cargo-web rustc-web                 # the tokenizer; Debian's plain rustc is too old
)
if [ "${1:-}" = --tests ]; then
  packages+=(git curl python3 python3-venv libgtest-dev libgmock-dev libbenchmark-dev clang-format-16 prometheus)
fi

missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "packages.sh: run as root, or install: ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
echo "Installing ${#missing[@]} packages and what they need: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -q
"${as_root[@]}" apt-get install -y -q --no-install-recommends "${missing[@]}"
