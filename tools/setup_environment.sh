#!/bin/sh
# Makes .venv with exactly the versions of requirements-cpu.lock, or of requirements-gpu.lock. Called by `make setup`.
#   DEVICE=cpu|gpu     which of them; without it the one that .venv holds, or what nvidia-smi says
#   PYTHON=...         the Python that .venv is made of; without it the first of those below that there is
#   TORCH_INDEX=...    address of an index that holds the CPU build of torch, where pip is to take it from there alone
set -eu
fail() {
    echo "error: $1" >&2
    exit 2
}
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
is_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

[ "$(uname -s)" = Linux ] || fail "vLLM, which this needs, is built for Linux only, and this is $(uname -s): on Windows use WSL2, on a Mac a Linux container"
[ "$(uname -m)" = x86_64 ] || echo "warning: the locked packages were chosen for x86-64; nobody has tried them on $(uname -m)" >&2

if [ -z "${PYTHON:-}" ]; then
    for PYTHON in python3.11 python3.12 python3; do is_python "$PYTHON" && break; done
fi
is_python "$PYTHON" || fail "$PYTHON is no Python 3.11 or later: install one, or name it with 'make setup PYTHON=/path/to/python'"

held=$(cat .venv/.device 2>/dev/null || { [ ! -e .venv/.installed ] || echo cpu; })
if [ -n "${DEVICE:-}" ]; then
    device=$DEVICE why="as DEVICE says"
elif [ -n "$held" ]; then
    device=$held why="as .venv already is"
elif timeout 30 nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    device=gpu why="nvidia-smi lists a GPU; DEVICE=cpu overrides that"
else
    device=cpu why="nvidia-smi lists no GPU; DEVICE=gpu overrides that"
fi
lock=requirements-$device.lock
case $device in
cpu) size="1 GB to download, 4 GB on disk" ;;
gpu) size="4 GB to download" ;;
*) fail "DEVICE is cpu or gpu, not '$device'" ;;
esac
[ -z "$held" ] || [ "$held" = "$device" ] || fail ".venv holds the packages for DEVICE=$held: remove it with 'make clean' first"

if [ "$device" = gpu ]; then
    driver=$(timeout 30 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    case ${driver%%.*} in
    "" | *[!0-9]*) ;; # as on a login node
    *) [ "${driver%%.*}" -ge 580 ] || fail "the GPU's driver is $driver, and $lock needs 580 or later (CUDA 13): update it, or use the CPU with 'make setup DEVICE=cpu'" ;;
    esac
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info >= (3, 13))' ||
        fail "$lock has packages for Python 3.11 and 3.12, and $PYTHON is later: name another with 'make setup PYTHON=/path/to/python'"
fi
echo "$(grep -c '==' "$lock") packages of $lock ($size): $why"
[ -x .venv/bin/pip ] || "$PYTHON" -m venv .venv
echo "$device" >.venv/.device

install_locked() { # the packages of .venv/requirements.lock; pip compares their hashes
    pip install --quiet --no-compile --no-deps --require-hashes -r .venv/requirements.lock
}
# The lock asks for the CPU build by its local version: neither pip nor uv takes another for it. PyPI's build is in the
# other lock, with the libraries that it cannot be loaded without.
cpu_torch() {
    torch=$(grep '^torch==' "$lock")
    log=.venv/pip-torch.log
    if pip install --quiet --no-compile --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch" 2>$log; then
        echo "$torch: from where pip is told to look"
    elif [ -n "${TORCH_INDEX:-}" ]; then
        tail -n 3 $log >&2
        fail "TORCH_INDEX=$TORCH_INDEX has no $torch for this Python: leave it out, and uv looks where PyTorch keeps it"
    elif pip install --quiet --no-deps -r requirements-uv.lock 2>>$log &&
        .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --torch-backend cpu "$torch" 2>>$log; then
        echo "$torch: 0.2 GB from PyTorch's index, which uv knows"
    elif awk '/^[^ #]/ { wanted = /^(torch|nvidia-[a-z0-9-]*)==/ } wanted' requirements-gpu.lock >.venv/requirements.lock &&
        install_locked 2>>$log; then
        echo "${torch%+cpu}: 3 GB with CUDA's libraries, from where pip is told to look: uv reaches no CPU build"
    else
        tail -n 3 $log >&2
        fail "neither pip nor uv reaches an index with torch: set pip's index-url to a mirror, or PIP_FIND_LINKS to a folder with a wheel of $torch"
    fi
}

[ "$device" = gpu ] || cpu_torch
echo "installing and compiling the other packages, which takes minutes ..."
grep -v '^torch==.*+cpu' "$lock" >.venv/requirements.lock
install_locked 2>.venv/pip.log || {
    tail -n 5 .venv/pip.log >&2
    exit 1
}
pip install --quiet --no-deps --no-build-isolation -e . 2>>.venv/pip.log || {
    tail -n 5 .venv/pip.log >&2
    exit 1
}
# pip compiles on one core. Files that are no Python of this version (templates, tests) are left as they are.
.venv/bin/python -m compileall -q -q -j 0 .venv/lib || true
echo "done: make demo, or . .venv/bin/activate for areal --help"
