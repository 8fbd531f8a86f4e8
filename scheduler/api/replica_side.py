"""Routes for replicas. Each checks the replica's token against its trial, writes a fact and wakes the loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field

from dist_core.goodput import Hints
from dist_core.link.client import LARGEST_STEP
from scheduler.api.hot_routes import HotRoute, HotRoutes
from scheduler.api.service import Service
from scheduler.api.tokens import Access, Identity
from scheduler.knowledge.measured import measurement
from trials.plan import replica_number
from trials.record import Measurement, Outcome, Reason, ReplicaRecord, ReplicaState, Report, TrialRecord
from trials.store.base import HistoryEntry

T = TypeVar("T")

LONGEST_WAIT_SECONDS = 30.0
ANSWER_SECONDS = 2.0
"""A replica that waits for its driver looks up this often, to see whether it should leave instead."""
MOST_KEYS = 4096
LONGEST_VALUE = 65536
CROWD = 256
"""Generations whose keys are kept before those of finished trials are looked for."""
MOST_BESIDE, LONGEST_BESIDE = 256, 1024
"""Keys that are sent along with the one that was asked for, and the longest of their values."""
MOST_REPORTS = 1000

logger = logging.getLogger(__name__)


class Watch(BaseModel):
    after: int = 0
    """Generation that the replica knows."""
    wait: float = 15.0
    known_lost: str = ""
    """Names of those that it has heard are lost, as they were told."""
    saves: str = ""
    """Mark of the last request to save that it has heard."""
    told: bool = True
    """False where it does not know yet whether it is to leave."""


class Aim(BaseModel):
    attempt: int = 0


class Meeting(BaseModel):
    key: str
    generation: int = 0
    whole: str = ""
    wait: float = 10.0


class Ready(BaseModel):
    join_epoch: int | None = Field(default=None, ge=0, le=LARGEST_STEP)
    seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Seconds from a joiner's question for an epoch until now."""
    attempt: int = Field(default=0, ge=0, le=LARGEST_STEP)
    """Times that it has asked."""


class Number(BaseModel):
    generation: int = Field(ge=0, le=LARGEST_STEP)


class HintsBody(BaseModel):
    generation: int = Field(ge=0, le=LARGEST_STEP)
    hints: dict[str, Any]


class ReportBody(BaseModel):
    step: int = Field(ge=-LARGEST_STEP, le=LARGEST_STEP)
    value: float | None
    progress: float = Field(ge=0, allow_inf_nan=False)


class ReportsBody(BaseModel):
    reports: list[ReportBody] = Field(max_length=MOST_REPORTS)


class OutcomeBody(BaseModel):
    kind: str = Field(pattern="^(value|pruned|error)$")
    value: Any = None
    error_type: str | None = Field(default=None, max_length=500)
    message: str = Field(default="", max_length=20_000)
    traceback: str = Field(default="", max_length=100_000)
    of_command: bool = False
    """True for a process that the replica has started, which may have ended because its replica leaves."""


class WarningBody(BaseModel):
    message: str = Field(max_length=4000)


class RendezvousBody(BaseModel):
    generation: int = Field(default=0, ge=0, le=LARGEST_STEP)
    whole: str = Field(default="", max_length=256)
    """A replica of several processes, whose own addresses these are; empty: those of a generation."""
    key: str = Field(max_length=512)
    value: str = Field(max_length=LONGEST_VALUE)


class Question(BaseModel):
    id: str = Field(max_length=128)
    method: str = Field(max_length=64)
    arguments: dict[str, Any] = Field(default_factory=dict)
    reports: list[ReportBody] = Field(default_factory=list, max_length=MOST_REPORTS)
    """Noted here in passing; the driver has them among the arguments."""


