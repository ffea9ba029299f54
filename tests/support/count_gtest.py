"""Prints "passed failed skipped" of a GoogleTest JSON report."""
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    suites = json.load(file)["testsuites"]
tests = [test for suite in suites for test in suite["testsuite"]]
failed = sum(1 for test in tests if test.get("failures"))
skipped = sum(1 for test in tests if test.get("result") in ("SKIPPED", "SUPPRESSED"))
print(len(tests) - failed - skipped, failed, skipped)
