"""Losses: breaks off what replicas wait in with one of which the scheduler has told that it is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dist_core.generations.generation import Generation
from dist_core.generations.membership import Prepared
from dist_core.generations.process_groups import ReplicaGroup

LOSS_PATIENCE_SECONDS = 0.5
"""Seconds for survivors to notice a loss by themselves, before what they wait in is broken off."""


class Losses:
    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._lost: Sequence[str] = ()
        """Members of this generation and the next one."""
        self._entering: Prepared | None = None

    def note(self, lost: Sequence[str]) -> None:
        """Note losses that the scheduler may know of before a collective does. Called from another thread."""
        self._lost = lost
        self._break_off_if_lost(self._generation.members, self._generation.group)
        entering = self._entering
        if entering is not None and entering.group is not None:
            self._break_off_if_lost(entering.generation.members, entering.group)

    @contextmanager
    def meeting(self, prepared: Prepared) -> Iterator[ReplicaGroup]:
        """While the members of a generation hand over state before they enter it: the loss of one ends that, too."""
        assert prepared.group is not None
        self._entering = prepared
        self._break_off_if_lost(prepared.generation.members, prepared.group)
        try:
            yield prepared.group
        finally:
            self._entering = None

    def _break_off_if_lost(self, members: Sequence[str], group: ReplicaGroup) -> None:
        if set(self._lost).isdisjoint(members):
            return

        def break_off() -> None:
            time.sleep(LOSS_PATIENCE_SECONDS)
            entering = self._entering
            if self._generation.group is group or (entering is not None and entering.group is group):
                group.break_off()

        threading.Thread(target=break_off, name="elastune-loss", daemon=True).start()
