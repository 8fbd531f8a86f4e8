"""RunningSums: the accumulators of a trial, and what of them rides in each step's control round.

What a replica has added since the last ``synchronized()`` is its own, and would be gone with it. So every step's
reduction, which starts in the backward pass, sums what was added before it under the keys that all replicas know; a
key that is new is made known at the step's end. A replica that is lost takes along what it added after the last
backward pass that it made with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from dist_core.generations.decision import all_equal, short_checksum
from dist_core.generations.generation import Generation
from dist_core.generations.step_vote import Voter
from dist_core.life import Listener
from dist_core.state.position import Position
from dist_core.state.states import Stateful, StateRegistry

ACCUMULATOR_PREFIX = "accumulator-"
"""Names of their states begin so."""

NUM_SUM_SLOTS = 36
"""Checksum of the keys and its square, how many keys are not in the round, and a number for each that is."""
_KEYS_SUM, _KEYS_SQUARES, _LEFT_OUT, _FIRST = range(4)
_MOST_KEYS = NUM_SUM_SLOTS - _FIRST


class Summed(Stateful, Protocol):
    """Numbers under keys, added up on each replica and summed over all of them: an accumulator."""

    @property
    def summed_keys(self) -> list[str]:
        """Keys whose sums all replicas have."""
        ...

    def count_new_keys(self) -> int: ...

    def send(self, key: str) -> float:
        """Return what was added under this key since the last step's round."""
        ...

    def receive(self, key: str, total: float | None) -> None: ...

    def settle(self) -> bool:
        """Sum what every replica has added, collectively; return False if one was lost meanwhile."""
        ...

    def begin_epoch(self) -> None: ...

    def mark(self) -> None:
        """Mark a point to which additions may have to be taken back."""
        ...

    def forget_mark(self) -> None: ...

    def back_to_mark(self) -> None: ...

    def catch_up(self, state: dict[str, Any]) -> None:
        """Add what this replica had taken back, as the replica that ``state`` comes from has counted it."""
        ...


class RunningSums(Voter, Listener):
    """The accumulators of a trial, summed over its replicas in each step's control round.

    ``met``: called after each accumulator that all replicas have summed.
    """

    name = "sums"

    def __init__(
        self, generation: Generation, position: Position, registry: StateRegistry, met: Callable[[], None]
    ) -> None:
        self._generation = generation
        self._position = position
        self._registry = registry
        self._met = met
        self._accumulators: dict[str, Summed] = {}
        self._sent: list[tuple[Summed, str]] = []
        self.additions = 0
        """Number of times that anything was added, in this process."""

    @property
    def are_kept(self) -> bool:
        """Tell whether the script has an accumulator at present."""
        return bool(self._accumulators)

    def __iter__(self) -> Iterator[Summed]:
        return iter(self._accumulators.values())

    def adopt(self, accumulator: Summed) -> None:
        """Make an accumulator's sums part of the trial's state; of one made within an epoch, until the epoch ends."""
        epoch = self._position.epoch if self._position.in_epoch_loop else "all"
        name = self._registry.unique_name(f"{ACCUMULATOR_PREFIX}{epoch}")
        self._registry.register(name, accumulator)
        self._accumulators[name] = accumulator

    def runs_again(self) -> None:
        self._accumulators.clear()
        self._sent = []

    def end_epoch(self) -> None:
        """Sum the epoch's additions over the replicas, and forget its accumulators; collective."""
        if self._accumulators and self._generation.joined:
            self.settle()
        prefix = f"{ACCUMULATOR_PREFIX}{self._position.epoch}-"
        self._registry.forget(prefix)
        self._accumulators = {name: each for name, each in self._accumulators.items() if not name.startswith(prefix)}
        self._sent = []
        for accumulator in self:
            accumulator.begin_epoch()

    def own(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return the trial's states for the very replica that they are of: what it has not summed it still has to."""
        mine = {name: states[name] for name in self._accumulators if name in states}
        return states | {name: {**state, "pending": {}, "own": state["pending"]} for name, state in mine.items()}

    # ------------------------------------------------------------------ code that may run again

    def mark(self) -> None:
        """Mark a point from which additions may have to be repeated."""
        for accumulator in self:
            accumulator.mark()

    def step_counts(self) -> None:
        """Count what was added since the mark."""
        for accumulator in self:
            accumulator.forget_mark()

    def take_back(self) -> None:
        self._sent = []
        for accumulator in self:
            accumulator.back_to_mark()

    def catch_up(self, states: dict[str, Any]) -> None:
        """Count a step that was taken back here: another replica has its sums, with what was sent from here."""
        for name, accumulator in self._accumulators.items():
            if name in states:
                accumulator.catch_up(states[name])

    # ------------------------------------------------------------------ the control round

    def put(self) -> list[float]:
        """Return the sums for the present step's round; they count when the round is complete."""
        if self._generation.group.world_size == 1:
            return []
        slots = [0.0] * NUM_SUM_SLOTS
        if not self._accumulators:
            return slots
        entries: list[tuple[str, Summed, str]] = []
        for name, accumulator in sorted(self._accumulators.items()):
            keys = accumulator.summed_keys
            entries += [(name, accumulator, key) for key in keys]
            slots[_LEFT_OUT] += accumulator.count_new_keys()
        slots[_LEFT_OUT] += max(0, len(entries) - _MOST_KEYS)
        entries = entries[:_MOST_KEYS]
        checksum = float(short_checksum(repr([(name, key) for name, _, key in entries]).encode()))
        slots[_KEYS_SUM], slots[_KEYS_SQUARES] = checksum, checksum**2
        self._sent = [(accumulator, key) for _, accumulator, key in entries]
        for slot, (accumulator, key) in enumerate(self._sent, _FIRST):
            slots[slot] = accumulator.send(key)
        return slots

    def take(self, slots: Sequence[float], world_size: int) -> None:
        if world_size > 1 and self._receive(slots, world_size):
            self.settle()

    def _receive(self, slots: Sequence[float], world_size: int) -> bool:
        """Receive the sums over all replicas; tell whether some keys were not among them."""
        sent, self._sent = self._sent, []
        agreed = all_equal(slots[_KEYS_SUM], slots[_KEYS_SQUARES], world_size)
        for slot, (accumulator, key) in enumerate(sent, _FIRST):
            accumulator.receive(key, slots[slot] if agreed else None)
        return slots[_LEFT_OUT] > 0 or not agreed

    def settle(self) -> None:
        """Sum what every replica has added, collectively; stop early if a replica is lost."""
        for accumulator in self:
            if not accumulator.settle():
                return
            self._met()
