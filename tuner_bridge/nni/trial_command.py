"""An NNI trial command as what a replica runs.

A command that starts a Python script with this interpreter becomes a script of the replica itself, which is then as
elastic as its code is. Any other command runs as it is, on one replica.
"""

from __future__ import annotations

import re
import shlex
import shutil

from tuner_bridge.errors import BridgeError
from tuner_bridge.in_replica.scripts import Script, is_own_python, program_of, starts_python

_SHELL = re.compile(r"[|&;<>()$`*?{}\[\]\\\n]|(^|\s)[~#]")
"""Characters by which a command asks for a shell."""


def as_script(command: str, folder: str, path: str | None = None) -> Script | None:
    """None for a command that needs a shell or another interpreter; ``path``: the PATH to look along."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BridgeError(f"the trial command {command!r} cannot be read: {error}") from None
    if not words or not starts_python(words[0]):
        return None
    # Quoted, such characters are the script's own.
    if _SHELL.search(re.sub(r"'[^']*'", "", command)) or not _is_this_python(words[0], path):
        return None
    return program_of(words[1:], folder)


def _is_this_python(name: str, path: str | None) -> bool:
    found = shutil.which(name, path=path)
    return found is not None and is_own_python(found)
