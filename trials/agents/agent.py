"""The agent of a node: has its replicas started, watched and ended there as a scheduler on the same machine would.

It is level-triggered like the scheduler: with every message it says all that it knows, and is told all that it is to
do. When its scheduler is away it goes on as long as a replica lives, and ends when nobody has called for a while.

Concurrency: one thread looks after replicas; one asks for orders and waits for them; one tells news at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trials.agents.line import AgentLine, Refused
from trials.agents.node_files import NodeFiles
from trials.agents.shipping import CheckpointShipping, LogShipping
from trials.agents.words import AgentReplica, AgentSlot, News, Orders, Phase
from trials.errors import LaunchFailed
from trials.launch.base import LaunchRequest
from trials.launch.local import LocalLauncher
from trials.record import ReplicaRecord

LOOK_SECONDS = 0.25
"""Between two looks at replicas, where nothing wakes it."""
ALONE_SECONDS = 60.0
"""An agent without replicas whose scheduler has not answered for so long ends."""
FORSAKEN_SECONDS = 300.0
"""Seconds of silence after which an agent with replicas ends too: their leases have run out long ago."""
RETRY_SECONDS = 0.25
JOB_ENDS = "job_ends"
"""Code of the end of a replica that left with its agent."""
LEAVE_SECONDS = 120.0
"""Longest that replicas get to save, where nobody ends the agent before."""

logger = logging.getLogger(__name__)


class Agent:
    """Starts, watches and ends the replicas of one node.

    ``node``: what the launcher calls this machine. ``environ``: what replicas find here, unless they bring it.

    ``address``: where replicas of other nodes reach those of this one. ``files``: where the node shares none with the
    scheduler.
    """

    def __init__(
        self,
        launcher: LocalLauncher,
        line: AgentLine,
        news: News,
        *,
        node: str,
        address: str,
        environ: Mapping[str, str],
        leave_seconds: float = LEAVE_SECONDS,
        files: NodeFiles | None = None,
    ) -> None:
        self._launcher = launcher
        self._line = line
        self._news = news
        self._node = node
        self._address = address
        self._environ = environ
        self._leave_seconds = leave_seconds
        self._replicas: dict[str, AgentReplica] = {}
        self._waiting: dict[str, LaunchRequest] = {}
        """Told to start, and not begun."""
        self._begun: set[str] = set()
        """Every replica that it was ever told to start: a late message starts none twice."""
        self._stops: dict[str, bool] = {}
        """Replicas that are to end, and whether by force."""
        self._stopping: dict[str, bool] = {}
        """Replicas that were told to stop, and how."""
        self._orders: Orders | None = None
        self._roster, self._heard = "", 0
        """Roster and number of the latest orders."""
        self._leaves = ""
        self._leaving_since: float | None = None
        self._state_changed = threading.Event()
        self._over = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        launcher.on_change = self._wake.set
        self._files = files
        self._logs = None if files is None else LogShipping(files.log, line.send_log, self._wake.set)
        self._saved = None
        if files is not None:
            self._saved = CheckpointShipping(files.checkpoints, line.send_checkpoint, self._wake.set)
            files.on_fetched = self._saved.note_fetched
        self._trials: dict[str, str] = {}
        """Trials of the replicas that it has begun."""
        self._ended: dict[str, AgentReplica] = {}
        """Replicas whose end is told when all that they have printed and saved has arrived."""

    # ------------------------------------------------------------------ running

    def run(self) -> None:
        """Run until the agent is not wanted any more, or has to leave."""
        threads = [
            threading.Thread(target=self._listen, name="orders", daemon=True),
            threading.Thread(target=self._tell, name="news", daemon=True),
        ]
        for thread in threads:
            thread.start()
        while not self._over.is_set():
            self._wake.wait(LOOK_SECONDS)
            self._wake.clear()
            if self._look():
                break
        self._over.set()
        # What it has said last had better arrive: else the scheduler waits for a process that is gone.
        self._say(wait=False)
        self._launcher.close()
        if self._logs is not None:
            self._logs.close()
        if self._saved is not None:
            self._saved.close()
        if self._files is not None:
            self._files.remove()

    def leave(self, why: str) -> None:
        """Have the replicas save and leave, and end then. Callable from a signal handler: the next look finds it."""
        self._leaves = self._leaves or why

    def _look(self) -> bool:
        """Look after everything once; whether this is the end."""
        with self._lock:
            orders, self._orders = self._orders, None
        numbers = self._news.numbers
        if orders is not None:
            self._take(orders)
        self._start_waiting()
        self._note_started()
        for replica_id, force in self._stops.items():
            self._stop(replica_id, force=force)
        self._note_exits()
        if self._is_forsaken():
            self._leaves = self._leaves or "its scheduler does not answer"
        done = bool(self._leaves) and self._leave()
        in_use = next((node.in_use for node in self._launcher.nodes()), frozenset())
        said = self._news.replicas, self._news.leaves, self._news.in_use, numbers
        if said != (self._replicas, self._leaves, in_use, self._news.numbers):
            self._set_news(in_use)
        return done

    def _is_forsaken(self) -> bool:
        return self._line.lost_for > (FORSAKEN_SECONDS if self._alive() else ALONE_SECONDS)

    def _leave(self) -> bool:
        """Have everything end; whether it has."""
        if self._leaving_since is None:
            self._leaving_since = time.monotonic()
            logger.info("the agent ends: %s", self._leaves)
        for replica_id in self._waiting:
            self._replicas[replica_id] = AgentReplica(phase=Phase.REFUSED, why=self._leaves)
        self._waiting.clear()
        alive = self._alive()
        for replica_id in alive:
            self._stop(replica_id, force=self._is_late())
        return not alive

    def _is_late(self) -> bool:
        """Tell whether it has been leaving for as long as it may."""
        since = self._leaving_since
        return since is not None and time.monotonic() - since > self._leave_seconds

    def _alive(self) -> list[str]:
        return [name for name, each in self._replicas.items() if not each.is_over]

    # ------------------------------------------------------------------ orders

    def _take(self, orders: Orders) -> None:
        for replica_id in orders.noted:
            self._replicas.pop(replica_id, None)
            self._stopping.pop(replica_id, None)
            self._trials.pop(replica_id, None)
            if self._logs is not None:
                self._logs.forget(replica_id)
            if self._saved is not None:
                self._saved.forget(replica_id)
        if orders.numbers and orders.numbers != self._news.numbers:
            self._news = replace(self._news, numbers=orders.numbers)
        for document in orders.launch:
            request = self._request(document)
            if request.replica_id not in self._begun:
                self._begun.add(request.replica_id)
                self._replicas[request.replica_id] = AgentReplica(phase=Phase.STARTING)
                self._waiting[request.replica_id] = request
        self._stops = dict(orders.stop)
        self._leaves = self._leaves or orders.end

    def _request(self, document: Mapping[str, Any]) -> LaunchRequest:
        environ = {**self._environ, **document["environ"], "ELASTUNE_HOST": self._address}
        return LaunchRequest(
            **{
                **document,
                "environ": environ,
                "log": Path(document["log"]),
                "python_path": tuple(document["python_path"]),
                "preload": tuple(document["preload"]),
                "code": tuple(document["code"]),
            }
        )

    def _stop(self, replica_id: str, *, force: bool) -> None:
        state = self._replicas.get(replica_id)
        if state is None or state.is_over:
            return
        if replica_id in self._waiting:
            del self._waiting[replica_id]
            self._replicas[replica_id] = AgentReplica(phase=Phase.REFUSED, why="it was stopped before it had started")
            return
        if self._stopping.get(replica_id, False) or (replica_id in self._stopping and not force):
            return
        if state.pid is None:
            # At a later look, when its process is known.
            return
        self._stopping[replica_id] = force
        self._launcher.stop(self._row(replica_id, state), force=force)

    # ------------------------------------------------------------------ replicas

    def _start_waiting(self) -> None:
        for replica_id, request in list(self._waiting.items()):
            try:
                placed = request if self._files is None else self._files.place(request)
                if placed is None or not self._launcher.is_ready_for(placed):
                    continue
                del self._waiting[replica_id]
                self._trials[replica_id] = request.trial_id
                if self._logs is not None:
                    self._logs.begin(replica_id)
                process = self._launcher.launch(placed)
            except LaunchFailed as error:
                self._waiting.pop(replica_id, None)
                self._replicas[replica_id] = AgentReplica(phase=Phase.REFUSED, why=str(error))
                continue
            if process is not None:
                self._replicas[replica_id] = AgentReplica(
                    phase=Phase.RUNNING, pid=process.pid, process_started=process.started
                )

    def _note_started(self) -> None:
        for replica_id, state in list(self._replicas.items()):
            if state.phase is not Phase.STARTING or replica_id in self._waiting:
                continue
            try:
                process = self._launcher.started(replica_id)
            except LaunchFailed as error:
                self._replicas[replica_id] = AgentReplica(phase=Phase.REFUSED, why=str(error))
                continue
            if process is not None:
                self._replicas[replica_id] = replace(
                    state, phase=Phase.RUNNING, pid=process.pid, process_started=process.started
                )

    def _note_exits(self) -> None:
        running = [
            self._row(name, each)
            for name, each in self._replicas.items()
            if each.phase is Phase.RUNNING and name not in self._ended
        ]
        for gone in self._launcher.exits(running):
            # One that was told to leave with its job says so; else people would look for a fault of its own.
            why, code = (gone.why, gone.code) if gone.why or not self._leaves else (self._leaves, JOB_ENDS)
            self._ended[gone.replica_id] = replace(
                self._replicas[gone.replica_id], phase=Phase.ENDED, status=gone.status, why=why, code=code
            )
        # Whoever leaves does not wait for ever for a scheduler that is gone.
        nobody_hears = self._is_late() or (bool(self._leaves) and self._line.lost_for > ALONE_SECONDS)
        for name in [name for name in self._ended if self._has_arrived(name) or nobody_hears]:
            self._replicas[name] = self._ended.pop(name)

    def _has_arrived(self, replica_id: str) -> bool:
        """Tell whether a replica's log and checkpoints have arrived; both are asked, so that both are sent."""
        logs = self._logs is None or self._logs.has_whole(replica_id)
        saved = self._saved is None or self._saved.has_arrived(replica_id, self._trials.get(replica_id, ""))
        return logs and saved

    def _row(self, replica_id: str, state: AgentReplica) -> ReplicaRecord:
        return ReplicaRecord(
            replica_id=replica_id,
            trial_id="",
            node=self._node,
            slot=0,
            launch_index=0,
            pid=state.pid,
            process_started=state.process_started,
        )

    # ------------------------------------------------------------------ news

    def _set_news(self, in_use: frozenset[int]) -> None:
        with self._lock:
            self._news = replace(
                self._news,
                version=self._news.version + 1,
                replicas=dict(self._replicas),
                in_use=in_use,
                leaves=self._leaves,
            )
        self._state_changed.set()

    def _listen(self) -> None:
        """Ask for orders, again and again."""
        while not self._over.is_set():
            if not self._say(wait=True):
                self._over.wait(RETRY_SECONDS)

    def _tell(self) -> None:
        """Send changes at once, in a thread; what is lost is sent with the next poll."""
        while not self._over.is_set():
            self._state_changed.wait()
            self._state_changed.clear()
            self._say(wait=False)

    def _cpu_seconds(self, news: News) -> dict[str, float]:
        rows = [self._row(name, each) for name, each in news.replicas.items() if each.phase is Phase.RUNNING]
        used = {row.replica_id: self._launcher.cpu_seconds(row) for row in rows}
        return {name: seconds for name, seconds in used.items() if seconds is not None}

    def _say(self, *, wait: bool) -> bool:
        with self._lock:
            news, heard = self._news, self._heard
        try:
            orders = self._line.say(replace(news, cpu_seconds=self._cpu_seconds(news)), heard, wait=wait)
        except Refused as error:
            self.leave(f"the scheduler at {self._line.url} refuses it: {error}")
            self._over.wait(RETRY_SECONDS)
            return False
        if orders is None:
            return False
        with self._lock:
            # Two questions may be under way: what was answered first does not replace what was answered later.
            is_late = orders.roster == self._roster and orders.version < self._heard
            if not is_late:
                self._orders, self._heard, self._roster = orders, orders.version, orders.roster
        self._wake.set()
        return True


def agent_slots(launcher: LocalLauncher) -> tuple[AgentSlot, ...]:
    """Return the slots of the launcher's only node."""
    (node,) = launcher.nodes()
    return tuple(
        AgentSlot(kind=node.kind, environ=launcher.slot_environ(node.node, slot)) for slot in range(node.slots)
    )
