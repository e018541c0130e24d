#!/bin/sh
# Writes the lock files anew, after a version in one for CPUs or tests, or in setup.py, was edited. Needs uv, and the
# package index; of packages it fetches the metadata alone: sh tools/lock_requirements.sh
set -eu
versions() { grep -o '^[^# ]*==[^ ]*' requirements-cpu.lock; }
replace() { # the body of lock file $1 by what comes in; its comments stay
    { sed -n '/^#/p' "$1"; cat; } >"$1.new"
    mv "$1.new" "$1"
}
compile() { uv pip compile --quiet --generate-hashes --no-annotate --no-header "$@"; }

hashed=$(versions | grep -v '^torch==' | compile --no-deps --python-version 3.11 -)
{ versions | grep '^torch=='; echo "$hashed"; } | replace requirements-cpu.lock
grep -o '^[^# ]*==[^ ]*' requirements-test.lock | compile --no-deps --prerelease allow --python-version 3.11.5 - |
    replace requirements-test.lock

grep -o '^uv==[^ ]*' requirements-uv.lock | compile --no-deps - | replace requirements-uv.lock

# What the file that uv writes to holds, it keeps where it can: the versions that the tests ran with.
resolved=$(mktemp)
versions | grep -v '^torch==' >"$resolved"
compile --python-version 3.12 --python-platform x86_64-manylinux_2_31 --extra gpu --extra fa4 --extra mpi setup.py \
    --output-file "$resolved" >/dev/null
replace requirements-gpu.lock <"$resolved"
rm "$resolved"
