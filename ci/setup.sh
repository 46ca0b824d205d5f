#!/bin/sh
# Finds a supported Python and lets it make or refresh .venv (see setup_env.py, beside this file).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")

# An activated .venv must not become the base of itself.
PATH=$(printf '%s' "$PATH" | tr ':' '\n' | grep -vxF "$root/.venv/bin" | paste -sd: -)
export PATH

tried=""
for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    case $version in
        3.10 | 3.11 | 3.12 | 3.13) exec "$python" "$here/setup_env.py" ;;
    esac
    tried="$tried, $python is $version"
done
echo "setup: no Python 3.10 to 3.13 found (${tried#, }${tried:+; }looked for" \
    "${PYTHON:-python3, python3.13 ... python3.10}): install one, or name it with PYTHON=..." >&2
exit 1
