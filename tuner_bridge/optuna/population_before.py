"""PopulationBefore: a population that an earlier driver left behind, read off its study and the scheduler's trials."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from trials import states
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.optuna.bandit import Stretch
from tuner_bridge.optuna.population import ELASTIC, MEMBER, PARENT, Population


def stretch_before(step: int, stretches: Iterable[FrozenTrial]) -> int | None:
    """Return the number of the stretch, of those of one elastic trial, that a step continues."""
    return next((each.number for each in stretches if step - 1 in each.intermediate_values), None)


@dataclass(frozen=True, slots=True)
class Left:
    """A member as it was left."""

    stretch: FrozenTrial
    """Its last stretch."""
    parent: int | None
    """Stretch that the first report of one under way continues; None where it has made none, or continues none."""
    trial_id: str
    """Elastic trial of that, as far as the scheduler has it."""
    stretches: int
    """Stretches that were told."""
    began_with: float | None
    time: int
    goes_back: bool
    """The stretch before is its own: it has not taken over another member's state since."""
    ended_with: float | None
    """Value with which the last stretch ended, where no other has been begun behind it; None while it is under way."""
    is_over: bool


@dataclass(slots=True)
class PopulationBefore:
    """Answers what an earlier driver's members have trained, and where each stands.

    ``trials``: the population's, by number. ``rows``: the scheduler's trials of the study. ``sign``: -1 where values
    are minimized.
    """

    population: Population
    trials: Sequence[FrozenTrial]
    rows: Sequence[Mapping[str, Any]]
    sign: float
    _by_number: dict[int, FrozenTrial] = field(init=False)
    _ids: dict[int, str] = field(init=False)
    _live: dict[str, bool] = field(init=False)

    def __post_init__(self) -> None:
        self._by_number = {trial.number: trial for trial in self.trials}
        self._ids = {row["number"]: row["trial_id"] for row in self.rows}
        self._live = {
            row["trial_id"]: row["outcome"] is None and not states.TrialState(row["state"]).is_final
            for row in self.rows
        }

    @property
    def stretches(self) -> dict[str, list[FrozenTrial]]:
        """Stretches of each elastic trial, in order."""
        by_id: dict[str, list[FrozenTrial]] = {}
        for trial in self.trials:
            by_id.setdefault(self.trial_id_of(trial), []).append(trial)
        by_id.pop("", None)
        return by_id

    def gains(self) -> Iterator[Stretch]:
        """Yield what stretches have gained, as a bandit learns from it."""
        for trial in self.trials:
            began_with = self._began_with(trial)
            if trial.state is TrialState.COMPLETE and began_with is not None and trial.value is not None:
                yield Stretch(trial.params, self._time_of(trial), began_with, self.sign * trial.value - began_with)

    def member(self, index: int) -> Left | None:
        """Return how a member was left; None for one that had not begun. Raises InvalidSweep."""
        own = [trial for trial in self.trials if trial.user_attrs[MEMBER] == index]
        if not own:
            return None
        under_way = [trial for trial in own if trial.state is TrialState.RUNNING]
        last = (under_way or own)[-1]
        trial_id = self.trial_id_of(last)
        if under_way and ELASTIC in last.user_attrs and trial_id not in self._live:
            raise InvalidSweep(
                f"trial {last.number} goes on in elastic trial {trial_id}, which this scheduler does not know: resume "
                "the population with the scheduler that trained it (state_dir=, ELASTUNE_URL), or start a new one"
            )
        trains_on = self._live.get(trial_id, False)
        step = max(last.intermediate_values, default=-1)
        ended_with = None
        if trains_on and step >= 0 and self.population.ends_stretch(step):
            ended_with = last.intermediate_values[step]
        return Left(
            stretch=last,
            parent=self._continued_by(last),
            trial_id=trial_id if trial_id in self._live else "",
            stretches=sum(trial.state is TrialState.COMPLETE for trial in own),
            began_with=self._began_with(last),
            time=self._time_of(last),
            goes_back=ELASTIC in last.user_attrs,
            ended_with=ended_with,
            is_over=not under_way and not trains_on,
        )

    def deserted(self, taken_up: set[str]) -> list[str]:
        """Return elastic trials that train for nobody: their members go on from another's state."""
        return [name for name in self.stretches if self._live.get(name) and name not in taken_up]

    def trial_id_of(self, trial: FrozenTrial) -> str:
        """Return a stretch's elastic trial; empty for one that the scheduler never had."""
        return str(trial.user_attrs.get(ELASTIC, self._ids.get(trial.number, "")))

    def _parent_of(self, trial: FrozenTrial) -> FrozenTrial | None:
        return self._by_number.get(trial.user_attrs.get(PARENT, -1))

    def _continued_by(self, trial: FrozenTrial) -> int | None:
        parent = self._parent_of(trial)
        if parent is None or not trial.intermediate_values or trial.state is not TrialState.RUNNING:
            return None
        elastic = self.trial_id_of(parent)
        stretches = [each for each in self.trials if self.trial_id_of(each) == elastic]
        return stretch_before(min(trial.intermediate_values), stretches)

    def _began_with(self, trial: FrozenTrial) -> float | None:
        """Return the score at the end of the latest complete stretch that a stretch goes back to."""
        parent = self._parent_of(trial)
        while parent is not None and (parent.state is not TrialState.COMPLETE or parent.value is None):
            parent = self._parent_of(parent)
        return None if parent is None or parent.value is None else self.sign * parent.value

    def _time_of(self, trial: FrozenTrial) -> int:
        """Return the number of a stretch, counted from the beginning of the training that it goes back to."""
        if trial.intermediate_values:
            return min(trial.intermediate_values) // self.population.stretch
        parent = self._parent_of(trial)
        while parent is not None and not parent.intermediate_values:
            parent = self._parent_of(parent)
        return 0 if parent is None else (max(parent.intermediate_values) + 1) // self.population.stretch
