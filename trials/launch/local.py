"""Replicas as processes of this machine, one slot each, held by a session and, where possible, a control group.

Concurrency: the control loop's thread makes all calls; exits are noted by other threads, and another one asks the fork
server, for which nobody waits long. A fork server that died is replaced at the next launch; when it is switched off, or
does not answer, replicas start cold.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from typing import Any

import psutil

from dist_core.link.environment import SLOT_MEMORY
from trials.errors import LaunchFailed
from trials.inside.cgroups import Cgroups
from trials.launch.base import Exit, Launcher, LaunchRequest, NodeSlots, ReplicaProcess
from trials.launch.fork.client import Ended, ForkServers
from trials.launch.fork.start import HASHES_ALIKE, StartedForkServer, own_path, start_fork_server
from trials.launch.gpus import GpuSource, NoGpus
from trials.launch.slots import Slot, by_node
from trials.record import ReplicaRecord

STATUS_SECONDS = 3.0
"""Seconds that a process may be gone before it is reported without its exit status."""

LOOK_SECONDS = 1.0
"""Between two looks at a process whose end is told of, should nobody be left to tell."""
STRANGERS_SECONDS = 5.0
"""Between two looks at who works on the GPUs."""

logger = logging.getLogger(__name__)


class LocalLauncher(Launcher):
    """Launcher that runs each replica as a process of this machine.

    ``slots``: how the machine is divided, or a number of slots that confine nothing. ``gpus``: who works on them.

    ``memory_bytes``: the most that a replica may use, where the machine lets us limit it. ``fork_server``: False for
    none, or one that was started before; else it imports ``preload``.
    """

    def __init__(
        self,
        *,
        slots: int | Sequence[Slot],
        node: str = "localhost",
        gpus: GpuSource | None = None,
        memory_bytes: int | None = None,
        fork_server: bool | StartedForkServer = True,
        preload: Sequence[str] = (),
    ) -> None:
        divided = [Slot(node=node)] * slots if isinstance(slots, int) else slots
        self._slots = by_node(divided)
        self.on_change: Callable[[], None] = lambda: None
        """Called, from another thread, when a replica of this launcher's is gone, or one that had to wait can start."""
        self._gpus = gpus or NoGpus()
        self._strangers: tuple[float, frozenset[str]] = (float("-inf"), frozenset())
        self._alive: frozenset[int] = frozenset()
        self._ancestor_pids = frozenset(process.pid for process in psutil.Process().parents())
        self._memory_bytes = memory_bytes
        self._cgroups = Cgroups.find()
        self._leaving: set[int] = set()
        """Processes that are gone, and whose groups are not."""
        if memory_bytes is not None and (self._cgroups is None or self._cgroups.memory is None):
            logger.warning(
                "this machine does not allow limiting the memory of a process; replicas may use all of its memory"
            )
        self._ended: dict[str, Ended] = {}
        """Replicas that have ended, until somebody asks."""
        self._present: dict[int, str] = {}
        """Replica that each process of this launcher is, or was last."""
        self._started_pids: dict[int, float | None] = {}
        """Processes that this launcher started, with the time at which they were first seen to be gone."""
        self._looked_at: dict[int, float] = {}
        """Time at which each of those was last seen to run."""
        self._lock = threading.Lock()
        self.servers: ForkServers | None = None
        """None where each replica starts cold."""
        self._closed = False
        self._starts = PendingStarts(self._start_warm, lambda: self.on_change())
        if fork_server:
            started = start_fork_server([preload]) if fork_server is True else fork_server
            self.servers = ForkServers(self._note_exit, lambda: self.on_change(), started)

    def _note_exit(self, ended: Ended) -> None:
        with self._lock:
            replica_id = ended.replica_id or self._present.get(ended.pid)
            if replica_id is not None:
                self._ended[replica_id] = ended
        self.on_change()

    def nodes(self) -> Sequence[NodeSlots]:
        taken = self._with_strangers()
        return [
            NodeSlots(
                node=node,
                slots=len(slots),
                kind=slots[0].kind,
                in_use=frozenset(index for index, slot in enumerate(slots) if not taken.isdisjoint(slot.gpus)),
            )
            for node, slots in self._slots.items()
        ]

    def _with_strangers(self) -> frozenset[str]:
        """GPUs on which processes work that are neither replicas nor those that this scheduler belongs to."""
        asked, strangers = self._strangers
        if time.monotonic() - asked < STRANGERS_SECONDS:
            return strangers
        users = self._gpus.users()
        strangers = frozenset(gpu for gpu, pids in users.items() if any(self._is_stranger(pid) for pid in pids))
        self._strangers = time.monotonic(), strangers
        return strangers

    def _is_stranger(self, pid: int) -> bool:
        try:
            ours = self._alive | self._started_pids.keys() | (self.servers.pids if self.servers is not None else set())
            return pid not in self._ancestor_pids and os.getsid(pid) not in ours
        except ProcessLookupError:
            return False

    def slot_environ(self, node: str, slot: int) -> Mapping[str, str]:
        environ = self._slots[node][slot].environ(os.environ.get("OMP_NUM_THREADS"))
        memory = {} if self._memory_bytes is None else {SLOT_MEMORY: str(self._memory_bytes)}
        return {**environ, **memory}

    def is_ready_for(self, request: LaunchRequest) -> bool:
        if self.servers is None or self._starts.hang:
            return True
        return not self._starts.are_slow and self.servers.is_ready_for(request)

    def launch(self, request: LaunchRequest) -> ReplicaProcess | None:
        # Where whoever forks replicas does not answer, others start without.
        is_cold = self.servers is None or self._starts.hang
        return self._start(request, None) if is_cold else self._starts.begin(request)

    def started(self, replica_id: str) -> ReplicaProcess | None:
        return self._starts.ended(replica_id)

    def _start_warm(self, request: LaunchRequest) -> ReplicaProcess:
        return self._start(request, self.servers)

    def _start(self, request: LaunchRequest, servers: ForkServers | None) -> ReplicaProcess:
        try:
            request.log.parent.mkdir(parents=True, exist_ok=True)
            groups = None if self._cgroups is None else self._cgroups.to_json(self._memory_bytes)
            document = {**request.to_json(), "cgroups": groups}
            pid = servers.fork(request, document) if servers is not None else None
            if self._closed:
                # Its fork server was ended to get here: nobody would look after what starts now.
                raise LaunchFailed(
                    "the replica was not started, because the scheduler is shutting down; its trial goes on with the "
                    "next one"
                )
            if pid is None:
                pid = self._launch_cold(request, document)
        except OSError as error:
            raise LaunchFailed(f"a replica could not be started in {request.working_dir}: {error}") from error
        with self._lock:
            self._started_pids[pid] = None
            self._leaving.discard(pid)
            self._present[pid] = request.replica_id
        try:
            started = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            started = 0.0
        return ReplicaProcess(pid, started)

    def _let_go(self, *pids: int) -> None:
        """Take away the groups of processes that are gone; those that are still busy at a later call."""
        if self._cgroups is not None:
            self._leaving |= set(pids)
            self._leaving = {pid for pid in self._leaving if not self._cgroups.remove(pid)}

    def _launch_cold(self, request: LaunchRequest, document: Mapping[str, Any]) -> int:
        process = subprocess.Popen(
            [sys.executable, "-m", "trials.inside.replica_start"],
            stdin=subprocess.PIPE,
            cwd=request.working_dir,
            env={**HASHES_ALIKE, **request.environ, "PYTHONPATH": os.pathsep.join([*request.python_path, *own_path()])},
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(document).encode())
        process.stdin.close()
        waiting = (process, request.replica_id)
        threading.Thread(target=self._await_cold, args=waiting, name="cold-replica", daemon=True).start()
        return process.pid

    def _await_cold(self, process: subprocess.Popen[bytes], replica_id: str) -> None:
        self._note_exit(Ended(process.pid, process.wait(), replica_id))

    def exits(self, replicas: Sequence[ReplicaRecord]) -> list[Exit]:
        gone: list[Exit] = []
        if self._leaving:
            self._let_go()
        self._alive = frozenset(replica.pid for replica in replicas if replica.pid is not None)
        for replica in replicas:
            if replica.pid is None:
                continue
            with self._lock:
                ended = self._ended.pop(replica.replica_id, None)
            if ended is None and (self._seems_to_run(replica, replica.pid) or self._status_may_come(replica.pid)):
                continue
            kept = ended is not None and ended.kept
            with self._lock:
                if not kept and self._present.get(replica.pid) == replica.replica_id:
                    del self._present[replica.pid]
                    self._started_pids.pop(replica.pid, None)
                    self._looked_at.pop(replica.pid, None)
            why = ""
            if self._cgroups is not None and self._cgroups.ran_out_of_memory(replica.pid):
                limit = "" if self._memory_bytes is None else f" (limit: {self._memory_bytes / 2**30:.3g} GiB per slot)"
                why = f"it ran out of memory{limit}"
            gone.append(Exit(replica.replica_id, None if ended is None else ended.status, why))
            if not kept:
                _end_children(replica.pid)
                self._let_go(replica.pid)
        return gone

    def _seems_to_run(self, replica: ReplicaRecord, pid: int) -> bool:
        """Look at a process, now and then if it was started here: its end is told of."""
        now = time.monotonic()
        if pid in self._started_pids and now - self._looked_at.get(pid, float("-inf")) < LOOK_SECONDS:
            return True
        if not _is_running(replica):
            return False
        self._looked_at[pid] = now
        return True

    def _status_may_come(self, pid: int) -> bool:
        """Tell whether the exit status of a child of ours is a moment away: a busy fork server collects it late."""
        if pid not in self._started_pids:
            return False
        since = self._started_pids[pid]
        if since is None:
            since = self._started_pids[pid] = time.monotonic()
        return time.monotonic() - since < STATUS_SECONDS

    def cpu_seconds(self, replica: ReplicaRecord) -> float | None:
        try:
            times = psutil.Process(replica.pid).cpu_times()
        except psutil.Error:
            return None
        return float(times.user + times.system)

    def stop(self, replica: ReplicaRecord, *, force: bool) -> None:
        if replica.pid is None or not _is_running(replica):
            return
        with self._lock:
            present = self._present.get(replica.pid, replica.replica_id)
            if replica.replica_id in self._ended or present != replica.replica_id:
                # Its process is kept, or another replica by now.
                return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if force:
                if self._cgroups is not None:
                    self._cgroups.end(replica.pid)
                try:
                    # The replica leads a session of its own: its data loader workers go with it.
                    os.killpg(replica.pid, signal.SIGKILL)
                except ProcessLookupError:
                    # It has just been forked and leads none yet.
                    os.kill(replica.pid, signal.SIGKILL)
            else:
                os.kill(replica.pid, signal.SIGTERM)

    def close(self) -> None:
        self._closed = True
        self._starts.close()
        if self.servers is not None:
            self.servers.close()


