"""The launcher's end of the fork server and its branches: starts them, asks them for replicas, starts them again.

Concurrency: one thread at a time asks for replicas, while the control loop's may ask for what is known; a reader thread
for each server takes its answers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import operator
import os
import signal
import socket
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trials.inside.user_code import LOADED_BY
from trials.launch.base import LaunchRequest
from trials.launch.fork.start import StartedForkServer, start_fork_server

FORK_SECONDS = 20.0
"""Longest wait for a server's answer before a replica is started cold."""

PREPARE_SECONDS = 20.0
"""For so long replicas wait for a server that starts, or imports their code; then they do without."""

MOST_BRANCHES = 4
"""Codes of users in memory at a time; the one not asked for the longest goes first."""

UNFIT_SECONDS = 60.0
"""Code that could not be shared is tried again after so long: its author may have changed it."""

logger = logging.getLogger(__name__)

OnExit = Callable[["Ended"], None]
_Key = tuple[str, tuple[str, ...], tuple[str, ...], tuple[str | None, ...]]


@dataclass(frozen=True, slots=True)
class Ended:
    """A replica has ended."""

    pid: int
    status: int
    replica_id: str | None
    """None: of an earlier life of the fork server, which is known by its pid alone."""
    kept: bool = False
    """Its process is still there, and may become another replica."""


