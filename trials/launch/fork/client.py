"""The launcher's end of the fork server: starts it, asks it for replicas, teaches it what they import.

One rule decides what is in memory. A code's replicas tell which installed modules they have imported by their first
training step; a process of the server imports these, and forks the replicas that follow. Until a code's first replica
has told, no more of them import by themselves than there are cores: the others wait.

What is learnt is kept in a process of its own (a leaf), one for codes that use torch and one for those that do not.
The processes before it have fixed modules. A replica that has another value for a variable that a leaf's packages name,
and may have read while they were imported, is forked from these.

Concurrency: one thread at a time asks for replicas, while the control loop's may ask for what is known; a reader thread
for each process takes its answers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trials.inside.imports import package_of
from trials.inside.user_code import LOADED_BY
from trials.launch.base import LaunchRequest
from trials.launch.fork.start import FORKABLE, StartedForkServer, start_fork_server

FORK_SECONDS = 20.0
"""Longest wait for a server's answer before a replica is started cold."""

PREPARE_SECONDS = 20.0
"""Longest wait of replicas for a process that imports what they need; then they do without."""

FIRST_SECONDS = 10.0
"""Longest wait of replicas for the first ones of their code to tell what they import."""

MOST_LOSSES = 3
"""A leaf that dies so often while it imports is not started again."""

