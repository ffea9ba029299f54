#!/usr/bin/env bash
# buf's lint, format and breaking-change checks of proto/. The baseline is the contract of the last
# release: `buf build proto -o proto/baseline.binpb` writes it anew with each one.
set -euo pipefail
cd "$(dirname "$0")/../.."
tools=build-tools/buf
version=1.75.0
if [ ! -x $tools/node_modules/.bin/buf ]; then
  command -v npm >/dev/null || { echo "npm is not installed: buf cannot be had"; exit 77; }
  mkdir -p $tools
  npm install --silent --no-audit --no-fund --prefix $tools "@bufbuild/buf@$version" ||
    { echo "buf $version could not be installed from npm"; exit 77; }
fi
buf=$PWD/$tools/node_modules/.bin/buf
cd proto
"$buf" lint
"$buf" format --diff --exit-code
"$buf" breaking --against baseline.binpb
