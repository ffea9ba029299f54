#!/usr/bin/env bash
# From a bare Debian 12 to a served model: installs the packages, builds, starts the server with the
# demo model and shows a prediction with its explanation.
#
#   bash deploy/quickstart.sh [--once] [--no-install]
#
# --once        stop the server after the demonstration
# --no-install  packages are there already
set -euo pipefail
cd "$(dirname "$0")/.."

once=false
install=true
for option in "$@"; do
  case "$option" in
    --once) once=true ;;
    --no-install) install=false ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done

begin=$(date +%s)
say() { printf '\n== %s (%d s)\n' "$1" $(($(date +%s) - begin)); }

if $install; then
  say "packages"
  bash deploy/packages.sh
fi

say "build"
# A tree that was configured before (with tests, say) stays as it is.
[ -f build/build.ninja ] || cmake --preset release -DMAMBASCOPE_TESTS=OFF -DMAMBASCOPE_BENCH=OFF >build.log 2>&1 ||
  { cat build.log >&2; exit 1; }
rm -f build.log
cmake --build --preset release --target mambascope-server mambascope

say "start"
folder=$(mktemp -d)
build/bin/mambascope-server --model atlas-mamba=deploy/models/atlas-mamba/1 \
  --grpc_address 127.0.0.1:0 --http_address 127.0.0.1:0 --port_file "$folder/ports" 2>"$folder/log" &
server=$!
stop() {
  kill "$server" 2>/dev/null || true
  wait "$server" || true
  rm -rf "$folder"
}
trap stop EXIT
trap 'exit 130' INT TERM
until [ -s "$folder/ports" ]; do
  kill -0 "$server" 2>/dev/null || { cat "$folder/log" >&2; exit 1; }
  sleep 0.05
done
# shellcheck disable=SC1091
. "$folder/ports"   # grpc=PORT and http=PORT

say "a prediction with its explanation"
build/bin/mambascope predict --server "127.0.0.1:$grpc" --model atlas-mamba \
  --text "The capital of France is" --top_logprobs 3 \
  --explain raw_attention --explain attention_rollout

$once && exit 0
cat <<EOF

The server runs until you press Ctrl-C. In another terminal, from this folder:

  build/bin/mambascope predict --server 127.0.0.1:$grpc --model atlas-mamba --text "The capital of Japan is" --explain attention_rollout
  grpcurl -plaintext 127.0.0.1:$grpc list
  curl http://127.0.0.1:$http/metrics
EOF
wait "$server"