class ForkServers:
    """``on_exit``: told of each replica's end, from another thread.

    ``on_ready``: called from another thread when a server has become ready, or never will.
    """

    def __init__(self, on_exit: OnExit, on_ready: Callable[[], None], started: StartedForkServer) -> None:
        self._on_exit = on_exit
        self._on_ready = on_ready
        self._branches: OrderedDict[_Key, _Server] = OrderedDict()
        self._retired: list[_Server] = []
        self._unfit: dict[_Key, float] = {}
        self._begun: set[_Key] = set()
        """Codes of which a replica was forked while a process with more modules was on its way."""
        self._with_torch: set[_Key] = set()
        """Codes that import torch, and did not say so."""
        self._asked: dict[str, _Key] = {}
        """Codes of the replicas that run."""
        self._take_over(started)

    @property
    def pid(self) -> int:
        """Of the fork server's first process."""
        return self._process.pid

    @property
    def pids(self) -> set[int]:
        """Of the fork server's processes and its branches."""
        servers = (*self._chain, *list(self._branches.values()), *self._retired)
        return {self.pid, *(server.pid for server in servers if server.pid is not None)}

    def _take_over(self, started: StartedForkServer) -> None:
        self._process = started.process
        self._stages = [list(names) for names in started.stages]
        self._chain = [self._served_by(connection) for connection in started.connections]
        for server, names in zip(self._chain, itertools.accumulate(self._stages, operator.add), strict=True):
            server.modules = set(names)

    @property
    def _trunk(self) -> _Server:
        """Of the processes that fork replicas, the one with the most modules in memory that is ready."""
        return _fullest(self._chain)

    def _fitting(self, request: LaunchRequest) -> list[_Server]:
        """Processes of the chain to fork it from: those that have torch in memory, or those that do not."""
        wants = self._wants_torch(request)
        return [server for server in self._chain if server.has_torch == wants] or self._chain

    def _wants_torch(self, request: LaunchRequest) -> bool:
        return _key(request) in self._with_torch or any(name.partition(".")[0] == "torch" for name in request.preload)

    @property
    def _has_lost_one(self) -> bool:
        """A process that has been ready; one that never was would not be the next time either."""
        return self._trunk.gone or any(server.gone and server.has_been_ready for server in self._chain)

    def _served_by(self, connection: socket.socket) -> _Server:
        return _Server(connection, self._note_exit, self._note_torch, self._on_ready)

    def _note_exit(self, ended: Ended) -> None:
        self._asked.pop(ended.replica_id or "", None)
        self._on_exit(ended)

    def _note_torch(self, replica_id: str) -> None:
        """Its code has imported torch by itself: the next replica of it had better have it from its beginning."""
        key = self._asked.get(replica_id)
        if key is not None:
            self._with_torch.add(key)

    def is_ready_for(self, request: LaunchRequest) -> bool:
        """Whether to fork now. Not while a server starts, or has another fork of it import the replica's code.

        The first replica of a code does without what is not there yet: it imports that by itself, at the same time.
        """
        key = _key(request)
        fitting = self._fitting(request)
        if key in self._begun and any(server.is_on_its_way for server in fitting):
            return False
        # Code that could not be shared once is hardly worth waiting for.
        branch = None if key in self._unfit else self._branches.get(key)
        return not any(server is not None and server.is_on_its_way for server in (_fullest(fitting), branch))

    def fork(self, request: LaunchRequest, document: Mapping[str, Any]) -> int | None:
        """Pid of the new replica; None when no server can give one, and the replica has to start cold."""
        key = _key(request)
        self._asked[request.replica_id] = key
        branch = self._branches.get(key)
        if branch is not None and not branch.has_torch and self._wants_torch(request):
            self._retire(key)
            branch = None
        if branch is not None and branch.ready:
            self._branches.move_to_end(key)
            pid = branch.fork(request.replica_id, document)
            if pid is not None:
                return pid
        pid = self._fork_from_trunk(request, document)
        if pid is None:
            del self._asked[request.replica_id]
        if pid is not None and any(server.is_on_its_way for server in self._fitting(request)):
            self._begun.add(key)
        elif pid is not None and request.user_code:
            self._prepare_branch(key, request)
        return pid

    def _fork_from_trunk(self, request: LaunchRequest, document: Mapping[str, Any]) -> int | None:
        if self._has_lost_one:
            logger.warning("fork server gone: starting another one")
            self.kill()
            self._take_over(start_fork_server(self._stages))
        fitting = self._fitting(request)
        wanted = [*request.preload, *(["torch"] if self._wants_torch(request) else [])]
        stage = self._stages[self._chain.index(fitting[-1])]
        known = fitting[-1].modules.union(stage)
        stage += [name for name in wanted if name not in known]
        # Again where a process finds its code to be out of date and loads it anew.
        for _ in range(len(self._chain) + 1):
            trunk = _fullest(fitting)
            if not trunk.wait_until_ready():
                return None
            new = [name for name in wanted if name not in trunk.modules]
            if new:
                trunk.send({"preload": new})
                trunk.modules.update(new)
            pid = trunk.fork(request.replica_id, document)
            if pid is not None or trunk.gone or trunk.declined == request.replica_id:
                return pid
        return None

    def _prepare_branch(self, key: _Key, request: LaunchRequest) -> None:
        """Have the user's code imported for the replicas to come, unless that is under way or cannot be."""
        branch = self._branches.get(key)
        if branch is not None and branch.unfit is not None:
            logger.info("replicas import %s themselves: %s", ", ".join(request.user_code), branch.unfit)
            self._unfit[key] = time.monotonic()
        if branch is not None and (branch.gone or branch.out_of_date):
            self._retire(key)
            branch = None
        if branch is not None or time.monotonic() - self._unfit.get(key, float("-inf")) < UNFIT_SECONDS:
            return
        ours, theirs = socket.socketpair()
        wanted = {
            "user_code": list(request.user_code),
            "python_path": list(request.python_path),
            "working_dir": request.working_dir,
            "environ": _without_identity(request.environ),
            "entrypoint": request.entrypoint,
        }
        trunk = _fullest(self._fitting(request))
        with theirs:
            trunk.send({"branch": wanted}, theirs)
        self._branches[key] = self._served_by(ours)
        self._branches[key].modules = set(trunk.modules)
        while len(self._branches) > MOST_BRANCHES:
            self._retire(next(iter(self._branches)))

    def _retire(self, key: _Key) -> None:
        branch = self._branches.pop(key)
        branch.hang_up()
        self._retired = [each for each in [*self._retired, branch] if not each.gone]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for server in self._chain[1:]:
            server.kill()
            # One that has not said which process it is ends when it has imported everything.
            server.hang_up()

    def close(self) -> None:
        for branch in self._branches.values():
            branch.hang_up()
        for server in self._chain:
            server.hang_up()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self.kill()
        for server in (*self._branches.values(), *self._retired, *self._chain):
            server.close()


