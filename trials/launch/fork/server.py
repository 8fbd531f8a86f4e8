"""Starts replicas by forking a process that has the heavy modules imported: milliseconds instead of seconds.

One per machine, or a chain: given several stages (``start``), it forks a process that goes on importing while it
serves already itself. Each starts no thread, opens no process group and touches no GPU before a fork. It speaks JSON
lines over a socket pair with its launcher: requests ``{"launch": ...}``, ``{"preload": [...]}``; answers
``{"launched": id, "pid": ...}``, ``{"exited": pid, "status": ..., "replica": id}``. When the launcher's end closes, it
ends; its replicas run on, and their leases end them if no scheduler adopts them.

A process whose replica has ended, and which may become another one (``keeping``), says so over a line of its own and
waits there for a while; with the end of its replica the launcher hears that it is ``kept``. It says as well, for
``{"torch": id}``, when torch came in that was not in memory before.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trials.inside.cgroups import leave
from trials.inside.keeping import Keeping
from trials.inside.replica_start import confine, finish, redirect, reseed, run_replica
from trials.launch.fork.child import Child, kind_of, say, told
from trials.launch.fork.environ_reads import recorded_environ
from trials.launch.fork.loaded_sources import LoadedSources
from trials.launch.fork.shared_import import SharedImport, UnfitToShare, import_for_sharing

IDLE_SECONDS = 600.0
"""A branch that nobody has asked for anything for so long, and that has no replica, gives its memory back."""

KEPT_SECONDS = 10.0
"""A process that could become another replica, and does not for so long, ends."""
SPARE_SECONDS = 60.0
"""The same of one that has been none yet."""
SPARE_AFTER_SECONDS = 0.05
"""A spare is made when nobody has asked for anything for so long: a burst of launches goes first."""


class _Server:
    """What the fork server and its branches have in common: launches, ends, and a watch on their sources."""

    def __init__(self, connection: socket.socket, sources: LoadedSources, shared: SharedImport) -> None:
        self.connection = connection
        self.sources = sources
        self.shared = shared
        self.children: dict[int, Child] = {}
        self.wants_spare = False
        """Whether to fork a process beforehand: where one replica was started, another one follows."""
        self.received_sockets: list[int] = []
        self.hung_up = False
        self.asked = time.monotonic()
        self.pid = os.getpid()
        """Of this process; in a child of it, its parent's."""
        self.wakeup = os.pipe()
        for descriptor in self.wakeup:
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Whoever ends a whole job signals all of its processes; this one is needed until the last replica has left.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(self.wakeup[1], warn_on_full_buffer=False)

    def let_go(self) -> None:
        """In a child: give up what belongs to its parent alone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.connection.close()
        for descriptor in (*self.wakeup, *self.received_sockets):
            os.close(descriptor)
        for child in self.children.values():
            child.hang_up()
        self.children.clear()
        os.setsid()

    def answer(self, message: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def over(self) -> bool:
        return self.hung_up

    def serve(self) -> None:
        pending = b""
        while not self.over():
            watched: list[Any] = [self.wakeup[0]] if self.hung_up else [self.wakeup[0], self.connection]
            lines = {child.line: pid for pid, child in self.children.items() if child.line is not None}
            patience = SPARE_AFTER_SECONDS if self.wants_spare else 1.0
            ready, _, _ = select.select([*watched, *lines], [], [], patience)
            if not ready and self.wants_spare and not self.over():
                self.make_spare()
            if self.wakeup[0] in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wakeup[0], 4096)
            for line in lines.keys() & set(ready):
                self.hear(lines[line])
            self.reap()
            self.let_idle_go()
            if self.connection not in ready:
                continue
            received, sockets, _, _ = socket.recv_fds(self.connection, 65536, 8)
            for descriptor in sockets:
                # Else whatever a user's code starts would keep it open.
                os.set_inheritable(descriptor, False)
            self.received_sockets += sockets
            self.hung_up = not received
            self.asked = time.monotonic()
            *requests, pending = (pending + received).split(b"\n")
            for request in requests:
                self.handle(json.loads(request))

    def handle(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def changed(self) -> str | None:
        """A file that is not any more what this process has in memory."""
        self.sources.note()
        return self.sources.changed()

    def launch(self, request: dict[str, Any]) -> None:
        kind = kind_of(request)
        waiting = [(pid, child) for pid, child in self.children.items() if child.kept_since is not None]
        # One that has been such a replica has more in memory than a spare.
        for pid, child in sorted(waiting, key=lambda each: each[1].kind is None):
            if child.kind in (kind, None) and say(child.line, request):
                self.wants_spare = self.wants_spare or child.kind is None
                child.replica_id, child.kind, child.kept_since = request["replica_id"], kind, None
                self.answer({"launched": request["replica_id"], "pid": pid})
                return
        pid = self._fork_replica(request)
        self.children[pid].replica_id, self.children[pid].kind = request["replica_id"], kind
        self.wants_spare = True
        self.answer({"launched": request["replica_id"], "pid": pid})

    def make_spare(self) -> None:
        self.wants_spare = False
        if not any(child.is_spare for child in self.children.values()):
            self.children[self._fork_replica(None)].kept_since = time.monotonic()

    def drop_spares(self) -> None:
        """They lack what this process has imported since."""
        for child in self.children.values():
            if child.is_spare:
                child.hang_up()

    def _fork_replica(self, request: dict[str, Any] | None) -> int:
        """``request``: None where it will be told later."""
        ours, theirs = socket.socketpair()

        def become() -> None:
            ours.close()
            self._become_replica(request, theirs)

        pid = self.fork(become)
        theirs.close()
        self.children[pid] = Child(None, None, ours)
        return pid

    def hear(self, pid: int) -> None:
        """What one of its processes says."""
        child = self.children[pid]
        assert child.line is not None
        words = b""
        # Reset: it was ended with a request unread.
        with contextlib.suppress(ConnectionResetError):
            words = child.line.recv(4096)
        for word in words.split():
            if word == b"torch":
                self.answer({"torch": child.replica_id})
            else:
                child.kept_since = time.monotonic()
                self.answer({"exited": pid, "status": 0, "replica": child.replica_id, "kept": True})
        if not words:
            child.hang_up()

    def let_idle_go(self) -> None:
        """A process that is kept ends when nobody can speak to it any more."""
        for child in self.children.values():
            if child.kept_since is None:
                continue
            longest = SPARE_SECONDS if child.is_spare else KEPT_SECONDS
            if self.hung_up or time.monotonic() - child.kept_since > longest:
                child.hang_up()

    @property
    def has_replicas(self) -> bool:
        return any(child.kept_since is None for child in self.children.values())

    def fork(self, become: Callable[[], None]) -> int:
        self.pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                become()
            finally:
                os._exit(1)
        return pid

    def _become_replica(self, request: dict[str, Any] | None, line: socket.socket) -> None:
        self.let_go()
        request = request or told(line)
        keeping = Keeping()
        had_torch = "torch" in sys.modules
        while True:
            keeping.begin()
            redirect(request["log"], self.shared.printed)
            confine(request)
            os.environ.clear()
            os.environ.update(request["environ"])
            sys.argv = [request["entrypoint"]]
            reseed()
            status = run_replica(request)
            if "torch" in sys.modules and not had_torch:
                with contextlib.suppress(OSError):
                    line.sendall(b"torch ")
            if status != 0 or not keeping.may_go_on() or not leave(request["cgroups"]):
                finish(status)
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                line.sendall(b"kept ")
            request = told(line)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # One that was started before this process began anew is not known by name.
            child = self.children.pop(pid, None) or Child(None, None, None)
            child.hang_up()
            if child.kept_since is None:
                code = os.waitstatus_to_exitcode(status)
                self.answer({"exited": pid, "status": code, "replica": child.replica_id})


class _ForkServer(_Server):
    def __init__(
        self, connection: socket.socket, preloaded: Sequence[str] = (), library_reads: Mapping[str, str | None] = {}
    ) -> None:
        super().__init__(connection, LoadedSources(), SharedImport(library_reads=dict(library_reads)))
        self.preloaded = list(preloaded)

    def preload(self, names: list[str]) -> None:
        self.drop_spares()
        # Collecting while all of it is made takes a fifth of the time again, and finds nothing that could go. What is
        # frozen then costs no replica's collections any time, and its pages stay shared.
        gc.disable()
        with recorded_environ(self.shared.library_reads):
            for name in names:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        gc.freeze()
        gc.enable()
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
            unlike = self.shared.unlike_for_libraries(message["launch"]["environ"])
            if unlike is None:
                self.launch(message["launch"])
            else:
                why = f"libraries in memory have read another {unlike}"
                self.answer({"declined": message["launch"]["replica_id"], "why": why})

    def _begin_anew(self) -> None:
        descriptor = self.connection.fileno()
        os.set_inheritable(descriptor, True)
        module = "trials.launch.fork.server"
        os.execv(sys.executable, [sys.executable, "-m", module, f"{descriptor}:{','.join(self.preloaded)}"])

    def _become_branch(self, descriptor: int, request: dict[str, Any]) -> None:
        self.let_go()
        connection = socket.socket(fileno=descriptor)
        try:
            unlike = self.shared.unlike_for_libraries(request["environ"])
            if unlike is not None:
                raise UnfitToShare(f"libraries in memory have read another {unlike}")
            shared = import_for_sharing(**request, parent=self.pid)
            shared.library_reads = self.shared.library_reads
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
        return not self.has_replicas and (self.hung_up or self.out_of_date or idle)

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


def _serve_from(
    stages: list[tuple[socket.socket, list[str]]],
    preloaded: Sequence[str],
    library_reads: Mapping[str, str | None] = {},
) -> None:
    (connection, names), *later = stages
    server = _ForkServer(connection, preloaded, library_reads)
    server.preload(names)
    if later:

        def go_on() -> None:
            server.let_go()
            _serve_from(later, server.preloaded, server.shared.library_reads)

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
