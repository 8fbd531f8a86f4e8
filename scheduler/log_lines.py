"""The scheduler's log: one line a record, whatever others' words are in it."""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from trials.plain_words import one_line, printable


class PlainFormatter(logging.Formatter):
    """A record is one line; only a traceback of ours has several, of which none is an escape sequence."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging calls it so
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(  # noqa: N802  # logging calls it so
        self, info: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        # Indented, so that no line of it can be taken for a record.
        return "\n".join(f"  {line}" for line in printable(super().formatException(info)).splitlines())


def log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx2").setLevel(logging.WARNING)