class _Server:
    """One end of a socket pair; at the other, a process that forks replicas."""

    def __init__(
        self,
        connection: socket.socket,
        on_exit: OnExit,
        on_torch: Callable[[str], None],
        on_ready: Callable[[], None],
    ) -> None:
        self.ready = False
        self.has_been_ready = False
        self.gone = False
        self.out_of_date = False
        self.unfit: str | None = None
        self.declined = ""
        """The replica of late that must not have what is in memory there."""
        self.modules: set[str] = set()
        """What a fork server has in memory, by the names it was told."""
        self._pid: int | None = None
        self._answers: dict[str, int | None] = {}
        self._on_exit = on_exit
        self._on_torch = on_torch
        self._on_ready = on_ready
        self._began = time.monotonic()
        self._news = threading.Condition()
        self._connection = connection
        self._reader = threading.Thread(target=self._read, name="fork-server", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "exited" in message:
                    kept = message.get("kept", False)
                    self._on_exit(Ended(message["exited"], message["status"], message["replica"], kept))
                    continue
                if "torch" in message:
                    self._on_torch(message["torch"])
                    continue
                with self._news:
                    self._take(message)
                    self._news.notify_all()
                if "ready" in message or "unfit" in message:
                    self._on_ready()
        with self._news:
            if self._pid is None and self.unfit is None:
                self.unfit = "the process that imported it ended"
            self.gone, self.ready = True, False
            self._connection.close()
            self._news.notify_all()
        self._on_ready()

    def _take(self, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            self.ready = self.has_been_ready = True
            self._pid = message["ready"]
        elif "launched" in message:
            self._answers[message["launched"]] = message["pid"]
        elif "declined" in message:
            logger.info("%s imports its code itself: %s", message["declined"], message["why"])
            self.declined = message["declined"]
            self._answers[message["declined"]] = None
        elif "stale" in message:
            logger.info("a fork server's code is loaded again, changed=%s", message["changed"])
            self.ready, self.out_of_date, self._began = False, True, time.monotonic()
            self._answers[message["stale"]] = None
        elif "unfit" in message:
            self.unfit = message["unfit"]

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def has_torch(self) -> bool:
        return any(name.partition(".")[0] == "torch" for name in self.modules)

    @property
    def is_on_its_way(self) -> bool:
        settled = self.ready or self.gone or self.out_of_date or self.unfit is not None
        return not settled and time.monotonic() - self._began < PREPARE_SECONDS

    def wait_until_ready(self) -> bool:
        with self._news:
            left = self._began + FORK_SECONDS - time.monotonic()
            self._news.wait_for(lambda: self.ready or self.gone, max(left, 0.1))
            return self.ready

    def send(self, message: Mapping[str, Any], passed: socket.socket | None = None) -> None:
        """A server that is gone is noticed by its reader; what was for it is lost with it."""
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            if passed is not None:
                data = data[socket.send_fds(self._connection, [data], [passed.fileno()]) :]
            self._connection.sendall(data)

    def fork(self, replica_id: str, document: Mapping[str, Any]) -> int | None:
        self.send({"launch": document})
        with self._news:
            self._news.wait_for(lambda: replica_id in self._answers or self.gone, FORK_SECONDS)
            if replica_id not in self._answers and not self.gone:
                # Never start the same replica twice: a server this slow is given up together with its backlog.
                self.kill()
                self._news.wait_for(lambda: self.gone, 1.0)
                # Also when somebody else holds its end open.
                self.gone, self.ready, self._pid = True, False, None
            return self._answers.pop(replica_id, None)

    def kill(self) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def hang_up(self) -> None:
        """Ask for nothing any more; a branch goes on telling the ends of its replicas."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._reader.join(timeout=5.0)


def _fullest(servers: Sequence[_Server]) -> _Server:
    """The one with the most modules in memory that is ready, of servers in the order of what they have."""
    return next((server for server in reversed(servers) if server.ready), servers[0])


def _key(request: LaunchRequest) -> _Key:
    how = tuple(request.environ.get(name) for name in LOADED_BY)
    return request.working_dir, request.python_path, request.user_code, how


def _without_identity(environ: Mapping[str, str]) -> dict[str, str]:
    """Code that asks, while it is imported, which replica it is in cannot be shared: here it is in none."""
    kept = {name: value for name, value in environ.items() if not name.startswith("ELASTUNE_") or name in LOADED_BY}
    return kept | {"ELASTUNE_API": ""}
