"""ChosenLayout: how this replica holds its model, what else its code could do, and what each of these would take."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

from dist_core.errors import EXIT_PREEMPTED, ControlChannelError, InvalidTraining, ReplicaExit
from dist_core.goodput import Hints
from dist_core.goodput.layout_terms import LayoutTerms, usable
from dist_core.layout import Layout
from dist_core.life import Listener
from dist_core.link.client import ControlChannel
from dist_core.link.environment import ReplicaEnvironment
from dist_core.state.memory_limit import MemoryLimit

logger = logging.getLogger(__name__)


class ChosenLayout(Listener):
    """The layout of this replica's model, and the other layouts that its code offers.

    ``members``: processes of this replica.
    """

    def __init__(
        self,
        environment: ReplicaEnvironment | None,
        channel: ControlChannel | None,
        memory_limit: MemoryLimit,
        members: int,
    ) -> None:
        self._environment = environment
        self._channel = channel
        self._memory_limit = memory_limit
        self._members = members
        self.is_settled = False
        """True once the model's wrapper has chosen a layout."""
        self._terms: tuple[LayoutTerms, ...] = ()
        self.slot_memory: float | None = None
        self.present = Layout(members)
        self.name = ""
        """Name of the present layout, where there is a choice."""
        self.seconds = 1.0
        """Predicted seconds of a pass, in units of the whole model's on one slot."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Slots that a replica of this trial may take."""
        given = () if self._environment is None else self._environment.replica_sizes
        return given or (self._members,)

    @property
    def terms(self) -> tuple[LayoutTerms, ...]:
        """Return the terms of all layouts to choose from; empty where there is no choice."""
        return self._possible(self._terms) if self._terms else ()

    def _possible(self, terms: Iterable[LayoutTerms]) -> tuple[LayoutTerms, ...]:
        """Return the layouts without those that have run out of memory with the smallest batch."""
        hopeless = self._memory_limit.hopeless
        return tuple(each for each in terms if str(each.layout) not in hopeless)

    @property
    def is_choice(self) -> bool:
        return self._environment is not None and bool(self._environment.layout)

    def runs_again(self) -> None:
        self.is_settled = False

    def settle(self, terms: Sequence[LayoutTerms], slot_memory: float | None, *, whole_seconds: float) -> Layout:
        """Return the layout to train with, the same on all processes that have as many slots for a replica.

        Raises InvalidTraining where the model fits with none; ReplicaExit where it does with another than this
        replica's, which the scheduler then starts. ``whole_seconds``: of a pass on one slot, in the terms' units.
        """
        memory = math.inf if slot_memory is None else slot_memory
        terms_of_size = [each for each in terms if each.layout.slots == self._members]
        if self.is_choice:
            assert self._environment is not None
            asked = Layout.from_name(self._environment.layout)
            if asked.kind or asked.recomputes:
                terms_of_size = [each for each in terms_of_size if each.layout == asked] or terms_of_size
        if not terms_of_size:
            raise InvalidTraining(
                f"this model cannot be divided among the {self._members} slots of a replica; its possible layouts "
                f"are: {', '.join(str(each.layout) for each in terms) or 'none'}. Use another number of slots"
            )
        fitting = usable(self._possible(terms), memory)
        best = min(
            usable(self._possible(terms_of_size), memory) or terms_of_size, key=lambda each: (each.seconds, each.layout)
        )
        if not fitting if self.is_choice else best.fixed_bytes > memory:
            self._refuse(terms, memory)
        self._terms, self.slot_memory = (tuple(terms), slot_memory) if self.is_choice else ((), None)
        self.present, self.seconds = best.layout, best.seconds / whole_seconds
        self.name = self._memory_limit.layout = str(best.layout) if self.is_choice else ""
        self.is_settled = True
        if self.is_choice and not (best.fits(memory) and best in self._possible(terms_of_size)):
            # Divided without need, it trains until the scheduler has another.
            self._leave_for_another(best, fitting, memory)
        return best.layout

    def _refuse(self, terms: Sequence[LayoutTerms], memory: float) -> None:
        if not self._possible(terms):
            raise InvalidTraining(
                f"this model has run out of memory with the smallest batch in every layout that it can have "
                f"({', '.join(str(each.layout) for each in terms)}). Let a replica take more slots "
                "(slots_per_replica), allow a smaller batch, or make the model smaller"
            )
        least = min(terms, key=lambda each: each.fixed_bytes + each.example_bytes)
        needed = least.fixed_bytes + least.example_bytes
        raise InvalidTraining(
            f"this model needs at least {_size(needed)} on each slot of a replica ({least.layout}), and a slot has "
            f"{_size(memory)}. Let a replica take more slots (slots_per_replica), or make the model smaller"
        )

    def _leave_for_another(self, own: LayoutTerms, fitting: Sequence[LayoutTerms], memory: float) -> None:
        environment = self._environment
        assert environment is not None
        if environment.launch_index == 0 and self._channel is not None:
            needs = f"needs {_size(own.fixed_bytes + own.example_bytes)} on a slot, which has {_size(memory)}"
            if own.fits(memory):
                needs = "has run out of memory"
            other = min(fitting, key=lambda each: (each.seconds, each.layout)).layout
            self._tell(f"the model as {own.layout} {needs}: this replica asks for {other}, or another layout that fits")
        raise ReplicaExit("preempted", EXIT_PREEMPTED)

    def give_up(self) -> bool:
        """Ask for another layout after the smallest batch ran out of memory; return False where there is none."""
        memory = math.inf if self.slot_memory is None else self.slot_memory
        others = [each for each in self.terms if str(each.layout) != self.name]
        if not self.name or not usable(others, memory):
            return False
        self._memory_limit.give_up_layout()
        self._tell(f"out of memory as {self.name} with the smallest batch: this replica asks for another layout")
        return True

    def _tell(self, message: str) -> None:
        assert self._channel is not None
        hints = Hints(bounds=None, layout=self.name, layouts=self.terms, slot_memory_bytes=self.slot_memory)
        try:
            self._channel.request("POST", "/warning", {"message": message})
            self._channel.request("POST", "/hints", {"generation": 0, "hints": hints.to_json()})
        except ControlChannelError as error:
            logger.warning("layouts not delivered: %s", error)


def _size(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
