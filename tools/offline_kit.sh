#!/bin/sh
# Takes what a machine without a network needs there, in pieces that can be carried one by one.
#
#   tools/offline_kit.sh collect DIR [--has FILE] [--vllm] [--python 3.12]    here, in the environment of `make setup`
#   tools/offline_kit.sh install TARGET PIECE...                              there: export PYTHONPATH=TARGET
#
# collect writes DIR/piece-1, DIR/piece-2, … of at most 56 MiB: the project, and wheels of what it imports in the
# versions of requirements-cpu.lock, for Linux on x86-64; never torch, which must be there. --has: what that machine
# says to `python3 -m pip list --format=freeze`, which is left out. --vllm: also vLLM's CUDA build and what it imports.
# install adds pieces to TARGET with the python3 of the machine (PYTHON=...), in any order, in one call or several.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)

usage() {
    sed -n '4,5s/^# *//p' "$0" >&2
    exit 2
}

case "${1:-}" in
collect)
    shift
    python=${PYTHON:-$here/.venv/bin/python}
    [ -x "$python" ] || { echo "error: no $python: run 'make setup' first, or set PYTHON" >&2; exit 2; }
    exec env PYTHONPATH="$here" "$python" -m tools.offline_pieces "$@"
    ;;
install)
    [ $# -ge 3 ] || usage
    python=${PYTHON:-python3} target=$2
    shift 2
    for piece; do
        [ -d "$piece" ] || { echo "error: there is no piece $piece" >&2; exit 2; }
        for wheel in "$piece"/*.whl; do
            [ -e "$wheel" ] || continue
            "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
                --disable-pip-version-check --root-user-action ignore --target "$target" "$piece"/*.whl
            break
        done
        for part in "$piece"/*.zip; do
            [ -e "$part" ] || continue
            "$python" -m zipfile -e "$part" "$target"
        done
        echo "$piece is installed in $target"
    done
    "$python" -m compileall -q -j 0 "$target" >/dev/null || true  # else every process compiles the modules again
    ;;
*) usage ;;
esac
