#!/usr/bin/env bash
# What the action does, on any machine: installs draftproof if it is not there, verifies, summarises.
#   IMPL=my_kernel.py [SPEC=] [KNOWN=] [OPS=] [PROFILE=] [DEVICE=] [PYTHON=] bash run.sh
set -euo pipefail
: "${IMPL:?IMPL: a .py file or module[:attr] is due}"
python=${PYTHON:-python3}
source=${DRAFTPROOF_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}

if ! "$python" -P -c 'import draftproof.conformance.cli' 2>/dev/null; then
    "$python" -m pip install --quiet "$source"
fi

arguments=(--impl "$IMPL" --profile "${PROFILE:-quick}" --device "${DEVICE:-auto}")
if [ -n "${SPEC:-}" ]; then arguments+=(--spec "$SPEC"); fi
if [ -n "${KNOWN:-}" ]; then arguments+=(--known "$KNOWN"); fi
for op in ${OPS:-}; do arguments+=(--op "$op"); done

code=0
"$python" -P -c 'from draftproof.conformance.cli import main; main()' verify "${arguments[@]}" \
    --json draftproof.json --html draftproof.html || code=$?
if [ -s draftproof.json ]; then
    "$python" -P -m draftproof.ci.summary draftproof.json --impl "$IMPL"
    if [ -n "${GITHUB_OUTPUT:-}" ]; then echo "report=$PWD/draftproof.json" >>"$GITHUB_OUTPUT"; fi
fi
exit "$code"
