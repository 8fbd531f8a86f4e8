"""An NNI trial command as what a replica runs.

A command that starts a Python script with this interpreter becomes a script of the replica itself, which is then as
elastic as its code is. Any other command runs as it is, on one replica.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys

from tuner_bridge.errors import BridgeError
from tuner_bridge.in_replica.scripts import Script

_SHELL = re.compile(r"[|&;<>()$`*?{}\[\]\\\n]|(^|\s)[~#]")
"""Characters by which a command asks for a shell."""


def as_script(command: str, folder: str, path: str | None = None) -> Script | None:
    """None for a command that needs a shell or another interpreter; ``path``: the PATH to look along."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BridgeError(f"the trial command {command!r} cannot be read: {error}") from None
    if len(words) < 2 or not re.fullmatch(r"python(3(\.\d+)?)?", os.path.basename(words[0])):
        return None
    # Quoted, such characters are the script's own.
    if _SHELL.search(re.sub(r"'[^']*'", "", command)) or not _is_this_python(words[0], path):
        return None
    if words[1] == "-u":
        del words[1]
    if words[1:2] == ["-m"] and len(words) > 2:
        return Script(path=None, module=words[2], arguments=tuple(words[3:]))
    if len(words) < 2 or words[1].startswith("-"):
        return None
    return Script(path=os.path.join(folder, words[1]), module=None, arguments=tuple(words[2:]))


def _is_this_python(name: str, path: str | None) -> bool:
    found = shutil.which(name, path=path)
    return found is not None and os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable)
