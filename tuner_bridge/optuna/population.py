"""Population based training: members train side by side, and those that fall behind go on from the best ones.

The method is Jaderberg et al., "Population Based Training of Neural Networks", 2017 (section 4): truncation selection
over a quantile, and exploration by perturbing or resampling hyperparameters. It is asynchronous: a member that comes to
the end of a stretch is compared with the latest scores of the others.

A member is an elastic trial; each stretch of it is an Optuna trial of its own, so that samplers, dashboards and the
importance of parameters see what was tried for how long. A member that falls behind is ended, and its successor begins
with the running winner's state in the slots that became free.

Concurrency: one thread a member. ``Standings`` is shared, and guarded by a lock.
"""

from __future__ import annotations

import math
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from tuner_bridge.errors import InvalidSweep
from tuner_bridge.optuna.bandit import Stretch

PARENT = "elastune:parent"
"""User attribute of an Optuna trial: number of the trial whose state it begins with."""
MORE_EPOCHS = "elastune:more_epochs"
"""User attribute: epochs that the trial trains beyond those that its objective asks for."""
ELASTIC = "elastune:elastic"
"""User attribute of a stretch: id of its member's elastic trial, which the scheduler knows."""
MEMBER = "elastune:member"
"""User attribute: index of the population's member whose stretch the trial is."""
POPULATION = "elastune:population"
"""User attribute of a study's latest population, and of the trials that are its stretches: its mark."""
_EVERY = re.compile(r"^\s*(\d+)\s*(?:epochs?|reports?|steps?)?\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Population based training, for ``optimize(study, objective, population=Population(...))``.

    Raises InvalidSweep for what cannot work.
    """

    size: int
    """Members: trainings that are compared with each other, and of which the worst go on from the best."""
    every: int | str = "4 epochs"
    """Length of a stretch in reports, ``4`` or ``"4 epochs"``: report step 3, 7, 11 ... ends one."""
    quantile: float = 0.25
    """Part of the members that is replaced, and part that replaces them: more than 0, at most 0.5."""
    perturb: float = 1.2
    """Factor by which a number is multiplied or divided, above 1."""
    resample: float = 0.25
    """Probability that a parameter is drawn anew instead, from 0 to 1."""
    explore: str = "perturb"
    """``"perturb"``: as above. ``"pb2"``: numbers are chosen by a model of what stretches have gained so far
    (`tuner_bridge.optuna.bandit`), categories as above."""
    parameters: Sequence[str] | None = None
    """Names of those that change when a member goes on from another; None: all.

    Leave out parameters that change the model's shape."""
    seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 2:
            raise InvalidSweep(f"Population's size is {self.size!r}; it must be a whole number of at least 2")
        if self.stretch < 1:
            raise InvalidSweep(f"Population's every is {self.every!r}; it must be at least 1 report")
        if not 0.0 < self.quantile <= 0.5:
            raise InvalidSweep(f"Population's quantile is {self.quantile!r}; it must be above 0 and at most 0.5")
        if not (isinstance(self.perturb, int | float) and math.isfinite(self.perturb) and self.perturb > 1.0):
            raise InvalidSweep(f"Population's perturb is {self.perturb!r}; it must be a factor above 1, such as 1.2")
        if self.explore not in ("perturb", "pb2"):
            raise InvalidSweep(f"Population's explore is {self.explore!r}; it must be 'perturb' or 'pb2'")
        if not 0.0 <= self.resample <= 1.0:
            raise InvalidSweep(f"Population's resample is {self.resample!r}; it must be a probability from 0 to 1")

    @property
    def stretch(self) -> int:
        """Number of reports between two comparisons of a member. Raises InvalidSweep."""
        epochs = _EVERY.match(str(self.every))
        if epochs is None:
            raise InvalidSweep(
                f"Population's every is {self.every!r}; write a number of epochs, such as 4 or '4 epochs'"
            )
        return int(epochs[1])

    def ends_stretch(self, step: int) -> bool:
        return (step + 1) % self.stretch == 0

    # ------------------------------------------------------------------ decisions: pure

    def winner_for(self, member: int, scores: Mapping[int, float], rng: random.Random) -> int | None:
        """Return the member to go on from, or None for a member that goes on by itself.

        Args:
            member: the one whose stretch has ended.
            scores: the latest score of each member that has one, larger is better.
            rng: draws among the best.
        """
        order = sorted(scores, key=lambda each: (scores[each], -each))
        count = min(math.ceil(len(order) * self.quantile), len(order) // 2)
        if member not in order[:count]:
            return None
        best = [each for each in order[-count:] if scores[each] > scores[member]]
        return rng.choice(best) if best else None

    def explored(
        self,
        parameters: Mapping[str, Any],
        spaces: Mapping[str, BaseDistribution],
        draw: Callable[[str, BaseDistribution], Any],
        rng: random.Random,
        proposed: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Return a winner's parameters, changed.

        Each is as ``proposed``, or drawn anew by ``draw``, or perturbed within its space.
        """
        changed = dict(parameters)
        for name, space in self.to_change(spaces).items():
            if name in proposed:
                changed[name] = proposed[name]
            elif rng.random() < self.resample:
                changed[name] = draw(name, space)
            else:
                changed[name] = self._perturbed(parameters[name], space, rng)
        return changed

    def to_change(self, spaces: Mapping[str, BaseDistribution]) -> dict[str, BaseDistribution]:
        """Return the spaces of those parameters that change."""
        return {name: space for name, space in spaces.items() if self.parameters is None or name in self.parameters}

    def _perturbed(self, value: Any, space: BaseDistribution, rng: random.Random) -> Any:
        up = rng.random() < 0.5
        if isinstance(space, CategoricalDistribution):
            choices = sorted(
                each for each in space.choices if isinstance(each, int | float) and not isinstance(each, bool)
            )
            if len(choices) < len(space.choices):
                return value
            return choices[max(0, min(len(choices) - 1, choices.index(value) + (1 if up else -1)))]
        assert isinstance(space, FloatDistribution | IntDistribution)
        moved = value * self.perturb if up else value / self.perturb
        if isinstance(space, IntDistribution) and round(moved) == value:
            moved = value + (space.step if up else -space.step)
        moved = max(space.low, min(space.high, moved))
        if space.step is not None:
            moved = space.low + round((moved - space.low) / space.step) * space.step
        return int(moved) if isinstance(space, IntDistribution) else float(max(space.low, min(space.high, moved)))


@dataclass(slots=True)
class Member:
    index: int
    trial: optuna.Trial
    """Its present stretch."""
    trial_id: str = ""
    """Its elastic trial, once that is submitted."""
    goes_on: bool = False
    """Its elastic trial was submitted by an earlier driver."""
    stretches: int = 0
    """Stretches that it has completed."""
    score: float | None = None
    """Value at the end of the latest stretch of its present training, larger is better; None before one has ended."""
    began_with: float | None = None
    """Score that its present stretch began with; None for its first."""
    time: int = 0
    """Number of its present stretch, counted from the beginning of the training that it goes back to."""
    parent_id: str = ""
    """Elastic trial whose state it begins with, until its first report tells how far that had come."""
    successor: optuna.Trial | None = None
    """Stretch that takes its place, with another member's state."""
    is_to_end: bool = False
    """Its last stretch has been told, and nothing takes its place: the sweep ends."""
    is_held: bool = False
    """Paused until the others have come as far."""
    has_trained_all: bool = False
    """It has come to its last epoch: nothing is left to train for a successor of its state."""
    is_over: bool = False


@dataclass(slots=True)
class Standings:
    """Members of a population and how far each has come; used under ``lock``."""

    members: list[Member] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def under_way(self) -> list[Stretch]:
        """Return the stretches whose gain is not known yet."""
        return [
            Stretch(each.trial.params, each.time, each.began_with)
            for each in self.members
            if each.began_with is not None and not each.is_over and each.successor is None
        ]

    @property
    def scores(self) -> dict[int, float]:
        """Return the scores of members whose state can be gone on from."""
        return {
            each.index: each.score
            for each in self.members
            if each.score is not None and not each.has_trained_all and not each.is_over and each.successor is None
        }

    def least_advanced(self) -> int:
        return min((each.stretches for each in self.members if not each.is_over), default=0)

    def to_hold(self, member: Member) -> bool:
        """Tell whether a member waits at the end of its stretch, so that others get slots that are too few for all."""
        return not member.is_over and member.stretches > self.least_advanced()


def begin_stretch(
    study: optuna.Study,
    parameters: Mapping[str, Any],
    spaces: Mapping[str, BaseDistribution],
    attributes: Mapping[str, Any],
) -> optuna.Trial:
    """Return a running trial of the study whose parameters are decided."""
    frozen = create_trial(
        state=TrialState.RUNNING, params=dict(parameters), distributions=dict(spaces), user_attrs=dict(attributes)
    )
    return optuna.Trial(study, study._storage.create_new_trial(study._study_id, template_trial=frozen))