def replica_routes(service: Service) -> list[HotRoute]:
    store = service.store

    def calling_replica(request: Request) -> ReplicaRecord:
        """Return the calling replica; refuses one whose token is not its own, or that is not ours any more."""
        identity: Identity = request.state.identity
        name = request.headers.get("x-elastune-replica", "")
        if identity != Identity(Access.REPLICA, name):
            raise HTTPException(403, f"this token does not belong to replica {name!r:.200}")
        for replica in store.replicas(trial_id=name.rpartition("-")[0]):
            if replica.replica_id == name:
                service.loop.liveness.note(replica.replica_id)
                return replica
        raise HTTPException(410, f"replica {name!r} is no longer needed")

    hot = HotRoutes(calling_replica, "/replica")
    reports_left, warnings_left = Allowance(MOST_REPORTS_KEPT), Allowance(MOST_WARNINGS)

    def news_for(replica_id: str, trial_id: str, query: Watch) -> dict[str, Any] | None:
        """Return what this replica has to hear now, None when nothing; reads memory alone."""
        trial = store.trial(trial_id)
        replicas = store.replicas(trial_id=trial_id)
        replica = next((row for row in replicas if row.replica_id == replica_id), None)
        if replica is None or (trial.state.is_final and trial.outcome is None):
            raise HTTPException(410, f"trial {trial_id} is {trial.state.value}; this replica is no longer needed")
        if replica.stop_requested_at is not None and not query.told:
            return {"leave": True, "generation": None}
        wanted = service.loop.inheritance.asked.get(trial_id, "")
        if wanted and wanted != query.saves and replica_id in trial.members:
            return {"save": wanted, "generation": None}
        if replica.retry_join:
            attempt = service.joining.attempt_after(trial_id, replica_id)
            return {"retry_join": True, "attempt": attempt, "generation": None}
        present = {row.replica_id for row in replicas}
        coming = trial.published_members if trial.switching else ()
        lost = [name for name in dict.fromkeys((*trial.members, *coming)) if name not in present]
        if trial.published > query.after and trial.switching:
            member = replica_id in trial.members
            return {"generation": {**_generation(trial, replicas), "member": member}, "lost": lost}
        return None if ",".join(lost) == query.known_lost else {"generation": None, "lost": lost}

    async def until(trial_id: str, seconds: float, look: Callable[[], Awaitable[T | None]]) -> T | None:
        """Return what ``look`` finds, which is asked again whenever there is news of the trial; None if too late."""
        deadline = service.clock() + min(seconds, LONGEST_WAIT_SECONDS)
        while True:
            changed = service.news.of(trial_id)
            news = await look()
            left = deadline - service.clock()
            if news is not None or left <= 0:
                return news
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), left)

    @hot.get("/watch", Watch)
    async def watch(caller: ReplicaRecord, query: Watch) -> dict[str, Any]:
        """Long poll for the next generation, and for losses in this one and the next; it renews the replica's lease."""
        if caller.contact_at is None:
            await asyncio.to_thread(store.update_replica, caller.replica_id, contact_at=service.clock())

        async def look() -> dict[str, Any] | None:
            service.loop.liveness.note(caller.replica_id)
            news = news_for(caller.replica_id, caller.trial_id, query)
            if news is not None and "retry_join" in news:
                await asyncio.to_thread(store.update_replica, caller.replica_id, retry_join=False)
            return news

        return await until(caller.trial_id, query.wait, look) or {"generation": None}

    @hot.get("/trial")
    async def own_trial(caller: ReplicaRecord) -> dict[str, Any]:
        trial = store.trial(caller.trial_id)
        return {
            "number": trial.spec.number,
            "study": trial.spec.study,
            "payload": dict(trial.spec.payload),
            "generation": trial.published,
        }

    @hot.get("/position", Aim)
    def position(caller: ReplicaRecord, query: Aim) -> dict[str, Any]:
        """Return the epoch a joiner should aim at; None for a replica that starts (or restarts) its trial."""
        trial, epoch = store.trial(caller.trial_id), None
        if trial.members:
            document = store.hints([trial.trial_id]).get(trial.trial_id)
            hints = None if document is None else Hints.from_json(document)
            epoch = service.joining.aim(trial.trial_id, hints, service.clock())
        if trial.slots_per_replica > 1:
            whole = replica_of(caller)
            first = whole[0].replica_id
            epoch = service.joining.alike(trial.trial_id, (first, query.attempt), epoch)
            service.joining.note_asked(trial.trial_id, first, query.attempt)
            for row in whole:
                have_it_follow(row, first)
        return {"epoch": epoch}

    def replica_of(caller: ReplicaRecord) -> list[ReplicaRecord]:
        """Return the processes of the caller's replica, by the first of which it goes: numbers are used again."""
        size = store.trial(caller.trial_id).slots_per_replica
        number = replica_number(caller, size)
        rows = [row for row in store.replicas(trial_id=caller.trial_id) if replica_number(row, size) == number]
        return sorted(rows, key=lambda row: row.launch_index)

    def have_it_follow(row: ReplicaRecord, whole: str) -> None:
        """Have a process run its code again because another one of its replica does, and waits for it."""
        if row.state is ReplicaState.READY and service.joining.is_behind(row.trial_id, row.replica_id, whole):
            store.retry_join(row.replica_id, row.join_epoch)
            service.loop.wake()

    @hot.post("/ready", Ready)
    def ready(caller: ReplicaRecord, body: Ready) -> None:
        ready_at = caller.ready_at or service.clock()
        if body.seconds is not None:
            service.joining.note_ready(caller.trial_id, body.seconds)
        service.joining.note_stands(caller.trial_id, caller.replica_id, body.attempt)
        # Whatever it was told before is done with that.
        store.update_replica(
            caller.replica_id,
            state=ReplicaState.READY,
            join_epoch=body.join_epoch,
            ready_at=ready_at,
            retry_join=False,
        )
        if body.join_epoch is not None and store.trial(caller.trial_id).slots_per_replica > 1:
            whole = replica_of(caller)
            for row in whole:
                if row.replica_id == caller.replica_id:
                    have_it_follow(row, whole[0].replica_id)
        service.loop.wake()

    @hot.post("/switched", Number)
    def switched(caller: ReplicaRecord, body: Number) -> None:
        store.note_entered(caller.trial_id, body.generation)
        service.loop.observations.note_whole(caller.trial_id)
        service.loop.wake()

    @hot.post("/abandoned", Number)
    def abandoned(caller: ReplicaRecord, body: Number) -> None:
        store.note_abandoned(caller.trial_id, body.generation)
        service.loop.wake()

    @hot.post("/saved")
    def saved(caller: ReplicaRecord) -> None:
        """Note that a trial has written the checkpoint that was asked for: trials wait to begin with it."""
        service.loop.wake()

    @hot.post("/leaving")
    def leaving(caller: ReplicaRecord) -> None:
        """Note that somebody outside wants the replica gone: the others are to go on without it."""
        service.loop.observations.note_leaving(caller.replica_id)
        service.loop.wake()

    @hot.get("/package")
    def package(caller: ReplicaRecord) -> FileResponse:
        """Return the packed working folder of the caller's trial."""
        digest = store.trial(caller.trial_id).spec.package
        return _sent(digest, "packed working folder")

    @hot.get("/code/{digest}")
    def code(caller: ReplicaRecord, digest: str) -> FileResponse:
        """Return the pickled code of the caller's trial, or the data that goes with it."""
        if digest not in store.trial(caller.trial_id).spec.code:
            raise HTTPException(404, f"trial {caller.trial_id} has no code {digest:.64}")
        return _sent(digest, "pickled code")

    def _sent(digest: str, what: str) -> FileResponse:
        path = service.packages.find(digest)
        if path is None:
            raise HTTPException(
                503, f"the scheduler does not have the sweep's {what} (yet); the sweep's driver sends it"
            )
        return FileResponse(path, media_type="application/octet-stream")

    @hot.post("/broken", Number)
    def broken(caller: ReplicaRecord, body: Number) -> None:
        """Have the loop look at the processes now: a collective failed."""
        trial = store.trial(caller.trial_id)
        if caller.replica_id in trial.members and body.generation >= trial.generation:
            service.loop.observations.note_broken(caller.trial_id, service.clock())
        service.loop.wake()

    @hot.post("/hints", HintsBody)
    def hints(caller: ReplicaRecord, body: HintsBody) -> None:
        try:
            hints = Hints.from_json(body.hints)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise HTTPException(422, f"the hints are invalid: {error}") from error
        # What was understood, and nothing that came with it.
        document = hints.to_json()
        before = store.hints([caller.trial_id]).get(caller.trial_id, {})
        if hints.layouts and hints.bounds is None and before:
            # Before it trains it knows of its layouts alone; what it had measured with another one stays.
            document = {**before, **{name: document[name] for name in ("layout", "layouts", "slot_memory_bytes")}}
        store.put_hints(caller.trial_id, document, measured(caller.trial_id, hints))
        other_layouts = hints.layouts and before.get("layouts") != document["layouts"]
        if other_layouts or (hints.observations and not before.get("observations")):
            # What it can train with may leave nothing of what it has; how fast it is was believed, and is known now.
            service.loop.decisions.decide_anew()
            service.loop.wake()
        service.joining.note_hints(caller.trial_id, service.clock())

    def measured(trial_id: str, hints: Hints) -> Measurement | None:
        """Return the measurement to keep of these hints, None when it is too early for another one."""
        trial, now = store.trial(trial_id), service.clock()
        if hints.bounds is None or not service.measuring.take(trial_id, now, len(trial.members)):
            return None
        return measurement(trial, hints, service.loop.observer.latest_views.get(trial_id), now)

    @hot.post("/reports", ReportsBody)
    def reports(caller: ReplicaRecord, body: ReportsBody) -> None:
        note(caller, body.reports)

    def note(caller: ReplicaRecord, reports: Sequence[ReportBody]) -> None:
        for each in reports:
            left = reports_left.take(caller.trial_id)
            if left < 0:
                return
            if left == 0:
                note_warning(caller, f"this trial has reported {reports_left.most} times; further reports are dropped")
            value = each.value if each.value is None or math.isfinite(each.value) else None
            noted = Report(caller.trial_id, each.step, value, each.progress, service.clock())
            if store.add_report(noted):
                service.page.note_report(noted)

    @hot.post("/warning", WarningBody)
    def warning(caller: ReplicaRecord, body: WarningBody) -> None:
        left = warnings_left.take(caller.trial_id)
        if left >= 0:
            note_warning(
                caller, body.message if left else "this trial has given too many warnings; further ones are dropped"
            )

    def note_warning(caller: ReplicaRecord, sentence: str) -> None:
        reason = Reason(code="warning", sentence=sentence)
        store.add_history(
            HistoryEntry(
                at=service.clock(), trial_id=caller.trial_id, what="warning", reason=reason, who=caller.replica_id
            )
        )

    @hot.post("/outcome", OutcomeBody)
    def outcome(caller: ReplicaRecord, body: OutcomeBody) -> None:
        """Note how the trial ended, or a single process of a command that leaves a trial or has yet to join."""
        trial = store.trial(caller.trial_id)
        stay = trial.published_members if trial.switching else trial.members
        if body.of_command and trial.members and caller.replica_id not in stay:
            logger.info(
                "outcome ignored, the replica is not a member trial=%s replica=%s", caller.trial_id, caller.replica_id
            )
            return
        store.set_outcome(caller.trial_id, Outcome(**body.model_dump(exclude={"of_command"})))
        service.measuring.forget(caller.trial_id)
        service.loop.wake()

    def forget_old_keys(caller: str) -> int:
        """Forget keys that nobody can ask for any more; return the number of the caller's latest generation."""
        published = store.trial(caller).published
        crowded = len(service.rendezvous) > CROWD
        live = {trial.trial_id for trial in store.trials(live_only=True)} if crowded else set()
        for trial_id, meeting in list(service.rendezvous):
            is_old = trial_id == caller and (
                meeting < published - 1 if isinstance(meeting, int) else not lives(meeting, trial_id)
            )
            if is_old or (crowded and trial_id not in live):
                service.rendezvous.pop((trial_id, meeting), None)
        return published

    def lives(replica_id: str, trial_id: str) -> bool:
        return any(row.replica_id == replica_id for row in store.replicas(trial_id=trial_id))

    @hot.put("/rendezvous", RendezvousBody)
    async def rendezvous_put(caller: ReplicaRecord, body: RendezvousBody) -> None:
        published = await asyncio.to_thread(forget_old_keys, caller.trial_id)
        meeting = body.whole or body.generation
        if not body.whole and not published - 1 <= body.generation <= published:
            raise HTTPException(422, f"generation {body.generation} is not being formed; the latest is {published}")
        if body.whole and not await asyncio.to_thread(lives, body.whole, caller.trial_id):
            raise HTTPException(422, f"{body.whole!r} is not a replica of this trial")
        keys = service.rendezvous.setdefault((caller.trial_id, meeting), {})
        if len(keys) >= MOST_KEYS:
            raise HTTPException(422, f"the rendezvous {meeting} already has {MOST_KEYS} keys, the most that are kept")
        keys[body.key] = body.value
        service.news.tell([caller.trial_id])

    @hot.get("/rendezvous", Meeting)
    async def rendezvous_get(caller: ReplicaRecord, query: Meeting) -> dict[str, Any]:
        """Return the key's value, and those of its group that are there as well: the caller asks for all of them."""

        def keys() -> Mapping[str, str]:
            return service.rendezvous.get((caller.trial_id, query.whole or query.generation), {})

        async def look() -> str | None:
            return keys().get(query.key)

        value = await until(caller.trial_id, query.wait, look)
        return {"value": value, "beside": {} if value is None else _keys_beside(query.key, keys())}

    @hot.post("/call", Question)
    async def call(caller: ReplicaRecord, body: Question) -> dict[str, Any]:
        """Ask the driver; ``answer`` is None while there is none, then ask again with the same id."""
        trial = store.trial(caller.trial_id)
        if trial.state.is_final:
            raise HTTPException(410, f"trial {caller.trial_id} is {trial.state.value}; its driver no longer answers")
        if body.reports:
            await asyncio.to_thread(note, caller, body.reports)
        # Replicas choose their ids; another trial's question is another one, whatever it is called.
        question_id = f"{caller.trial_id}:{body.id}"
        document = {**body.model_dump(exclude={"reports"}), "id": question_id, "trial_id": caller.trial_id}
        answer = await service.mailbox.ask(trial.spec.study, document, ANSWER_SECONDS)
        return {"answer": answer}

    return hot.routes


