"""Membership: watches for the next generation and prepares it beside the running one.

Concurrency: a watcher thread long-polls the scheduler; each answer that carries a new generation starts a short-lived
builder thread that connects its process group while training goes on. The training thread alone switches: it asks
``pending()`` once a step and calls ``commit`` or ``abandon`` at a step boundary. Fields shared between the threads are
guarded by one lock and change by assignment only.

The watcher also keeps the lease: when the scheduler has not answered for the lease time, or says so, the replica is
asked to save and leave; a replica that does not get there in time is ended.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dist_core.errors import EXIT_PREEMPTED, ControlChannelError
from dist_core.generations.decision import PublishedGeneration
from dist_core.link.client import ControlChannel
from dist_core.link.environment import WATCH_THREAD, ReplicaEnvironment

if TYPE_CHECKING:
    # They import torch, which a replica that does not train does without.
    from dist_core.generations.group_needs import GroupNeeds
    from dist_core.generations.process_groups import AddressStore, ReplicaGroup

logger = logging.getLogger(__name__)

WATCH_SECONDS = 15.0
BUILD_TIMEOUT = timedelta(seconds=60)
"""Time for the members of a generation to find each other."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Replicas may be that far apart, while one evaluates, before a collective between them fails."""
LEASE_SECONDS = 30.0
GRACE_MARGIN_SECONDS = 5.0
"""A replica that cannot leave says so, and ends itself that much before it is ended without a word."""
TELL_SECONDS = 10.0
"""A replica that must leave tries so long to tell the scheduler, which may be busy; else its whole trial restarts."""
HAND_OVER_SECONDS = 20.0
"""Seconds that a replica told to end waits for the others to go on without it."""
LONGEST_SAVE_SECONDS = 300.0
ANY_ATTEMPT = 2**62
"""The next one, whichever that is: a scheduler that has just started does not know."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A generation this replica is ready to enter, or to leave at (``group`` is None)."""

    generation: PublishedGeneration
    group: ReplicaGroup | None
    as_joiner: bool = False
    """The scheduler offers it to this replica as to one that does not train yet."""