def _end_children(pid: int) -> None:
    """End what a lost replica has left behind in the session it led, such as data loader workers."""
    for other in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(other) == pid:
                psutil.Process(other).kill()


def _is_running(replica: ReplicaRecord) -> bool:
    assert replica.pid is not None
    try:
        process = psutil.Process(replica.pid)
        if replica.process_started and abs(process.create_time() - replica.process_started) > 1.0:
            return False
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


WAIT_SECONDS = 0.25
"""Seconds to wait for a start's result; forks take a few milliseconds."""
PATIENCE_SECONDS = 2.0
"""Others wait behind one that takes long for this time, and then go past it: a machine that is busy is only slow."""


class PendingStarts:
    """Starts of replicas that take longer than their caller waits.

    ``start`` runs in a thread; ``on_change``: called from there when one that was not waited for has ended.
    """

    def __init__(self, start: Callable[[LaunchRequest], ReplicaProcess], on_change: Callable[[], None]) -> None:
        self._start = start
        self._on_change = on_change
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replica-start")
        self._pending: dict[str, tuple[float, Future[ReplicaProcess]]] = {}

    @property
    def are_slow(self) -> bool:
        """Tell whether a start takes so long that others had better wait a moment for their turn."""
        return bool(self._pending) and not self.hang

    @property
    def hang(self) -> bool:
        now = time.monotonic()
        return any(now - since > PATIENCE_SECONDS for since, _ in self._pending.values())

    def begin(self, request: LaunchRequest) -> ReplicaProcess | None:
        """Return the process, or None while it is not known yet. Raises LaunchFailed."""
        start = self._thread.submit(self._start, request)
        try:
            return start.result(WAIT_SECONDS)
        except StillRunning:
            self._pending[request.replica_id] = time.monotonic(), start
            start.add_done_callback(lambda _: self._on_change())
            return None

    def ended(self, replica_id: str) -> ReplicaProcess | None:
        """Return the process of one that `begin` did not know, once it is there.

        Raises LaunchFailed where it cannot be.
        """
        pending = self._pending.get(replica_id)
        if pending is None:
            raise LaunchFailed(f"replica {replica_id} is not being started")
        start = pending[1]
        if not start.done():
            return None
        del self._pending[replica_id]
        return start.result()

    def close(self) -> None:
        """Start nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