def _keys_beside(key: str, keys: Mapping[str, str]) -> dict[str, str]:
    """Return the short ones among the keys of the same group, `group/rank`, and their values."""
    group = key.rpartition("/")[0]
    of_group = (
        (name, value)
        for name, value in keys.items()
        if name.rpartition("/")[0] == group and len(value) <= LONGEST_BESIDE
    )
    return dict(islice(of_group, MOST_BESIDE))


def _generation(trial: TrialRecord, replicas: list[ReplicaRecord]) -> dict[str, Any]:
    nodes = {replica.replica_id: replica.node for replica in replicas}
    return {
        "number": trial.published,
        "members": list(trial.published_members),
        "nodes": [nodes.get(replica_id, "") for replica_id in trial.published_members],
        "join_epoch": trial.join_epoch,
    }


MOST_REPORTS_KEPT = 100_000
MOST_WARNINGS = 200
MOST_TRIALS = 8192
"""The trial that was heard of longest ago is forgotten for a further one, and may then leave as many again."""


class Allowance:
    """Counts by trial, each up to a limit. Callable from any thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._taken: OrderedDict[str, int] = OrderedDict()

    def take(self, trial_id: str) -> int:
        """Return how many are left after this one; negative when it is one too many."""
        with self._lock:
            taken = self._taken.get(trial_id, 0) + 1
            self._taken[trial_id] = taken
            self._taken.move_to_end(trial_id)
            if len(self._taken) > MOST_TRIALS:
                self._taken.popitem(last=False)
            return self.most - taken