READ_WHILE_IMPORTED = ("KMP_", "MKL_", "NPY_", "NUMPY_", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH")
"""Beginnings of variables that torch or numpy read when they are imported: where one of these differs, a replica starts
cold."""

OURS = ("OMP_NUM_THREADS", "PYTHONPATH", *FORKABLE)
"""Variables that are set for each replica, or for processes that others are forked from."""

logger = logging.getLogger(__name__)

OnExit = Callable[["Ended"], None]
_Key = tuple[str, tuple[str, ...], tuple[str | None, ...]]


@dataclass(frozen=True, slots=True)
class Ended:
    pid: int
    status: int
    replica_id: str | None
    """None: of an earlier life of the fork server, which is known by its pid alone."""
    kept: bool = False
    """Its process is still there, and may become another replica."""


@dataclass(slots=True)
class _Code:
    needs: dict[str, None]
    """Names of the modules that they import, in order."""
    changed: dict[str, str] = field(default_factory=dict)
    """Variables that they set by themselves, before they import those perhaps."""
    importing: dict[str, float] = field(default_factory=dict)
    """Replicas that have not told what they import, with the time of their start."""
    has_begun: bool = False
    refused: set[tuple[str, ...]] = field(default_factory=set)
    """Variables of its replicas that the packages of a leaf may have read with other values."""

    wants_torch: bool = False
    _lacking: tuple[object, tuple[str, ...]] = (None, ())

    def add(self, names: Sequence[str]) -> None:
        """Note that its replicas import these."""
        self.needs.update(dict.fromkeys(names))
        self.wants_torch = self.wants_torch or any(package_of(name) == "torch" for name in names)

    def lacking(self, present: frozenset[str], unshareable: set[str]) -> tuple[str, ...]:
        """Return what it needs beyond these modules, but for these packages; the answer is kept."""
        key = (present, len(self.needs), len(unshareable))
        if self._lacking[0] != key:
            names = (name for name in self.needs if name not in present and package_of(name) not in unshareable)
            self._lacking = key, tuple(names)
        return self._lacking[1]


class ForkServers:
    """The fork servers of a launcher, one for each environment.

    ``on_exit``: told of each replica's end, from another thread.

    ``on_ready``: called from another thread when a process has become ready, or never will.
    """

    def __init__(self, on_exit: OnExit, on_ready: Callable[[], None], started: StartedForkServer) -> None:
        self._on_exit = on_exit
        self._on_ready = on_ready
        self.cores = len(os.sched_getaffinity(0))
        """Most processes that import the same thing by themselves at a time."""
        self._lock = threading.RLock()
        self._codes: dict[_Key, _Code] = {}
        self.asked: dict[str, _Code] = {}
        """Codes of the replicas that run."""
        self.leaves: dict[bool, _Leaf] = {}
        """Leaves by whether their codes use torch."""
        self._retired: list[_Server] = []
        self.unshareable: set[str] = set()
        """Packages that leave a thread or CUDA behind when they are imported, or miss a variable."""
        self._losses = 0
        self._take_over(started)

    @property
    def pid(self) -> int:
        """Return the pid of the fork server's first process."""
        return self._process.pid

    @property
    def pids(self) -> set[int]:
        """Return the pids of the fork server's processes."""
        servers = (*self.chain, *(leaf.server for leaf in list(self.leaves.values())), *self._retired)
        return {self.pid, *(server.pid for server in servers if server.pid is not None)}

    def _take_over(self, started: StartedForkServer) -> None:
        self._process = started.process
        self._stages = started.stages
        self._environ = started.environ
        self.chain = [self._served_by(connection) for connection in started.connections]
        """Processes with the fixed modules in memory, each with those of the one before it too."""
        for server, names in zip(self.chain, self._stages, strict=True):
            server.will_have_torch = any(package_of(name) == "torch" for name in names)

    @property
    def trunk(self) -> _Server:
        """The process with the most fixed modules in memory that is ready."""
        return _fullest(self.chain)

    def _served_by(self, connection: socket.socket) -> _Server:
        return _Server(connection, self._note_exit, self._note_imports, self._on_ready)

    # ------------------------------------------------------------------ what replicas tell

    def _note_exit(self, ended: Ended) -> None:
        with self._lock:
            code = self.asked.pop(ended.replica_id or "", None)
            if code is not None:
                code.importing.pop(ended.replica_id or "", None)
        self._on_exit(ended)

    def _note_imports(self, replica_id: str, names: Sequence[str], changed: Mapping[str, str]) -> None:
        """Note imports that the next replica of that code had better have from its beginning."""
        with self._lock:
            code = self.asked.get(replica_id)
            if code is not None:
                code.add(names)
                code.changed.update(changed)
                code.importing.pop(replica_id, None)
        self._on_ready()

    def _code_of(self, request: LaunchRequest) -> _Code:
        how = tuple(request.environ.get(name) for name in LOADED_BY)
        key = request.working_dir, request.python_path, how
        code = self._codes.setdefault(key, _Code({}))
        code.add(request.preload)
        return code

    # ------------------------------------------------------------------ which process forks a replica

    def _fixed(self, code: _Code) -> list[_Server]:
        """Return processes of fixed modules to fork it from: those that have torch in memory, or those that do not."""
        return [server for server in self.chain if server.will_have_torch == code.wants_torch] or self.chain[:1]

    def _leaf_for(self, code: _Code, request: LaunchRequest) -> _Server | None:
        """Return the process with what this code needs beyond the fixed modules, perhaps on its way.

        None where none helps.
        """
        candidates = self._fixed(code)
        fixed = _fullest(candidates)
        if not fixed.ready or any(each.is_on_its_way for each in candidates):
            return None
        if self._losses >= MOST_LOSSES or self._differing(request) in code.refused:
            return None
        self._drop_lost_leaf(code.wants_torch)
        lacking = code.lacking(fixed.modules, self.unshareable)
        if not lacking:
            return None
        leaf = self.leaves.get(code.wants_torch)
        if leaf is None:
            ours, theirs = socket.socketpair()
            with theirs:
                fixed.send({"grow": list(lacking), "changed": code.changed}, theirs)
            leaf = self.leaves[code.wants_torch] = _Leaf(self._served_by(ours), set(lacking))
        elif new := [name for name in lacking if name not in leaf.asked]:
            leaf.asked.update(new)
            if new := [name for name in new if name not in leaf.server.modules]:
                leaf.server.is_to_import(new, code.changed)
        return leaf.server

    def _drop_lost_leaf(self, with_torch: bool) -> None:
        leaf = self.leaves.get(with_torch)
        if leaf is None:
            return
        if leaf.server.unfit:
            # One that another package imports comes again whatever is asked for.
            self._losses += self.unshareable.issuperset(leaf.server.unfit)
            self.unshareable.update(leaf.server.unfit)
        elif leaf.server.gone:
            self._losses += not leaf.server.has_been_ready
        else:
            return
        del self.leaves[with_torch]
        self._retired = [each for each in [*self._retired, leaf.server] if not each.gone]

    def _differing(self, request: LaunchRequest) -> tuple[str, ...]:
        """Variables for which the replica has another value than these processes."""
        return tuple(
            name
            for name, value in sorted(request.environ.items())
            if self._environ.get(name) != value
            and name not in OURS
            and not name.startswith("ELASTUNE_")
            and not name.endswith("_VISIBLE_DEVICES")
        )

    # ------------------------------------------------------------------ replicas

    def is_ready_for(self, request: LaunchRequest) -> bool:
        """Tell whether to fork now, and not when a process has imported what the replica would import by itself."""
        with self._lock:
            code = self._code_of(request)
            fixed, leaf = self._fixed(code), self._leaf_for(code, request)
            if _fullest(fixed).is_on_its_way or (code.has_begun and any(each.is_on_its_way for each in fixed)):
                return False
            if leaf is not None:
                # Its end may be told of just now: the next look starts another one.
                return leaf.ready or leaf.is_late
            patience = time.monotonic() - FIRST_SECONDS
            return sum(began > patience for began in code.importing.values()) < self.cores

    def fork(self, request: LaunchRequest, document: Mapping[str, Any]) -> int | None:
        """Pid of the new replica; None when no process can give one, and the replica has to start cold."""
        if any(server.gone and (server is self.chain[0] or server.has_been_ready) for server in self.chain):
            logger.warning("fork server gone: starting another one")
            self.kill()
            self._take_over(start_fork_server(self._stages, self._environ))
        differing = self._differing(request)
        if any(name.startswith(READ_WHILE_IMPORTED) for name in differing):
            return None
        with self._lock:
            code = self._code_of(request)
            leaf = self._leaf_for(code, request)
            self.asked[request.replica_id] = code
            if leaf is None:
                code.importing[request.replica_id] = time.monotonic()
            code.has_begun = True
        pid = None
        if leaf is not None and leaf.ready:
            pid = leaf.fork(request.replica_id, document, differing)
            if pid is None and leaf.ready:
                code.refused.add(differing)
        # Again where a process finds its code to be out of date and loads it anew.
        for _ in range(len(self.chain) + 1):
            if pid is not None:
                return pid
            fixed = _fullest(self._fixed(code))
            if not fixed.wait_until_ready():
                break
            pid = fixed.fork(request.replica_id, document)
            if fixed.gone:
                break
        if pid is None:
            with self._lock:
                self.asked.pop(request.replica_id, None)
                code.importing.pop(request.replica_id, None)
        return pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for server in (*self.chain[1:], *(leaf.server for leaf in self.leaves.values())):
            server.kill()
            # One that has not said which process it is ends when it has imported everything.
            server.hang_up()
        self.leaves.clear()

    def close(self) -> None:
        servers = (*self.chain, *(leaf.server for leaf in self.leaves.values()), *self._retired)
        for server in servers:
            server.hang_up()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self.kill()
        for server in servers:
            server.close()


@dataclass(slots=True)
class _Leaf:
    server: _Server
    asked: set[str]
    """Modules that it was asked to import; some may not be there."""


class _Server:
    """One end of a socket pair; at the other, a process that forks replicas."""

    def __init__(
        self,
        connection: socket.socket,
        on_exit: OnExit,
        on_imports: Callable[[str, Sequence[str], Mapping[str, str]], None],
        on_ready: Callable[[], None],
    ) -> None:
        self.ready = False
        self.has_been_ready = False
        self.gone = False
        self.unfit: Sequence[str] = ()
        """Packages after whose import nothing can be forked."""
        self.modules: frozenset[str] = frozenset()
        """Names of all modules that it has in memory."""
        self.will_have_torch = False
        self._pid: int | None = None
        self._answers: dict[str, int | None] = {}
        self._on_exit = on_exit
        self._on_imports = on_imports
        self._on_ready = on_ready
        self._began = time.monotonic()
        self._importing = 1
        """Requests to import something that it has not answered."""
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
                if "imported" in message:
                    self._on_imports(message["replica"], message["imported"], message["changed"])
                    continue
                with self._news:
                    self._take(message)
                    self._news.notify_all()
                if "ready" in message or "unfit" in message:
                    self._on_ready()
        with self._news:
            self.gone, self.ready = True, False
            self._connection.close()
            self._news.notify_all()
        self._on_ready()

    def _take(self, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            self._importing -= 1
            self.modules = frozenset(message["modules"])
            self.ready = self._importing == 0
            self.has_been_ready = True
            self._pid = message["ready"]
        elif "launched" in message:
            self._answers[message["launched"]] = message["pid"]
        elif "stale" in message:
            logger.info("a fork server loads its code again, changed=%s", message["changed"])
            self.ready, self._importing, self._began = False, 1, time.monotonic()
            self._answers[message["stale"]] = None
        elif "unfit" in message:
            packages = ", ".join(message["unfit"])
            logger.info("each replica imports %s itself, not the fork server: %s", packages, message["why"])
            self.unfit, self.ready = message["unfit"], False

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def is_on_its_way(self) -> bool:
        settled = self.ready or self.gone or bool(self.unfit)
        return not settled and not self.is_late

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._began >= PREPARE_SECONDS

    def is_to_import(self, names: Sequence[str], changed: Mapping[str, str]) -> None:
        """Have it import these before it forks the next replica."""
        with self._news:
            self.ready, self._began = False, time.monotonic()
            self._importing += 1
        self.send({"preload": list(names), "changed": dict(changed)})

    def wait_until_ready(self) -> bool:
        with self._news:
            left = self._began + FORK_SECONDS - time.monotonic()
            self._news.wait_for(lambda: self.ready or self.gone, max(left, 0.1))
            return self.ready

    def send(self, message: Mapping[str, Any], passed: socket.socket | None = None) -> None:
        """Send a message; a server that is gone is noticed by its reader, and what was for it is lost with it."""
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            if passed is not None:
                data = data[socket.send_fds(self._connection, [data], [passed.fileno()]) :]
            self._connection.sendall(data)

    def fork(self, replica_id: str, document: Mapping[str, Any], differs: Sequence[str] = ()) -> int | None:
        """Fork a replica. ``differs``: variables with another value; return None where a package may have read one."""
        self.send({"launch": document, "differs": list(differs)})
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
        """Ask for nothing any more: the process ends."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._reader.join(timeout=5.0)


def _fullest(servers: Sequence[_Server]) -> _Server:
    """Return the ready server with the most modules in memory, of servers in the order of what they have."""
    return next((server for server in reversed(servers) if server.ready), servers[0])
