#!/usr/bin/env bash
# Gathers what tests/gpu/run.sh needs of Debian's packages: headers and archives of Abseil, GoogleTest
# and Highway, 10 MB in build-gpu/needs. Carry that folder to the GPU machine beside the checkout.
set -euo pipefail
cd "$(dirname "$0")/../.."
needs=build-gpu/needs
libraries=/usr/lib/$(gcc -print-multiarch)
rm -rf "$needs"
mkdir -p "$needs/include" "$needs/lib"
cp -r /usr/include/{absl,gtest,gmock,hwy} "$needs/include/"
cp "$libraries"/libabsl_*.a "$libraries"/lib{gtest,gmock,gmock_main}.a "$needs/lib/"
du -sh "$needs"
