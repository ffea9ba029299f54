#!/usr/bin/env bash
# Gathers what tests/gpu/run.sh needs of Debian's packages: headers and libraries of Abseil, GoogleTest
# and Highway, for whole models BLIS, nlohmann-json and OpenSSL too, in build-gpu/needs. Carry that
# folder to the GPU machine beside the checkout.
set -euo pipefail
cd "$(dirname "$0")/../.."
needs=build-gpu/needs
libraries=/usr/lib/$(gcc -print-multiarch)
rm -rf "$needs"
mkdir -p "$needs/include" "$needs/lib"
cp -r /usr/include/{absl,gtest,gmock,hwy,nlohmann,openssl} "$needs/include/"
cp -r /usr/include/"$(gcc -print-multiarch)"/openssl/. "$needs/include/openssl/"
cp "$(find /usr/include -path '*blis-serial/blis.h' | head -n 1)" "$needs/include/"
cp "$(find "$libraries" -path '*blis-serial/libblis.a' | head -n 1)" "$libraries"/libcrypto.a "$needs/lib/"
cp -L "$libraries"/libhwy.so.1 "$needs/lib/"
cp "$libraries"/libabsl_*.a "$libraries"/lib{gtest,gmock,gmock_main}.a "$needs/lib/"
du -sh "$needs"
