"""User of this process, for accounts of who has used what."""

from __future__ import annotations

import getpass

from trials.checks import LONGEST_NAME
from trials.plain_words import one_line


def this_user() -> str:
    """Empty where the machine does not know."""
    try:
        return one_line(getpass.getuser())[:LONGEST_NAME]
    except (KeyError, OSError):
        return ""
