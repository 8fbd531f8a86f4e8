"""One scheduler process: folder, store, launcher, control loop and API put together and run until told to stop.

The same for `elastune up` and for the one that a sweep starts for itself; the latter ends with its owner, which holds
the other end of its standard input.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from scheduler.api.app import api_config
from scheduler.api.page.session_routes import link_path
from scheduler.api.service import assemble
from scheduler.api.site import Site
from scheduler.api.tokens import Access, Identity, Tokens
from scheduler.errors import SchedulerError
from scheduler.host.hosts import in_url, reachable
from scheduler.host.notifications import Notifier
from scheduler.host.retention import Retention
from scheduler.host.secret_files import keep_private, save_in_folder, secrets_in_folder
from scheduler.loop.control_loop import ControlLoop
from scheduler.loop.loop_thread import Watchdog
from scheduler.policy import policy_by_name
from scheduler.state_folder import StateFolder, read_server_file
from trials.errors import StoreUnavailable
from trials.store import TrialStore, sql_store

logger = logging.getLogger(__name__)

EXIT_STUCK = 75
DECIDE_SECONDS = 1.0
"""Least time between two decisions, unless a trial has come, has been measured, has ended or has lost a replica."""
DRAIN_SECONDS = 60.0
"""Longest time that replicas get to save their state when the scheduler is stopped for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    state_dir: Path
    host: str = "127.0.0.1"
    reached_at: str = ""
    """Address at which nodes reach it; empty: ``host`` itself."""
    port: int | None = None
    """None: the port this folder's scheduler had last time if it is free, else any."""
    policy: str = "goodput"
    stop_with_stdin: bool = False
    """End when standard input closes: the owner is gone."""
    keep_seconds: float
    """Seconds that finished trials are kept; 0: for ever."""
    webhook: str | None = None
    """Told when a trial fails, a study is done, or a budget is nearly used."""
    database: str | None = None
    """SQLAlchemy's URL of a database that a server keeps; None: a file in the state folder."""


def _bind(settings: ServerSettings) -> socket.socket:
    """Return a listening socket on the wanted port; an embedded scheduler prefers its last one and takes any other."""
    last = read_server_file(settings.state_dir) or {}
    wanted = settings.port
    if wanted is None:
        with contextlib.suppress(ValueError):
            wanted = int(str(last.get("url", "")).rpartition(":")[2])
    for port in dict.fromkeys([wanted or 0, 0] if settings.port is None else [wanted or 0]):
        # Only to sockets that name their protocol does asyncio apply TCP_NODELAY; without it each answer waits 40 ms.
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, port))
        except OSError as error:
            listener.close()
            if port == 0 or settings.port is not None:
                raise SystemExit(f"elastune: cannot listen on {settings.host}:{port}: {error}") from error
            continue
        return listener
    raise AssertionError("unreachable")


def serve(
    settings: ServerSettings, make_site: Callable[[], Site], *, on_listening: Callable[[str, str, str], None]
) -> None:
    """Run a scheduler until SIGTERM, SIGINT or (embedded) the owner's end. Raises StateFolderInUse.

    ``on_listening`` gets the address, the token, and the path of a link that opens the page once, when requests are
    answered.
    """
    # What cannot work is said before anything is there.
    policy_by_name(settings.policy)
    folder = StateFolder.acquire(settings.state_dir)
    keep_private(folder.path)
    listener = _bind(settings)
    url = f"http://{in_url(settings.reached_at or reachable(settings.host))}:{listener.getsockname()[1]}"
    tokens = Tokens(secrets_in_folder(folder.path), save=functools.partial(save_in_folder, folder.path))
    store = sql_store(settings.database or folder.database_url, exclusive=True)
    site = make_site()
    service = assemble(
        store,
        site,
        tokens,
        policy=settings.policy,
        url=url,
        state_dir=folder.path.resolve(),
        is_shared=not settings.stop_with_stdin,
        decide_every_seconds=DECIDE_SECONDS,
        decide_on_loss_or_end=True,
        server_file=None if site.runs_elsewhere else folder.server_file.resolve(),
    )
    loop, clock = service.loop, service.clock
    retention = Retention(store, loop, settings.keep_seconds, clock=clock)
    service.forget = retention.forget
    loop.after_look.append(retention.look)
    if settings.webhook is not None:
        loop.after_look.append(Notifier(settings.webhook, store, clock=clock).look)
    server = _Server(api_config(service), site.drain, service.page.end)
    folder.write_server_file(url)
    site.begin(store, loop, url, tokens.for_agents())
    Watchdog(lambda: loop.age, lambda: _replace_process(embedded=settings.stop_with_stdin)).start()

    failures: list[SchedulerError] = []

    def announce_when_up() -> None:
        while not server.started and not server.should_exit:
            time.sleep(0.005)
        try:
            site.wait_until_there()
        except SchedulerError as error:
            failures.append(error)
            server.should_exit = True
            return
        link = link_path(service.sessions.link_code(Identity(Access.OWNER), lasting=True))
        on_listening(url, tokens.owner, link)

    threading.Thread(target=announce_when_up, daemon=True).start()
    if settings.stop_with_stdin:
        threading.Thread(target=_stop_with_owner, args=(server, store, loop, folder, url), daemon=True).start()
    # uvicorn raises the signal that ended it once more, which would end this process before it has put things in order.
    signal.signal(signal.SIGTERM, _end_quietly)
    try:
        server.run(sockets=[listener])
    finally:
        site.launcher.close()
        store.close()
        folder.release()
    if failures:
        raise failures[0]


class _Server(uvicorn.Server):
    """Answers on while what is served drains, and takes leave of open pages; told twice, it ends at once."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None], take_leave: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain = drain
        self._take_leave = take_leave
        self._draining: threading.Thread | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is not None:
            super().handle_exit(sig, frame)
            return
        self._draining = threading.Thread(target=self._end_drained, args=(sig, frame), name="drain", daemon=True)
        self._draining.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._take_leave()
        await super().shutdown(sockets)

    def _end_drained(self, sig: int, frame: FrameType | None) -> None:
        try:
            self._drain()
        except Exception:
            logger.exception("the shutdown could not finish its work")
        super().handle_exit(sig, frame)


def _end_quietly(number: int, frame: object) -> None:
    raise SystemExit(0)


def _replace_process(*, embedded: bool) -> None:
    """Replace a stuck process by another one: a sweep starts its own anew when that ends."""
    if embedded:
        os._exit(EXIT_STUCK)
    # Locks, sockets and pipes of this one end with it; the arguments are those that it was started with.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _stop_with_owner(
    server: uvicorn.Server, store: TrialStore, loop: ControlLoop, folder: StateFolder, url: str
) -> None:
    """Wait for the owner's end of the pipe to close, give replicas time to save, then stop the server."""
    sys.stdin.buffer.read()
    logger.info("the process that started this scheduler is gone: pausing its trials")
    with contextlib.suppress(OSError):
        folder.write_server_file(url, ending=True)
    deadline = time.monotonic() + DRAIN_SECONDS
    try:
        while time.monotonic() < deadline:
            try:
                for study in store.studies():
                    if study.owner is not None:
                        store.disown_study(study.name, study.owner)
                loop.wake()
                if not store.replicas():
                    return
            except StoreUnavailable as error:
                logger.error("cannot pause trials yet: %s", error)
            time.sleep(0.05)
        for replica in store.replicas():
            loop.end_replica(replica)
    finally:
        server.should_exit = True
