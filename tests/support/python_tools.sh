# Sourced: tools from PyPI in one virtual environment, build-tools/python.
venv=$PWD/build-tools/python

# python_tools REQUIREMENT...   installs what is missing; exits 77 (skip) if it cannot be had
python_tools() {
  local requirement log
  log=$(mktemp)
  for requirement in "$@"; do
    [ -e "$venv/installed/$requirement" ] && continue
    { [ -x "$venv/bin/pip" ] || python3 -m venv "$venv"; } >"$log" 2>&1 &&
      "$venv/bin/pip" install --quiet "$requirement" >>"$log" 2>&1 ||
      { tail -n 1 "$log"; echo "$requirement could not be installed from PyPI"; rm -f "$log"; exit 77; }
    mkdir -p "$venv/installed" && touch "$venv/installed/$requirement"
  done
  rm -f "$log"
}
