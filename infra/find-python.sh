#!/bin/sh
# Print a Python of version 3.11 to 3.13 that can make virtual environments; $PYTHON if that is set.
# Each is tried by running it: a name on the PATH may be a shim with nothing behind it.

usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

if [ -n "$PYTHON" ]; then
    usable "$PYTHON" && { echo "$PYTHON"; exit 0; }
    echo "kvcensus: PYTHON=$PYTHON is not a Python 3.11 to 3.13 with the modules venv and ensurepip" >&2
    exit 1
fi
for candidate in python3.13 python3.12 python3.11 python3 python; do
    usable "$candidate" && { command -v "$candidate"; exit 0; }
done
echo "kvcensus: no Python 3.11, 3.12 or 3.13 with the modules venv and ensurepip on the PATH" >&2
echo "kvcensus: (on Debian and Ubuntu these modules are the package python3-venv); or name one: PYTHON=/path/to/python make …" >&2
exit 1
