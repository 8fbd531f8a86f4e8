"""Folder of this user's own scheduler."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def default_state_dir() -> Path:
    """Return the folder in which `elastune up` keeps its state: $ELASTUNE_HOME, or the user's state folder."""
    home = os.environ.get("ELASTUNE_HOME")
    return Path(home) if home else platformdirs.user_state_path("elastune")
