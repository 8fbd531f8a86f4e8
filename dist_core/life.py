"""Life: the events of a replica's life, and who is told of each.

A listener overrides what concerns it. Listeners are told in the order of the list, which stands in
``dist_core/trial/replica.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Listener:
    def began(self) -> None:
        """Note that the code has come to its epochs, or to its first loop without any, and has made no step."""

    def epochs_began(self) -> None:
        """Note that the epoch loop is entered, where the trial stands."""

    def entered(self, rank: int, number: int) -> None:
        """Note that this replica has entered generation ``number`` as ``rank``."""

    def lost(self) -> None:
        """Note that another replica is gone, and this one's process groups are closed."""

    def loop_began(self, *, completed: bool) -> None:
        """Note that a training loop begins; ``completed``: one that the trial had completed when it resumed."""

    def loop_ended(self) -> None:
        """Note that the samples of a training loop are used up."""

    def step_counts(self) -> None:
        """Note that all replicas have made the step; what they agreed on in it is taken up next."""

    def step_repeats(self) -> None:
        """Note that the present step is taken back: a replica was lost in it, and its body runs again."""

    def step_ended(self) -> None:
        """Note that the step is counted, and its decisions are carried out."""

    def epoch_ended(self) -> None: ...

    def epochs_ended(self) -> None:
        """Note that the loop over epochs is over, or is left early."""

    def runs_again(self) -> None:
        """Note that the user's code begins again from its top: forget what its first run made."""

    def joins_again(self) -> None:
        """Note that the code that runs again is a joiner's, which comes to a later epoch."""


class Life(Listener):
    """Listener that forwards each event to all its ``listeners``, in order."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []

    def on_entering(self, call: Callable[[], None]) -> None:
        """Have ``call`` made first whenever a generation is entered; the same one once."""
        if not any(isinstance(each, _OnEntering) and each.call == call for each in self.listeners):
            self.listeners.insert(0, _OnEntering(call))


def _forwarded(event: str) -> Callable[..., None]:
    def tell(self: Life, *arguments: Any, **named: Any) -> None:
        for each in self.listeners:
            getattr(each, event)(*arguments, **named)

    return tell


for _event in [name for name in vars(Listener) if not name.startswith("_")]:
    setattr(Life, _event, _forwarded(_event))


class _OnEntering(Listener):
    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def entered(self, rank: int, number: int) -> None:
        self.call()
