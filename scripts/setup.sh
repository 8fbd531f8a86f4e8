#!/usr/bin/env bash
# Builds the project's own virtual environment: `setup.sh demo` what a user of Optuna needs, `setup.sh` all that the
# tests need, `setup.sh oldest` the same with the oldest torch. Says what is missing instead of failing somewhere inside
# an installer.
set -euo pipefail

WHAT=${1:-all}
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH=2.13.0
[ "$WHAT" != oldest ] || TORCH=2.9.1
UV=0.13.9

fail() { echo "setup: $1" >&2; exit 1; }

command -v git >/dev/null || fail "git is missing; install it with your system's package manager"
command -v "$PYTHON" >/dev/null ||
    fail "$PYTHON is missing; install Python 3.10 or newer, or name it: make PYTHON=/path/to/python3.12"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$PYTHON is $("$PYTHON" -V 2>&1); Python 3.10 or newer is needed: make PYTHON=/path/to/python3.12"
# The pinned releases of others are for 3.11 and newer; an older Python takes what still supports it.
PINNED=$("$PYTHON" -c 'import sys; print("requirements/locked.txt" * (sys.version_info >= (3, 11)))')
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$PYTHON has no venv module; on Debian and Ubuntu: apt install python3-venv"

echo "setup: building $VENV with $("$PYTHON" -V)"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check -qq "$@"; }

# uv installs in seconds what takes pip minutes; pip does where uv cannot be had. uv does not read pip's settings.
uv=$(command -v uv || true)
if [ -z "$uv" ] && pip install "uv==$UV" 2>/dev/null; then
    uv=$VENV/bin/uv
fi
if [ -n "$uv" ]; then
    settings=$("$VENV/bin/python" -m pip config list 2>/dev/null)
    of_pip() { sed -n "s/^[^=]*[.]$1='\(.*\)'\$/\1/p" <<<"$settings" | tail -n 1 | sed 's/\\n/ /g'; }
    [ -n "${UV_DEFAULT_INDEX:=$(of_pip index-url)}" ] && export UV_DEFAULT_INDEX || unset UV_DEFAULT_INDEX
    [ -n "${UV_INDEX:=$(of_pip extra-index-url)}" ] && export UV_INDEX || unset UV_INDEX
    [ -n "${UV_FIND_LINKS:=$(of_pip find-links | tr ' ' ,)}" ] && export UV_FIND_LINKS || unset UV_FIND_LINKS
    [ -n "${SSL_CERT_FILE:=$(of_pip cert)}" ] && export SSL_CERT_FILE || unset SSL_CERT_FILE
    export UV_INDEX_STRATEGY=unsafe-best-match
    install() { "$uv" pip install -q --python "$VENV/bin/python" "$@"; }
else
    install() { pip install "$@"; }
fi

# CUDA torch where there is a GPU. Elsewhere the CPU build, which needs a fraction of the space, if an index has it
# (PIP_EXTRA_INDEX_URL may name PyTorch's own); else whatever the index calls torch.
if ! "$VENV/bin/python" -c "import sys
from importlib.metadata import version
sys.exit(version('torch').split('+')[0] != '$TORCH')" 2>/dev/null; then
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        echo "setup: installing torch $TORCH for CUDA"
        install "torch==$TORCH"
    elif install "torch==$TORCH+cpu" 2>/dev/null; then
        echo "setup: installed torch $TORCH for CPU"
    else
        echo "setup: no CPU build of torch on this index; installing the default one (several GB)"
        install "torch==$TORCH"
    fi
fi
if [ "$WHAT" = demo ]; then
    echo "setup: installing what the demo needs"
    install ${PINNED:+-c "$PINNED"} -e ".[optuna,pictures]" scikit-learn
    touch "$VENV/.demo"
else
    if [ -n "$PINNED" ]; then
        echo "setup: installing the pinned dependencies"
        install -r "$PINNED"
        install --no-deps -e .
    else
        [ "$WHAT" = oldest ] || fail "the tests need Python 3.11 or newer, and this is $("$PYTHON" -V)"
        echo "setup: installing the newest dependencies that there are for $("$PYTHON" -V)"
        install -e ".[optuna,prepared]" expecttest hypothesis pytest pytest-timeout pytest-xdist
    fi
    if [ "$WHAT" = oldest ]; then
        :
    elif command -v npm >/dev/null; then
        make -s page || echo "setup: the web page was not built; everything else works without it"
    else
        echo "setup: npm is not here, so the web page is not built; everything else works without it"
    fi
    touch "$VENV/.demo" "$VENV/.ready"
fi
echo "setup: done"
