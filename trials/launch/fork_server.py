"""Starts replicas by forking a process that has the heavy modules imported: milliseconds instead of seconds.

One per machine, or a chain: given several stages (``fork_start``), it forks a process that goes on importing while it
serves already itself. Each starts no thread, opens no process group and touches no GPU before a fork. It speaks JSON
lines over a socket pair with its launcher: requests ``{"launch": ...}``, ``{"preload": [...]}``; answers
``{"launched": id, "pid": ...}``, ``{"exited": pid, "status": ...}``. When the launcher's end closes, it ends; its
replicas run on, and their leases end them if no scheduler adopts them.

When a file that it has loaded changes, it answers ``{"stale": id}`` instead of forking, and becomes a fresh
interpreter in the same process, so that the replicas stay its children; it says ``{"ready": pid}`` when it has loaded
everything again.

``{"branch": ...}``, sent with a socket, makes a branch: a fork of it that imports a user's code as well and then serves
launches over that socket. It says ``{"unfit": why}`` where the code must not be shared, ``{"declined": id}`` where one
replica must not have it; it ends with its last replica when its socket closes or its code has changed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from trials.launch.loaded_sources import LoadedSources
from trials.launch.replica_start import confine, finish, redirect, reseed, run_replica
from trials.launch.shared_import import SharedImport, UnfitToShare, import_for_sharing

IDLE_SECONDS = 600.0
"""A branch that nobody has asked for anything for so long, and that has no replica, gives its memory back."""


class _Server:
    """What the fork server and its branches have in common: launches, ends, and a watch on their sources."""

    def __init__(self, connection: socket.socket, sources: LoadedSources, shared: SharedImport) -> None:
        self.connection = connection
        self.sources = sources
        self.shared = shared
        self.children: set[int] = set()
        self.received_sockets: list[int] = []
        self.hung_up = False
        self.asked = time.monotonic()
        self.pid = os.getpid()
        """Of this process; in a child of it, its parent's."""
        self.wakeup = os.pipe()
        for descriptor in self.wakeup:
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self.wakeup[1], warn_on_full_buffer=False)

    def let_go(self) -> None:
        """In a child: give up what belongs to its parent alone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.connection.close()
        for descriptor in (*self.wakeup, *self.received_sockets):
            os.close(descriptor)
        os.setsid()

    def answer(self, message: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def over(self) -> bool:
        return self.hung_up

    def serve(self) -> None:
        pending = b""
        while not self.over():
            watched: list[Any] = [self.wakeup[0]] if self.hung_up else [self.wakeup[0], self.connection]
            ready, _, _ = select.select(watched, [], [], 1.0)
            if self.wakeup[0] in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wakeup[0], 4096)
            self.reap()
            if self.connection not in ready:
                continue
            received, sockets, _, _ = socket.recv_fds(self.connection, 65536, 8)
            for descriptor in sockets:
                # Else whatever a user's code starts would keep it open.
                os.set_inheritable(descriptor, False)
            self.received_sockets += sockets
            self.hung_up = not received
            self.asked = time.monotonic()
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                self.handle(json.loads(line))

    def handle(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def changed(self) -> str | None:
        """A file that is not any more what this process has in memory."""
        self.sources.note()
        return self.sources.changed()

    def launch(self, request: dict[str, Any]) -> None:
        pid = self.fork(lambda: self._become_replica(request))
        self.children.add(pid)
        self.answer({"launched": request["replica_id"], "pid": pid})

    def fork(self, become: Callable[[], None]) -> int:
        self.pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                become()
            finally:
                os._exit(1)
        return pid

    def _become_replica(self, request: dict[str, Any]) -> None:
        self.let_go()
        redirect(request["log"], self.shared.printed)
        confine(request)
        os.environ.clear()
        os.environ.update(request["environ"])
        sys.argv = [request["entrypoint"]]
        reseed()
        finish(run_replica(request))

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.children.discard(pid)
            self.answer({"exited": pid, "status": os.waitstatus_to_exitcode(status)})


class _ForkServer(_Server):
    def __init__(self, connection: socket.socket, preloaded: Sequence[str] = ()) -> None:
        super().__init__(connection, LoadedSources(), SharedImport())
        self.preloaded = list(preloaded)

    def preload(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        self.preloaded += names
        self.sources.note()

    def handle(self, message: dict[str, Any]) -> None:
        if "preload" in message:
            self.preload(message["preload"])
        elif "branch" in message:
            descriptor = self.received_sockets.pop(0)
            self.fork(lambda: self._become_branch(descriptor, message["branch"]))
            os.close(descriptor)
        else:
            changed = self.changed()
            if changed is not None:
                self.answer({"stale": message["launch"]["replica_id"], "changed": changed})
                self._begin_anew()
            self.launch(message["launch"])

    def _begin_anew(self) -> None:
        descriptor = self.connection.fileno()
        os.set_inheritable(descriptor, True)
        module = "trials.launch.fork_server"
        os.execv(sys.executable, [sys.executable, "-m", module, f"{descriptor}:{','.join(self.preloaded)}"])

    def _become_branch(self, descriptor: int, request: dict[str, Any]) -> None:
        self.let_go()
        connection = socket.socket(fileno=descriptor)
        try:
            shared = import_for_sharing(**request, parent=self.pid)
        except UnfitToShare as error:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(json.dumps({"unfit": str(error)}).encode() + b"\n")
            return
        self.sources.watch(shared.files_read)
        branch = _Branch(connection, self.sources, shared)
        branch.begin()


class _Branch(_Server):
    """Has a user's code in memory; its launcher asks the fork server itself for what this one does not give."""

    out_of_date = False

    def begin(self) -> None:
        self.sources.note()
        # What stands in memory now stays: replicas share its pages for as long as nothing writes to them.
        gc.collect()
        gc.freeze()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.answer({"ready": os.getpid()})
            self.serve()

    def over(self) -> bool:
        idle = time.monotonic() - self.asked > IDLE_SECONDS
        return not self.children and (self.hung_up or self.out_of_date or idle)

    def handle(self, message: dict[str, Any]) -> None:
        request = message["launch"]
        changed = self.changed()
        stranger = self.shared.stranger_to(request["environ"])
        if changed is not None:
            self.out_of_date = True
            self.answer({"stale": request["replica_id"], "changed": changed})
        elif stranger is not None:
            self.answer({"declined": request["replica_id"], "why": f"the code has read {stranger} of another replica"})
        else:
            self.launch(request)


def main(arguments: Sequence[str]) -> None:
    """Each argument is a stage: the descriptor of its connection, a colon, and the modules it adds."""
    stages = []
    for argument in arguments:
        descriptor, _, names = argument.partition(":")
        os.set_inheritable(int(descriptor), False)
        stages.append((socket.socket(fileno=int(descriptor)), [name for name in names.split(",") if name]))
    _serve_from(stages, ())


def _serve_from(stages: list[tuple[socket.socket, list[str]]], preloaded: Sequence[str]) -> None:
    (connection, names), *later = stages
    server = _ForkServer(connection, preloaded)
    server.preload(names)
    if later:

        def go_on() -> None:
            server.let_go()
            _serve_from(later, server.preloaded)

        server.fork(go_on)
        for theirs, _ in later:
            theirs.close()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        server.answer({"ready": os.getpid()})
        server.serve()
    # Taking everything down that was imported takes a second, for which a scheduler would wait at its end.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
