"""Stage trees: trials that differ only in what happens from an epoch on train the epochs before it once.

The idea is Shin et al., "Hippo: Taming Hyper-parameter Optimization of Deep Learning with Stage Trees", 2020. An
objective declares which parameters take effect late; trials that have all others in common form a tree, whose trunk the
first of them trains. It keeps its state where the others branch off, and they begin with that.

Concurrency: each trial is in a thread of its own; they meet under one condition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution

from tuner_bridge.errors import InvalidSweep, SweepInterrupted
from tuner_bridge.optuna.ahead import is_same

SHARED_EPOCHS = "elastune:shared_epochs"
"""User attribute of an Optuna trial: epochs that its parent has trained for it."""
LOOK_SECONDS = 0.2
_DECLARED = "elastune_stages"
Objective = TypeVar("Objective", bound=Callable[..., Any])


def stage(name: str, *, from_epoch: int) -> Callable[[Objective], Objective]:
    """Declare that a parameter has no effect before an epoch, so that trials share the epochs before it.

    For the objective of ``optimize``; may be repeated for further parameters::

        @stage("decay", from_epoch=20)
        def objective(trial): ...

    Trials of which all other parameters are the same train epochs 0 to 19 once. The objective has to draw alike in
    these epochs: one that seeds its generators gives the values that it gives without sharing, to rounding.

    Args:
        name: Name of the parameter.
        from_epoch: First epoch in which it matters.

    Raises:
        InvalidSweep: The epoch is below 1.
    """
    if not isinstance(from_epoch, int) or isinstance(from_epoch, bool) or from_epoch < 1:
        raise InvalidSweep(
            f"stage({name!r}) has from_epoch={from_epoch!r}; it must be a whole number of at least 1, the first epoch "
            "in which the parameter matters"
        )

    def declare(objective: Objective) -> Objective:
        setattr(objective, _DECLARED, {**declared_stages(objective), name: from_epoch})
        return objective

    return declare


def declared_stages(objective: Any) -> dict[str, int]:
    """Return the first epoch in which a parameter matters, for those that were declared with ``stage``."""
    return dict(getattr(objective, _DECLARED, {}))


@dataclass(frozen=True, slots=True)
class Branch:
    """Start of a trial, and the states that it keeps for others."""

    keep_after: tuple[int, ...] = ()
    shared_epochs: int = 0
    """Epochs that it does not train itself; 0: it begins anew."""
    parent_id: str = ""
    """Elastic trial that trains them."""
    parent: optuna.Trial | None = None


@dataclass(slots=True)
class _Trunk:
    """A trial that trains epochs for others."""

    trial: optuna.Trial
    keeps: tuple[int, ...]
    trial_id: str = ""
    is_known: bool = False
    """It has asked for what it needs before its first step, or has what an earlier one has asked for."""
    is_over: bool = False
    passed: dict[int, tuple[dict[str, Any], dict[str, BaseDistribution]]] = field(default_factory=dict)
    """Parameters that it had asked for by the end of the epochs after which others branch off."""

    def had_asked_for(self, epochs: int) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        return self.passed.get(epochs) or (self.trial.params, self.trial.distributions)


class StageTree:
    """Trials of a sweep by the epochs that they share.

    ``stages``: the first epoch that a parameter matters in. ``is_over``: tells whether the sweep ends.
    """

    def __init__(self, stages: Mapping[str, int], is_over: Callable[[], bool]) -> None:
        self._stages = stages
        self._is_over = is_over
        self._epochs = sorted(set(stages.values()))
        self._trunks: dict[int, _Trunk] = {}
        self._changed = threading.Condition()
        self.waiting = 0
        """Trials that wait for one that trains their epochs."""

    def branch(self, trial: optuna.Trial, draw: Callable[[str, BaseDistribution], Any]) -> Branch:
        """Return where a trial begins, once that is known. Raises SweepInterrupted.

        ``draw``: what the trial draws for a parameter that another one has asked for.
        """
        with self._changed:
            self.waiting += 1
            try:
                while (chosen := self._found(trial, draw)) is None:
                    if self._is_over():
                        raise SweepInterrupted
                    self._changed.wait(LOOK_SECONDS)
            finally:
                self.waiting -= 1
            if chosen.keep_after:
                trunk = self._trunks[trial.number] = _Trunk(trial, chosen.keep_after)
                trunk.is_known = self._has_drawn_alike(draw)
            return chosen

    def note_submitted(self, number: int, trial_id: str) -> None:
        with self._changed:
            if number in self._trunks:
                self._trunks[number].trial_id = trial_id

    def note_live(self, number: int, live: Mapping[str, Any]) -> None:
        """Note what the scheduler tells of a trial while it runs."""
        with self._changed:
            trunk = self._trunks.get(number)
            if trunk is None or live["state"] in ("pending", "starting"):
                return
            trunk.is_known = True
            for epochs in trunk.keeps:
                if live.get("epoch", 0) >= epochs:
                    trunk.passed.setdefault(epochs, (trunk.trial.params, trunk.trial.distributions))
            self._changed.notify_all()

    def note_end(self, number: int, kept: Callable[[], list[int]]) -> None:
        """Note a trial's end; ``kept`` asks for the epochs after which its state was kept."""
        with self._changed:
            trunk = self._trunks.get(number)
        if trunk is None:
            return
        epochs: list[int] = []
        try:
            epochs = kept()
        finally:
            with self._changed:
                trunk.is_over = True
                asked_for = trunk.trial.params, trunk.trial.distributions
                trunk.passed = {each: trunk.passed.get(each, asked_for) for each in trunk.keeps if each in epochs}
                self._changed.notify_all()

    def _found(self, trial: optuna.Trial, draw: Callable[[str, BaseDistribution], Any]) -> Branch | None:
        """Return where a trial begins; None where another one has to come further before that is known."""
        for epochs in reversed(self._epochs):
            may_share = False
            for trunk in self._trunks.values():
                has_passed = epochs in trunk.passed
                if epochs not in trunk.keeps or trunk.trial is trial or (trunk.is_over and not has_passed):
                    continue
                if not has_passed and not trunk.is_known:
                    return None
                if self._is_shared(trunk, epochs, draw):
                    if has_passed:
                        keep_after = tuple(each for each in self._epochs if each > epochs)
                        return Branch(keep_after, epochs, trunk.trial_id, trunk.trial)
                    may_share = True
            if may_share:
                return None
        return Branch(tuple(self._epochs))

    def _has_drawn_alike(self, draw: Callable[[str, BaseDistribution], Any]) -> bool:
        """Draw all that an earlier trial has asked for, so that others can tell at once whether they share epochs."""
        known = next((trunk for trunk in self._trunks.values() if trunk.is_known), None)
        if known is None:
            return False
        for name, space in known.trial.distributions.items():
            draw(name, space)
        return True

    def _is_shared(self, trunk: _Trunk, epochs: int, draw: Callable[[str, BaseDistribution], Any]) -> bool:
        parameters, spaces = trunk.had_asked_for(epochs)
        names = [name for name in parameters if self._stages.get(name, 0) < epochs]
        return all(is_same(draw(name, spaces[name]), parameters[name]) for name in names)
