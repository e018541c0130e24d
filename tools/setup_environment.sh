#!/bin/sh
# Makes .venv with exactly the versions of requirements-cpu.lock. Called by `make setup`.
set -eu
lock=requirements-cpu.lock
torch=$(grep '^torch==' "$lock")

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: $PYTHON is no Python 3.11 or later: install one, or name it with 'make setup PYTHON=/path/to/python'" >&2
    exit 2
fi
[ -x .venv/bin/pip ] || "$PYTHON" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# The lock asks for the CPU build by its local version: pip never falls back to the gigabytes of the CUDA build.
echo "installing $torch ..."
if ! pip install --quiet --no-compile --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch" 2>.venv/pip-torch.log; then
    tail -n 3 .venv/pip-torch.log >&2
    echo "error: pip finds no CPU build $torch: point it at one with 'make setup TORCH_INDEX=<address of PyTorch's CPU wheel index>'" >&2
    exit 2
fi
echo "installing $(grep -c "==" "$lock") pinned packages (about 2 GB, some minutes) ..."
pip install --quiet --no-compile --no-deps -r "$lock" 2>.venv/pip.log || { tail -n 5 .venv/pip.log >&2; exit 1; }
pip install --quiet --no-deps --no-build-isolation -e . 2>>.venv/pip.log || { tail -n 5 .venv/pip.log >&2; exit 1; }
# pip compiles on one core. Files that are no Python of this version (templates, tests) are left as they are.
.venv/bin/python -m compileall -q -q -j 0 .venv/lib || true
