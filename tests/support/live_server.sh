# Sourced by the scripts of tests/end_to_end: a real server on free ports of 127.0.0.1, ended by its pid.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=${MAMBASCOPE_BIN:-build/bin}
work=$(mktemp -d)
server=

end_server() {
  [ -z "$server" ] || { kill "$server" 2>/dev/null; wait "$server"; } || true
  rm -rf "$work"
}
trap end_server EXIT

# start_server [FLAGS...]   sets $grpc, $http, $server
start_server() {
  "$bin/mambascope-server" --grpc_address 127.0.0.1:0 --http_address 127.0.0.1:0 \
    --port_file "$work/ports" "$@" 2>"$work/log" &
  server=$!
  for _ in $(seq 600); do
    [ -s "$work/ports" ] && break
    kill -0 "$server" 2>/dev/null || { cat "$work/log"; return 1; }
    sleep 0.05
  done
  # shellcheck disable=SC1091
  . "$work/ports"
}

fail() { echo "$*"; exit 1; }

# expect TEXT FILE   the file must hold the text
expect() { grep -qF -- "$1" "$2" || { tail -n 40 "$2"; fail "missing: $1"; }; }

# expect_exit CODE COMMAND...   output goes to $work/out
expect_exit() {
  local wanted=$1 code=0
  shift
  "$@" >"$work/out" 2>&1 || code=$?
  [ "$code" -eq "$wanted" ] || { cat "$work/out"; fail "exit $code instead of $wanted: $*"; }
}
