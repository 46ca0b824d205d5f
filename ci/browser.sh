#!/bin/sh
# Installs Chromium where root can have it from the system's packages; its tests skip without it.
set -eu
for browser in chromium chromium-browser google-chrome chrome; do
    if command -v "$browser" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "browser: no Chromium, and no way to install one: the tests of pages in a browser skip" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends chromium; } >/tmp/browser.log 2>&1; then
    echo "browser: Chromium could not be installed: the tests of pages in a browser skip" >&2
    tail -n 2 /tmp/browser.log >&2
fi
