"""Names that Python 3.10 lacks, and newer ones have."""

from __future__ import annotations

import hashlib
import sys
from types import CodeType
from typing import BinaryIO

if sys.version_info >= (3, 11):
    from builtins import BaseExceptionGroup, ExceptionGroup
else:
    from exceptiongroup import BaseExceptionGroup, ExceptionGroup

__all__ = ["BaseExceptionGroup", "ExceptionGroup", "add_note", "qualified_name", "sha256_of"]

CHUNK_BYTES = 1024**2


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, which 3.10 keeps and does not print."""
    if sys.version_info >= (3, 11):
        BaseException.add_note(error, note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]


def qualified_name(code: CodeType) -> str:
    """Return the name of a function that says what it lies in; in 3.10 its own alone."""
    return str(getattr(code, "co_qualname", code.co_name))


def sha256_of(file: BinaryIO) -> str:
    """Return the checksum of what is left to read of a file."""
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
