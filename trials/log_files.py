"""Files with what replicas print: one each, its end for reasons, and a limit to its size.

A replica writes straight into its file, opened for appending, so nothing is paid for a log that nobody reads. When a
file grows beyond the limit its later half moves to the front and the rest goes; lines printed in that moment may be
lost.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

LARGEST_LOG_BYTES = 32 * 1024 * 1024
LONGEST_WORDS = 300


def open_own(log: Path, flags: int = os.O_RDONLY) -> IO[bytes]:
    """Open the log itself and no other file; raise OSError for a link or a pipe put in its place."""
    file = os.open(log, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{log} is not a file")
        return open(file, "r+b" if flags & os.O_RDWR else "wb" if flags & os.O_WRONLY else "rb")
    except BaseException:
        os.close(file)
        raise


def last_words(log: Path) -> str:
    """Return the last line that a replica printed, shortened; empty when there is none."""
    try:
        with open_own(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    spoken = [line.strip() for line in lines if line.strip()]
    return spoken[-1][:LONGEST_WORDS] if spoken else ""


def following(log: Path, after: int, most_bytes: int) -> tuple[str, int]:
    """Return what was printed from the byte ``after`` on, and where that ends; for a negative one the end of the log.

    A log that has become shorter meanwhile is read from its start.
    """
    try:
        with open_own(log) as file:
            size = os.fstat(file.fileno()).st_size
            begins = max(0, size - most_bytes) if after < 0 or after > size else max(after, size - most_bytes)
            file.seek(begins)
            if begins > max(after, 0):
                file.readline()
            words = file.read(most_bytes)
            return words.decode(errors="replace"), file.tell()
    except OSError:
        return "", max(after, 0)


def shorten(log: Path, limit: int = LARGEST_LOG_BYTES) -> bool:
    """Cut a file that has grown beyond ``limit`` bytes to its later half, from a line's start; whether it was."""
    try:
        if os.path.getsize(log) <= limit:
            return False
        with open_own(log, os.O_RDWR) as file:
            file.seek(-(limit // 2), os.SEEK_END)
            file.readline()
            kept = file.read()
            file.seek(0)
            file.write(b"(earlier lines were dropped)\n" + kept)
            file.truncate()
    except OSError:
        return False
    return True
