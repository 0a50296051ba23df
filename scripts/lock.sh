#!/usr/bin/env bash
# Writes requirements.lock anew from pyproject.toml: newest versions within its ranges, for Python 3.11 to 3.13, with hashes.
# The lock must not name an index, a folder or a machine: whoever installs it uses their own pip settings.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
.venv/bin/python -m venv "$tools/venv"
"$tools/venv/bin/python" -m pip install --quiet --no-input uv
"$tools/venv/bin/uv" pip compile --quiet --no-config --universal --python-version 3.11 --all-extras --upgrade \
    --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
    --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml
