"""Starts replicas by forking a process that has the heavy modules imported: milliseconds instead of seconds.

One per machine. It starts no thread, opens no process group and touches no GPU before a fork. It speaks JSON lines
over a socket pair with its launcher: requests ``{"launch": ...}``, ``{"preload": [...]}``; answers
``{"launched": id, "pid": ...}``, ``{"exited": pid, "status": ...}``. When the launcher's end closes, it ends; its
replicas run on, and their leases end them if no scheduler adopts them.

When a file that it has loaded changes, it answers ``{"stale": id}`` instead of forking, and becomes a fresh
interpreter in the same process, so that the replicas stay its children; it says ``{"ready": pid}`` when it has loaded
everything again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from trials.launch.loaded_sources import LoadedSources
from trials.launch.replica_start import confine, finish, redirect, reseed, run_replica


def _preload(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _child(request: dict[str, Any], connection: socket.socket, wakeup: tuple[int, int]) -> None:
    """Becomes the replica; never returns."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    connection.close()
    for descriptor in wakeup:
        os.close(descriptor)
    redirect(request["log"])
    confine(request)
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = [request["entrypoint"]]
    reseed()
    finish(run_replica(request))


class _ForkServer:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.sources = LoadedSources()
        self.preloaded: list[str] = []
        self.wakeup = os.pipe()
        for descriptor in self.wakeup:
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self.wakeup[1], warn_on_full_buffer=False)

    def answer(self, message: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def preload(self, names: list[str]) -> None:
        _preload(names)
        self.preloaded += names
        self.sources.note()

    def begin_anew(self) -> None:
        descriptor = self.connection.fileno()
        os.set_inheritable(descriptor, True)
        module = "trials.launch.fork_server"
        os.execv(sys.executable, [sys.executable, "-m", module, str(descriptor), *self.preloaded])

    def handle(self, message: dict[str, Any]) -> None:
        if "preload" in message:
            self.preload(message["preload"])
            return
        request = message["launch"]
        self.sources.note()
        changed = self.sources.changed()
        if changed is not None:
            self.answer({"stale": request["replica_id"], "changed": changed})
            self.begin_anew()
        pid = os.fork()
        if pid == 0:
            try:
                _child(request, self.connection, self.wakeup)
            finally:
                os._exit(1)
        self.answer({"launched": request["replica_id"], "pid": pid})

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.answer({"exited": pid, "status": os.waitstatus_to_exitcode(status)})

    def serve(self) -> None:
        pending = b""
        watched: list[Any] = [self.connection, self.wakeup[0]]
        while True:
            ready, _, _ = select.select(watched, [], [], 1.0)
            if self.wakeup[0] in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wakeup[0], 4096)
            self.reap()
            if self.connection not in ready:
                continue
            received = self.connection.recv(65536)
            if not received:
                return
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                self.handle(json.loads(line))


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    server = _ForkServer(connection)
    server.preload(sys.argv[2:])
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        server.answer({"ready": os.getpid()})
        server.serve()


if __name__ == "__main__":
    main()
