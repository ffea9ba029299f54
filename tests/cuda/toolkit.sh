#!/usr/bin/env bash
# The CUDA compiler and LibTorch from PyPI's wheels, as the folder of a toolkit that CMake knows.
#
#   bash tests/cuda/toolkit.sh FOLDER    FOLDER/toolkit (bin, include, lib64, nvvm) and
#                                        FOLDER/python/lib/python3*/site-packages/torch
set -euo pipefail
folder=$(realpath -m "$1")
lock=$(dirname "$(realpath "$0")")/requirements.txt
uv=uv==0.13.9   # installs in a quarter of a minute what takes pip minutes

if cmp -s "$lock" "$folder/installed.txt"; then exit 0; fi
rm -rf "$folder"
python3 -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet "$uv"
python3 -m venv --without-pip "$folder/python"
# The links below need the files alone, so a cache would only fill the disk.
"$folder/tools/bin/uv" pip install --quiet --no-cache --native-tls --no-deps \
  --python "$folder/python/bin/python" -r "$lock"

nvidia=$(echo "$folder"/python/lib/python3*/site-packages/nvidia)
toolkit=$folder/toolkit
mkdir -p "$toolkit/lib64"
for part in bin include nvvm; do ln -s "$nvidia/cu13/$part" "$toolkit/$part"; done
ln -s lib64 "$toolkit/lib"
# The wheels hold libcudart.so.13 only; a linker asks for libcudart.so.
for library in "$nvidia"/*/lib/*.so* "$nvidia"/*/lib/*.a; do
  name=$(basename "$library")
  ln -sf "$library" "$toolkit/lib64/$name"
  case $name in *.so.*) ln -sf "$library" "$toolkit/lib64/${name%%.so.*}.so" ;; esac
done
cp "$lock" "$folder/installed.txt"
