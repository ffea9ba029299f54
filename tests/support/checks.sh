# Counting for the test scripts: each check prints one line, the sum is the last.
passed=0 failed=0 skipped=0 failures=()

# check NAME COMMAND...   exit 0: passed, 77: skipped (its last line says why), else: failed.
check() {
  local name=$1 begin output code=0
  shift
  begin=$(date +%s)
  output=$("$@" 2>&1) || code=$?
  case $code in
    0) passed=$((passed + 1)); printf 'ok    %s (%d s)\n' "$name" $(($(date +%s) - begin)) ;;
    77) skipped=$((skipped + 1)); printf 'SKIP  %s: %s\n' "$name" "$(tail -n 1 <<<"$output")" ;;
    *)
      failed=$((failed + 1)); failures+=("$name")
      printf '%s\nFAIL  %s (exit %d)\n' "$(tail -n 60 <<<"$output" | cut -c -300)" "$name" "$code"
      ;;
  esac
}

# check_gtest NAME PROGRAM [ARGUMENTS...]   counts each of the program's tests.
check_gtest() {
  local name=$1 program=$2 report counts code=0 begin
  shift 2
  begin=$(date +%s)
  report=$(mktemp)
  "$program" --gtest_brief=1 --gtest_output="json:$report" "$@" >"$report.log" 2>&1 || code=$?
  counts=$(python3 tests/support/count_gtest.py "$report" 2>/dev/null) || counts=""
  if [ -z "$counts" ]; then   # crashed before it could report
    cat "$report.log"
    failed=$((failed + 1)); failures+=("$name (exit $code)")
  else
    read -r good bad skip <<<"$counts"
    passed=$((passed + good)); failed=$((failed + bad)); skipped=$((skipped + skip))
    if [ "$bad" -gt 0 ] || [ "$code" -ne 0 ]; then cat "$report.log"; failures+=("$name"); fi
    # A sanitizer's report ends the program badly though every test passed.
    if [ "$bad" -eq 0 ] && [ "$code" -ne 0 ]; then failed=$((failed + 1)); fi
    grep -B 2 -A 2 '^\[  SKIPPED' "$report.log" | sed 's/^/      /' || true
    printf '%-5s %s: %d passed, %d failed, %d skipped (%d s)\n' \
      "$([ "$code" -eq 0 ] && echo ok || echo FAIL)" "$name" "$good" "$bad" "$skip" $(($(date +%s) - begin))
  fi
  rm -f "$report" "$report.log"
}

# check_script NAME COMMAND...   shows its output and adds the sum in its last line to ours.
check_script() {
  local name=$1 log code=0
  shift
  log=$(mktemp)
  "$@" 2>&1 | tee "$log" || code=$?
  if [[ $(tail -n 1 "$log") =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
    passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2])) skipped=$((skipped + BASH_REMATCH[3]))
    if [ "$code" -ne 0 ] && [ "${BASH_REMATCH[2]}" -eq 0 ]; then failed=$((failed + 1)); fi
  else   # ended before it could count
    code=1 failed=$((failed + 1))
  fi
  if [ "$code" -ne 0 ]; then failures+=("$name"); fi
  rm -f "$log"
}

finish() {
  local failure
  for failure in "${failures[@]}"; do echo "failed: $failure"; done
  echo "$passed passed, $failed failed, $skipped skipped"
  [ "$failed" -eq 0 ]
}
