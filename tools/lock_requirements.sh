#!/bin/sh
# Writes the hashes of requirements-cpu.lock anew, after a version in it was edited: sh tools/lock_requirements.sh. Needs uv.
set -eu
lock=requirements-cpu.lock
versions=$(grep -o '^[^# ]*==[^ ]*' "$lock")
hashed=$(echo "$versions" | grep -v '^torch==' |
    uv pip compile --quiet --no-deps --generate-hashes --no-annotate --no-header --python-version 3.11 -)
{
    sed -n '/^#/p' "$lock"
    echo "$versions" | grep '^torch=='
    echo "$hashed"
} >"$lock.new"
mv "$lock.new" "$lock"
