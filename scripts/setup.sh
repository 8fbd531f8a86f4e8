#!/usr/bin/env bash
# Builds the project's own virtual environment. Says what is missing instead of failing somewhere inside pip.
set -euo pipefail

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH=2.13.0

fail() { echo "setup: $1" >&2; exit 1; }

command -v git >/dev/null || fail "git is missing; install it with your system's package manager"
command -v "$PYTHON" >/dev/null ||
    fail "$PYTHON is missing; install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3.12"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$PYTHON is $("$PYTHON" -V 2>&1); Python 3.11 or newer is needed: make PYTHON=/path/to/python3.12"
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$PYTHON has no venv module; on Debian and Ubuntu: apt install python3-venv"

echo "setup: building $VENV with $("$PYTHON" -V)"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check -q "$@"; }

# CUDA torch where there is a GPU. Elsewhere the CPU build, which needs a fraction of the space, if an index has it
# (PIP_EXTRA_INDEX_URL may name PyTorch's own); else whatever the index calls torch.
if ! "$VENV/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$TORCH')" 2>/dev/null; then
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        echo "setup: installing torch $TORCH for CUDA"
        pip install "torch==$TORCH"
    elif pip install "torch==$TORCH+cpu" 2>/dev/null; then
        echo "setup: installed torch $TORCH for CPU"
    else
        echo "setup: no CPU build of torch on this index; installing the default one (several GB)"
        pip install "torch==$TORCH"
    fi
fi
echo "setup: installing the pinned dependencies"
pip install -r requirements/locked.txt
pip install --no-deps -e .
if command -v npm >/dev/null; then
    make -s page || echo "setup: the web page was not built; everything else works without it"
else
    echo "setup: npm is not here, so the web page is not built; everything else works without it"
fi
touch "$VENV/.ready"
echo "setup: done"
