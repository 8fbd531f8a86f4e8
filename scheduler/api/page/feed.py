"""Feeds open pages: looks at what there is while somebody watches, and hands each change to all of them at once."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from scheduler.api.page.board import Board, Shown
from scheduler.api.tokens import Access, Identity
from trials.errors import StoreUnavailable
from trials.record import Report

if TYPE_CHECKING:
    from scheduler.api.client_access import ClientAccess

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.15
"""Seconds between two updates of the page."""
IDLE_SECONDS = 60.0
"""A board that nobody watches is put away after that long."""
MOST_REPORTS = 100_000
"""Between two looks; a page that wants them all asks for the trial's."""
LONGEST_QUEUE = 400
"""Changes that a page may be behind; then it is told everything anew."""


class _End:
    """The scheduler ends, and there is nothing more to tell."""


class _Watched:
    def __init__(self, board: Board) -> None:
        self.board = board
        self.pages: set[asyncio.Queue[str | _End | None]] = set()
        self.empty_since: float | None = None


class PageFeed:
    """Changes for the open pages, worked out once for all. Not thread-safe, but for ``note_report``."""

    def __init__(self) -> None:
        self._watched: dict[tuple[Access, str], _Watched] = {}
        self._reports: deque[Report] = deque(maxlen=MOST_REPORTS)
        self._task: asyncio.Task[None] | None = None

    def note_report(self, report: Report) -> None:
        if self._watched:
            self._reports.append(report)

    @property
    def pages(self) -> int:
        return sum(len(watched.pages) for watched in self._watched.values())

    async def follow(self, service: Shown, access: ClientAccess, client: Identity) -> AsyncGenerator[str]:
        """Yield everything, then each change, until the scheduler ends."""
        watched = await self._watch(service, access, client)
        queue: asyncio.Queue[str | _End | None] = asyncio.Queue()
        watched.pages.add(queue)
        try:
            # A look that waits for the database holds the board, and must not hold up the loop.
            yield await asyncio.to_thread(watched.board.everything)
            while True:
                queued = await queue.get()
                if isinstance(queued, _End):
                    return
                # None: it was too far behind.
                yield await asyncio.to_thread(watched.board.everything) if queued is None else queued
        finally:
            watched.pages.discard(queue)

    def end(self) -> None:
        for watched in self._watched.values():
            for queue in watched.pages:
                queue.put_nowait(_End())

    async def _watch(self, service: Shown, access: ClientAccess, client: Identity) -> _Watched:
        key = client.access, client.subject
        watched = self._watched.get(key)
        if watched is None:
            board = await asyncio.to_thread(Board, service, access, client)
            watched = self._watched.setdefault(key, _Watched(board))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._pump())
        return watched

    async def _pump(self) -> None:
        loop = asyncio.get_running_loop()
        while self._watched:
            await asyncio.sleep(LOOK_SECONDS)
            reports = [self._reports.popleft() for _ in range(len(self._reports))]
            for key, watched in list(self._watched.items()):
                if watched.pages:
                    watched.empty_since = None
                else:
                    watched.empty_since = watched.empty_since or loop.time()
                    if loop.time() - watched.empty_since > IDLE_SECONDS:
                        del self._watched[key]
                        continue
                for report in reports:
                    watched.board.note_report(report)
                if not watched.pages:
                    continue
                try:
                    change = await asyncio.to_thread(watched.board.look)
                except StoreUnavailable as error:
                    logger.warning("pages are not updated: %s", error)
                    continue
                except Exception:
                    # Pages of others, and the next look, are none the worse.
                    logger.exception("updating the pages failed")
                    continue
                if change is not None:
                    _hand_out(watched, change)


def _hand_out(watched: _Watched, change: str) -> None:
    for queue in watched.pages:
        if queue.qsize() >= LONGEST_QUEUE:
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)
        else:
            queue.put_nowait(change)
