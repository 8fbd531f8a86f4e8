"""Reshaping: how a trial's processes go on with another layout, from the state that some of them have in memory.

Those that train keep their parts at a step boundary, all alike, and the user's code runs again from its top with what
each of them is from there on; processes that are new come along. Each builds its part of the model anew and fetches
what belongs in there, until all train in one generation.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dist_core.errors import ControlChannelError, PeerLost, ReplicaExit
from dist_core.exit_statuses import EXIT_PREEMPTED
from dist_core.generations.present import PresentGeneration
from dist_core.generations.watch import Membership
from dist_core.generations.whole import Whole
from dist_core.link.client import ControlChannel
from dist_core.link.environment import ReplicaEnvironment
from dist_core.link.reshape import Reshape, number_of, stand_by
from dist_core.state.parts import merged
from dist_core.state.persistence import Persistence
from dist_core.state.remote_parts import RemoteParts, fetched
from dist_core.state.served_parts import ServedParts

MEET_SECONDS = 1800.0
"""For all processes to have what they need; each runs the user's code until then, and the scheduler knows best who is
waited for in vain."""
WRITE_SECONDS = 60.0
"""So long a process that leaves waits for the checkpoint that it writes."""
LOOK_SECONDS = 1.0
LEAVE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _Mine:
    """What this process holds for others."""

    number: int
    """Of the part."""
    parts: ServedParts
    readers: int


class Reshaping:
    """``environment``, ``channel`` and ``membership``: None for a process without a scheduler."""

    def __init__(
        self,
        environment: ReplicaEnvironment | None,
        channel: ControlChannel | None,
        membership: Membership | None,
        states: Persistence,
        present: PresentGeneration,
        whole: Whole,
    ) -> None:
        self._environment = environment
        self._channel = channel
        self._membership = membership
        self._states = states
        self._present = present
        self._whole = whole
        self._mine: _Mine | None = None
        self._others: dict[int, RemoteParts] = {}
        self._identity: ReplicaEnvironment | None = None
        """What this process is to be when its code runs again."""

    @property
    def is_under_way(self) -> bool:
        """Whether this process goes on, or is to go on, from what some have in memory."""
        return self._environment is not None and bool(self._environment.reshape)

    @property
    def is_possible(self) -> bool:
        """Whether the user's code runs again in this process; a command that is one of its own ends with it."""
        return self._environment is not None and self._environment.attempts is None

    # ------------------------------------------------------------------ those that have trained

    def holds_for(self, reshape: Reshape) -> bool:
        """Whether others go on from what this process has."""
        return self._environment is not None and self._environment.replica_id in reshape.holders

    def leave_groups(self) -> None:
        """Collective: of all that have trained, whether they go on or not."""
        self._present.group.leave()
        self._whole.leave()

    def hold(self, reshape: Reshape, keep: Callable[[], dict[str, Any]]) -> None:
        """Serve this process's part, where it is one of those that others go on from. ``keep``: copies it.

        Raises PeerLost where it cannot be reached for that.
        """
        assert self._environment is not None and self._channel is not None
        me = self._environment.replica_id
        if not self.holds_for(reshape):
            return
        number, readers = reshape.holders.index(me), len(set(reshape.processes) - {me})
        states = keep()
        try:
            parts = ServedParts(states, self._environment.host)
            self._mine = _Mine(number, parts, readers)
            words = json.dumps({"address": parts.address, "key": parts.key})
            self._channel.request("PUT", "/rendezvous", {"whole": reshape.name, "key": _key(number), "value": words})
        except (OSError, ControlChannelError) as error:
            raise PeerLost(f"what this process has of the trial's state cannot be had by others: {error}") from error

    def serve_those_that_stay(self) -> None:
        """This process leaves when they have what it holds, or are not there to ask for it."""
        if self._mine is not None:
            self._close_when_done(self._mine)
        self.wait_for_checkpoint()

    def _close_when_done(self, mine: _Mine) -> None:
        mine.parts.until_done(mine.readers, or_else=self._is_unwanted, seconds=MEET_SECONDS)
        mine.parts.close()

    def wait_for_checkpoint(self) -> None:
        """That is written for who cannot go on from memory: before a process ends that holds a part."""
        deadline = time.monotonic() + WRITE_SECONDS
        while self._mine is not None and self._states.checkpoints.is_writing and time.monotonic() < deadline:
            time.sleep(0.01)

    def _leave_when_written(self) -> None:
        """Told to leave before it trains again, a holder has nothing else to do than that."""
        assert self._membership is not None
        while self._mine is not None:
            if self._is_unwanted():
                self.wait_for_checkpoint()
                if self._mine is not None:
                    self._membership.end(EXIT_PREEMPTED)
            time.sleep(LEAVE_SECONDS)

    def goes_on(self, reshape: Reshape) -> bool:
        """Whether this process is one that the trial goes on with; else it leaves."""
        assert self._environment is not None
        self._identity = reshape.identity_of(self._environment)
        return self._identity is not None

    # ------------------------------------------------------------------ those that go on

    def become(self) -> ReplicaEnvironment:
        """What this process is from here on."""
        assert self._identity is not None
        self._environment, self._identity = self._identity, None
        if self._mine is not None:
            threading.Thread(target=self._leave_when_written, name="elastune-holder", daemon=True).start()
        for parts in self._others.values():
            parts.close()
        self._others.clear()
        return self._environment

    def states(self) -> dict[str, Any]:
        """The trial's, as all holders together have them. Blocks until those have kept them.

        Raises PeerLost where one of them is gone, and ReplicaExit where this process is not wanted any more.
        """
        environment = self._environment
        assert environment is not None
        stand_by(self._channel, environment)
        self._states.has_looked = True
        found = []
        for number in range(environment.holders):
            if self._mine is not None and self._mine.number == number:
                found.append(self._mine.parts.states)
                continue
            if number not in self._others:
                self._others[number] = self._found(environment.reshape, number)
            found.append(self._others[number].states())
        return merged(found)

    def _found(self, name: str, number: int) -> RemoteParts:
        assert self._channel is not None and self._membership is not None
        asked = {"whole": name, "key": _key(number), "wait": LOOK_SECONDS}
        deadline = time.monotonic() + MEET_SECONDS
        while time.monotonic() < deadline:
            if self._is_unwanted():
                raise ReplicaExit("preempted", EXIT_PREEMPTED)
            if self._membership.latest > number_of(name):
                # Those that have not come here have lost one, and go on as they were.
                break
            try:
                words = self._channel.request("GET", "/rendezvous", params=asked)["value"]
            except ControlChannelError as error:
                raise PeerLost(f"those that have the trial's state cannot be found: {error}") from error
            if words is not None:
                content = json.loads(words)
                host, port = content["address"]
                return RemoteParts(host, port, content["key"])
        raise PeerLost("those that have the trial's state in memory have not come")

    def _is_unwanted(self) -> bool:
        return self._membership is not None and self._membership.must_leave is not None

    def fetch_the_rest(self) -> None:
        """What nobody has registered by now must not depend on who holds it."""
        if self.is_under_way:
            self._states.registry.change_unclaimed(fetched)

    def finish(self) -> None:
        """All train in one generation: nobody needs anything of anybody else's."""
        if not self.is_under_way:
            return
        assert self._environment is not None
        for parts in self._others.values():
            with contextlib.suppress(PeerLost):
                parts.done(self._environment.replica_id)
        self._others.clear()
        self._states.checkpoints.note_written()
        if self._mine is not None:
            threading.Thread(
                target=self._close_when_done, args=(self._mine,), name="elastune-holder", daemon=True
            ).start()
            self._mine = None
        self._environment = replace(self._environment, reshape="", holders=0)


def _key(number: int) -> str:
    return f"part-{number}"