class Membership:
    def __init__(
        self, channel: ControlChannel, environment: ReplicaEnvironment, *, end: Callable[[int], None] = os._exit
    ) -> None:
        self._channel = channel
        self._environment = environment
        self._end = end
        self.group_needs: Callable[[], GroupNeeds] | None = None
        """Asked when a generation is prepared; the same on all its members, since they run the same code."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._published: PublishedGeneration | None = None
        self._prepared: Prepared | None = None
        self._superseded: list[ReplicaGroup] = []
        """Process groups built for offers that a newer offer replaced, since this replica entered one."""
        self._store: AddressStore | None = None
        self._entered = 0
        self._size = 0
        """Size of the generation that this replica has entered, or is about to enter."""
        self._is_member = False
        self._leave: str | None = None
        self._told_at: float | None = None
        self.on_grace_over: Callable[[str], None] = logger.warning
        """Told what is lost when this replica has to end without having come to a place where it may leave."""
        self.on_loss: Callable[[Sequence[str]], None] = lambda lost: None
        """Told which members of the generation that trains are gone, from the thread that hears the news."""
        self._lost: tuple[str, ...] = ()
        self._retry_join: int | None = None
        """The attempt that the scheduler wants this joiner to make next, if any."""
        self.save_request = ""
        """Mark of the scheduler's latest request to save now; set by the thread that watches."""
        self.saving = False
        """Set by the training thread while it writes the checkpoint it leaves with."""
        self._stopped = threading.Event()
        self._begun = threading.Event()
        self._begins_after = 0.0
        self._thread = threading.Thread(target=self._watch, name=WATCH_THREAD, daemon=True)
        self.earlier_attempts = environment.attempts or 0
        """Times that earlier processes of this replica came too late to join."""

    def start(self, *, after: float = 0.0) -> None:
        """Begin to watch, ``after`` so many seconds unless `hurry` or `stop` come before."""
        self._begins_after = after
        self._thread.start()

    def hurry(self) -> None:
        """Start polling the scheduler now, without the initial delay."""
        self._begun.set()

    def stop(self) -> None:
        self._stopped.set()
        self._begun.set()

    @property
    def must_leave(self) -> str | None:
        """Return ``preempted`` or ``paused`` once this replica has been asked to save and leave."""
        with self._lock:
            return self._leave

    def ask_to_leave(self, reason: str) -> None:
        """Ask from a signal handler or the lease to leave at the next step boundary, or after the grace period."""
        if self._leave is None:
            self._leave = reason
            threading.Thread(target=self._end_after_grace, name="elastune-grace", daemon=True).start()

    def told_to_end(self) -> None:
        """Leave because the machine is wanted back: on SIGTERM, or by the scheduler's order.

        The others of its generation need not stop for that: the scheduler is told, and offers a generation without
        this replica. Alone, or when no such offer comes in time, it saves and leaves by itself.
        """
        if self._told_at is not None:
            return
        self._told_at = time.monotonic()
        threading.Thread(target=self._leave_others, name="elastune-leaving", daemon=True).start()

    def _leave_others(self) -> None:
        with self._lock:
            # A joiner that was not let in yet holds up nobody. One that is being let in is one of several already.
            is_alone = self._size <= 1
            if is_alone:
                self.ask_to_leave("preempted")
        if not is_alone:
            try:
                self._channel.request("POST", "/leaving", give_up_after=TELL_SECONDS)
                self._stopped.wait(HAND_OVER_SECONDS)
            except ControlChannelError as error:
                logger.warning("could not tell the scheduler that this replica is leaving: %s", error)
        if not is_alone and not self._stopped.is_set():
            self.ask_to_leave("preempted")

    def pending(self) -> Prepared | None:
        with self._lock:
            return self._prepared

    def wait_for_first(self, *, attempt: int = 0, poll_seconds: float = 0.5) -> Prepared | None:
        """Block a joiner until it can enter a generation; None when it has to run its code again for a later epoch.

        ``attempt``: the one that it is in. What it was told of an earlier one it has done by itself, for all processes
        of its replica have to run their code equally often.
        """
        with self._changed:
            while True:
                told, self._retry_join = self._retry_join, None
                if told is not None and told > attempt:
                    self._discard()
                    return None
                prepared = self._prepared
                if self._leave is not None:
                    # Not by way of entering: all that train would save and end with it.
                    if prepared is not None and prepared.group is not None:
                        prepared.group.break_off()
                    self._discard()
                    return Prepared(PublishedGeneration(number=0, members=(), nodes=(), join_epoch=None), None)
                if prepared is not None:
                    self._size = len(prepared.generation.members)
                    return prepared
                self._changed.wait(poll_seconds)

    def commit(self, prepared: Prepared) -> None:
        """Note that the training thread has entered this generation."""
        with self._lock:
            self._is_member = True
            self._entered = prepared.generation.number
            self._size = len(prepared.generation.members)
            superseded, self._superseded = self._superseded, []
            if self._prepared is prepared:
                self._prepared = None
        for group in superseded:
            group.leave_unused()

    def break_off_superseded(self) -> None:
        """Break off offers that this replica cannot come to any more: others may wait for it there."""
        with self._lock:
            superseded, self._superseded = self._superseded, []
        for group in superseded:
            group.break_off()

    def abandon(self, number: int) -> None:
        """Give this generation up and drop the group built for it; a later one stays."""
        with self._lock:
            if not self._is_member:
                self._size = 0
            self._entered = max(self._entered, number)
            if self._published is None or self._published.number <= number:
                self._discard()

    def _discard(self) -> None:
        if self._store is not None:
            self._store.cancel()
        self._prepared = None

    @property
    def is_watching(self) -> bool:
        return self._thread.is_alive()

    def _watch(self) -> None:
        try:
            self._begun.wait(self._begins_after)
            self._follow()
        finally:
            self._channel.let_go_if_closed()

    def _follow(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                after = max(self._entered, self._published.number if self._published else 0)
            try:
                answer = self._channel.request(
                    "GET",
                    "/watch",
                    params={
                        "after": after,
                        "wait": WATCH_SECONDS,
                        "known_lost": ",".join(self._lost),
                        "saves": self.save_request,
                        "told": self._told_at is not None,
                    },
                    give_up_after=1.0,
                )
            except ControlChannelError as error:
                if self._stopped.is_set():
                    return
                if error.status in (401, 403, 404, 409, 410):
                    self.ask_to_leave("preempted")
                    return
                if self._channel.lost_for > LEASE_SECONDS:
                    logger.warning("scheduler unreachable seconds=%.0f: saving and leaving", self._channel.lost_for)
                    self.ask_to_leave("preempted")
                    return
                time.sleep(0.2)
                continue
            try:
                self.handle(answer)
            except Exception:
                # The lease depends on this thread: whatever was wrong with one answer must not end it.
                logger.exception("could not process an answer of the scheduler")
                time.sleep(1.0)

    def handle(self, answer: dict[str, Any]) -> None:
        """Take up what the scheduler has answered."""
        if answer.get("leave"):
            # A signal says so as well, but is not heard while the training thread waits within a library.
            self.told_to_end()
        if answer.get("retry_join"):
            with self._changed:
                attempt = answer.get("attempt")
                self._retry_join = ANY_ATTEMPT if attempt is None else int(attempt)
                self._changed.notify_all()
        if "save" in answer:
            self.save_request = str(answer["save"])
        if "lost" in answer:
            self._lost = tuple(answer["lost"])
            if self._lost:
                self.on_loss(self._lost)
        document = answer.get("generation")
        if document is None:
            return
        generation = PublishedGeneration(
            number=document["number"],
            members=tuple(document["members"]),
            nodes=tuple(document["nodes"]),
            join_epoch=document["join_epoch"],
        )
        with self._changed:
            if generation.number <= max(self._entered, self._published.number if self._published else 0):
                return
            self._published = generation
            dropped = self._prepared
            if dropped is not None and dropped.group is not None:
                self._superseded.append(dropped.group)
            self._discard()
        joins = not document.get("member", True)
        if (
            dropped is not None
            and dropped.group is not None
            and (joins or _lost_a_joiner(dropped.generation, generation))
        ):
            # Others may wait in it for this joiner already, or this replica for a joiner that has left it alone.
            dropped.group.break_off()
        rank = generation.rank_of(self._environment.replica_id)
        if rank is None and joins and generation.members:
            # They go on without this joiner, which waits on: where it is not wanted any more, it is ended.
            return
        if rank is None:
            self._offer(Prepared(generation, None))
            if not generation.members:
                threading.Thread(target=self._end_after_grace, name="elastune-grace", daemon=True).start()
        elif len(generation.members) == 1:
            from dist_core.generations.process_groups import lone_group

            self._offer(Prepared(generation, lone_group(self._needs()), joins))
        else:
            threading.Thread(
                target=self._build, args=(generation, rank, joins), name="elastune-build", daemon=True
            ).start()

    def _needs(self) -> GroupNeeds:
        from dist_core.generations.group_needs import GroupNeeds

        return GroupNeeds() if self.group_needs is None else self.group_needs()

    def _build(self, generation: PublishedGeneration, rank: int, joins: bool) -> None:
        from dist_core.generations.process_groups import AddressStore, build_group

        store = AddressStore(self._channel, {"generation": generation.number}, BUILD_TIMEOUT)
        with self._lock:
            self._store = store
        try:
            group = build_group(
                store,
                name=f"g{generation.number}",
                rank=rank,
                nodes=generation.nodes,
                timeout=COLLECTIVE_TIMEOUT,
                host=self._environment.host,
                needs=self._needs(),
            )
        except Exception as error:
            # An attempt that fails costs nothing but the attempt: the scheduler sees no switch and publishes anew.
            logger.warning(
                "could not connect the replicas of a generation generation=%d error=%s", generation.number, error
            )
            return
        with self._lock:
            if self._store is store:
                # What comes next breaks this one off no more: NCCL asks it for addresses when the group is entered.
                self._store = None
        self._offer(Prepared(generation, group, joins))

    def _offer(self, prepared: Prepared) -> None:
        with self._changed:
            if self._published is prepared.generation:
                self._prepared = prepared
                self._changed.notify_all()

    def _end_after_grace(self) -> None:
        asked = self._told_at or time.monotonic()
        grace = max(0.0, self._environment.grace_seconds - GRACE_MARGIN_SECONDS)
        while time.monotonic() - asked < (LONGEST_SAVE_SECONDS if self.saving else grace):
            if self._stopped.wait(0.1):
                return
        self.on_grace_over(
            f"this replica was told to leave but did not reach a point where it can save within {grace:.0f} s: it "
            "ends now, and its work since the last checkpoint is lost. Shorten the training step, or the code "
            "between two epochs; on Kubernetes, you can also raise terminationGracePeriodSeconds in the pod "
            "template"
        )
        self._end(EXIT_PREEMPTED)


def _lost_a_joiner(offered: PublishedGeneration, instead: PublishedGeneration) -> bool:
    """Tell whether ``instead`` lacks a joiner that ``offered`` had."""
    return offered.join_epoch is not None and not set(offered.members) <= set(instead.members)
