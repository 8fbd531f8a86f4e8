"""Suggestions that travel ahead: an answer brings the values that the objective is likely to ask for next.

Trials of a study ask, as a rule, what the trial before them asked, in the same order, and the first one's loops count.
The driver draws as the sampler would have drawn at each question, and enters a value into the study only when the
objective has taken it. Where the objective asks for something else, what was drawn in vain is undone: the sampler's
random numbers go on from where they would be without it, so a seeded sweep draws what it draws through Optuna alone.
Where trials run side by side they share the sampler, and there is no such order to keep.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import re
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import _filter_study
from optuna.samplers import RandomSampler, TPESampler

MOST_AHEAD = 250
"""Values that one answer brings at most."""
LAST_NUMBER = re.compile(r"[0-9]{1,9}(?=[^0-9]*$)")
STAND_BY_THEMSELVES = (RandomSampler, TPESampler)
"""Samplers that draw a parameter without regard to what the same trial has drawn before."""

Entry = Sequence[Any]
"""A value that travels ahead: the parameter's name, its space as `space_of` writes it, the value (of a choice its
index), and the number by which the driver knows it."""


def space_of(method: str, arguments: Mapping[str, Any]) -> str:
    """Write down from what a suggestion draws: of one name and one space there is one value in a trial."""
    if method == "suggest_categorical":
        choices = "\0".join(repr(choice) for choice in arguments["choices"])
        return f"choice {hashlib.sha256(choices.encode('utf-8', 'replace')).hexdigest()[:24]}"
    kind = float if method == "suggest_float" else int
    step = arguments["step"]
    bounds = f"{kind(arguments['low'])!r} {kind(arguments['high'])!r} {step and kind(step)!r}"
    return f"{kind.__name__} {bounds} {bool(arguments['log'])}"


# ---------------------------------------------------------------------- in the replica


class TakenAhead:
    """In the replica: values that came ahead, and the numbers of those that were taken and that the study waits for.

    Concurrency: the objective takes, and a thread may tell what was taken.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Entry] = deque()
        self._untold: list[int] = []

    def came(self, entries: Iterable[Entry]) -> None:
        with self._lock:
            self._waiting = deque(entries)

    def take(self, name: str, space: str) -> tuple[Any] | None:
        """Return the value for what is asked, in a tuple; None where something else was expected."""
        with self._lock:
            if not self._waiting or (self._waiting[0][0], self._waiting[0][1]) != (name, space):
                self._waiting.clear()
                return None
            _, _, value, number = self._waiting.popleft()
            self._untold.append(number)
            return (value,)

    @property
    def untold(self) -> list[int]:
        with self._lock:
            return list(self._untold)

    def told(self, numbers: Iterable[int]) -> None:
        """Note that the study has heard that these were taken."""
        with self._lock:
            heard = set(numbers)
            self._untold = [number for number in self._untold if number not in heard]


# ---------------------------------------------------------------------- in the driver


@dataclass(slots=True)
class _Suggestion:
    name: str
    space: str
    distribution: BaseDistribution

    @staticmethod
    def of(method: str, arguments: Mapping[str, Any]) -> _Suggestion:
        """Describe a suggestion; raise what Optuna raises for it."""
        return _Suggestion(arguments["name"], space_of(method, arguments), _distribution(method, arguments))


@dataclass(slots=True)
class _Drawn:
    suggestion: _Suggestion
    value: Any
    by_sampler: bool
    """False where it was decided before: the only value, one that was queued, or one drawn with others."""
    number: int

    @property
    def entry(self) -> Entry:
        value, distribution = self.value, self.suggestion.distribution
        if isinstance(distribution, CategoricalDistribution):
            value = index_of(distribution.choices, value)
        return [self.suggestion.name, self.suggestion.space, value, self.number]


@dataclass(slots=True)
class _Asked:
    """Suggestions that one trial has asked for, and those drawn for it ahead."""

    suggestions: dict[str, _Suggestion] = field(default_factory=dict)
    ahead: dict[str, _Drawn] = field(default_factory=dict)
    sent: dict[int, _Drawn] = field(default_factory=dict)
    """All that was sent, by number: a replica may take what was undone meanwhile for another one's sake."""
    receivers: set[str] = field(default_factory=set)
    """Processes that values were sent to."""
    taken: list[_Suggestion] = field(default_factory=list)
    """Suggestions that the sampler drew ahead and that were taken since."""
    before: tuple[optuna.samplers.BaseSampler, dict[str, Any]] | None = None
    """The sampler, and its attributes before it drew ahead."""


class LookAhead:
    """In the driver: draws for the trials of one study. Concurrency: one thread at a time, which the caller sees to."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self.draws = True
        """False to send only what other replicas of the same trial have asked for."""
        self._habit: list[_Suggestion] = []
        """Suggestions of the trial that ended last, or has asked most."""
        self._asked_by_trial: dict[int, _Asked] = {}
        self._drew_last: _Asked | None = None

    def take(self, trial: optuna.Trial, numbers: Iterable[int]) -> dict[str, Any]:
        """Enter values into the study that the objective has taken; returns those that were new."""
        asked = self._asked_by_trial.get(trial.number)
        new = {}
        for number in numbers:
            drawn = None if asked is None else asked.sent.get(number)
            if asked is not None and drawn is not None and drawn.suggestion.name not in asked.suggestions:
                new[drawn.suggestion.name] = self._enter(trial, asked, drawn)
        return new

    def suggest(
        self, trial: optuna.Trial, method: str, arguments: Mapping[str, Any], asker: str
    ) -> tuple[Any, list[Entry]]:
        """Return the value for one suggestion, and those that are likely to be asked for next.

        ``asker``: the process that asks. Raises what Optuna raises for it.
        """
        suggestion = _Suggestion.of(method, arguments)
        asked = self._asked_by_trial.setdefault(trial.number, _Asked())
        drawn = asked.ahead.get(suggestion.name)
        is_next = drawn is not None and drawn is next(iter(asked.ahead.values()))
        has_others = bool(asked.receivers - {asker})
        asked.receivers.add(asker)
        if drawn is not None and drawn.suggestion.space == suggestion.space and (is_next or has_others):
            # Another process of the trial has taken it, or may.
            value = self._enter(trial, asked, drawn)
        else:
            if suggestion.name not in trial.params:
                self._undo(trial, asked)
                self._drew_last = asked
            value = getattr(trial, method)(**arguments)
            asked.suggestions.setdefault(suggestion.name, suggestion)
        if len(asked.suggestions) > len(self._habit):
            self._habit = list(asked.suggestions.values())
        return value, self._entries_behind(trial, asked, suggestion)

    def close(self, trial: optuna.Trial) -> None:
        """Forget a trial that is over."""
        asked = self._asked_by_trial.pop(trial.number, None)
        if asked is not None:
            self._undo(trial, asked)
            self._habit = list(asked.suggestions.values())

    # ------------------------------------------------------------------

    def _enter(self, trial: optuna.Trial, asked: _Asked, drawn: _Drawn) -> Any:
        """Let the trial have a value as if its sampler had drawn it together with others."""
        suggestion = drawn.suggestion
        asked.ahead.pop(suggestion.name, None)
        if drawn.by_sampler:
            values = trial.relative_params
            trial.relative_search_space = {
                **(trial.relative_search_space or {}),
                suggestion.name: suggestion.distribution,
            }
            values[suggestion.name] = drawn.value
            asked.taken.append(suggestion)
        asked.suggestions.setdefault(suggestion.name, suggestion)
        return suggest(trial, suggestion.name, suggestion.distribution)

    def _undo(self, trial: optuna.Trial, asked: _Asked) -> None:
        """Forget what was drawn ahead and not taken."""
        wasted = any(drawn.by_sampler for drawn in asked.ahead.values())
        if wasted and asked.before is not None and self._drew_last is asked:
            sampler, attributes = asked.before
            vars(sampler).clear()
            vars(sampler).update(attributes)
            frozen = self._frozen(trial)
            for suggestion in asked.taken:
                self._draw(frozen, suggestion)
        asked.ahead.clear()
        asked.taken.clear()
        asked.before = None

    def _entries_behind(self, trial: optuna.Trial, asked: _Asked, suggestion: _Suggestion) -> list[Entry]:
        """Entries behind this one: those that other replicas of the trial asked for, then those that are likely."""
        others = list(asked.suggestions.values())
        at = next(index for index, each in enumerate(others) if each.name == suggestion.name)
        params = trial.params if at + 1 < len(others) else {}
        behind = [self._numbered(asked, each, params[each.name], by_sampler=False) for each in others[at + 1 :]]
        if not asked.ahead:
            self._look(trial, asked, others[-1])
        return [drawn.entry for drawn in (*behind, *asked.ahead.values())][:MOST_AHEAD]

    def _numbered(self, asked: _Asked, suggestion: _Suggestion, value: Any, *, by_sampler: bool) -> _Drawn:
        drawn = _Drawn(suggestion, value, by_sampler, len(asked.sent))
        asked.sent[drawn.number] = drawn
        return drawn

    def _look(self, trial: optuna.Trial, asked: _Asked, last: _Suggestion) -> None:
        asked.taken.clear()
        asked.before = None
        at = next((index for index, each in enumerate(self._habit) if _is_alike(each, last)), len(self._habit))
        following = self._habit[at + 1 : at + 1 + MOST_AHEAD] or _counted_on(list(asked.suggestions.values()))
        if not following or not self.draws:
            return
        frozen = self._frozen(trial)
        for suggestion in following:
            if suggestion.name in asked.suggestions or suggestion.name in asked.ahead:
                break
            decided = _decided(trial, frozen, suggestion)
            if decided is None and type(self._study.sampler) not in STAND_BY_THEMSELVES:
                break
            if decided is None and asked.before is None:
                asked.before = self._study.sampler, copy.deepcopy(vars(self._study.sampler))
                self._drew_last = asked
            value = self._draw(frozen, suggestion) if decided is None else decided[0]
            asked.ahead[suggestion.name] = self._numbered(asked, suggestion, value, by_sampler=decided is None)

    def _frozen(self, trial: optuna.Trial) -> optuna.trial.FrozenTrial:
        return self._study._storage.get_trial(trial._trial_id)

    def _draw(self, frozen: optuna.trial.FrozenTrial, suggestion: _Suggestion) -> Any:
        # Hyperband shows a sampler its own bracket's trials.
        study = _filter_study(self._study, frozen)
        return self._study.sampler.sample_independent(study, frozen, suggestion.name, suggestion.distribution)


def _is_alike(one: _Suggestion, other: _Suggestion) -> bool:
    return (one.name, one.space) == (other.name, other.space)


def _counted_on(suggestions: Sequence[_Suggestion]) -> list[_Suggestion]:
    """Return what follows where a loop counts: as many names again as it has counted so far, from the same space."""
    counted = 0
    for before, after in itertools.pairwise(reversed(suggestions)):
        if after.space != before.space or _next_name(after.name) != before.name:
            break
        counted += 1
    following, last = [], suggestions[-1]
    for _ in range(min(counted, MOST_AHEAD)):
        last = replace(last, name=_next_name(last.name))
        following.append(last)
    return following


def _next_name(name: str) -> str:
    """Return the name with its last number one larger; an empty text where it has none."""
    match = LAST_NUMBER.search(name)
    if match is None:
        return ""
    number = match.group()
    return name[: match.start()] + str(int(number) + 1).zfill(len(number)) + name[match.end() :]


def _decided(trial: optuna.Trial, frozen: optuna.trial.FrozenTrial, suggestion: _Suggestion) -> tuple[Any] | None:
    """Return in a tuple a value that no sampler has to draw any more, in the order in which Optuna looks for one."""
    name, distribution = suggestion.name, suggestion.distribution
    queued = frozen.system_attrs.get("fixed_params", {})
    if name in frozen.params:
        return (frozen.params[name],)
    if name in queued:
        return (queued[name],)
    if distribution.single():
        choices = isinstance(distribution, CategoricalDistribution)
        return (distribution.choices[0] if choices else distribution.low,)  # type: ignore[attr-defined]  # numbers
    if name in trial.relative_params:
        value = trial.relative_params[name]
        return (value,) if distribution._contains(distribution.to_internal_repr(value)) else None
    return None


def _distribution(method: str, arguments: Mapping[str, Any]) -> BaseDistribution:
    if method == "suggest_categorical":
        return CategoricalDistribution(arguments["choices"])
    kind = FloatDistribution if method == "suggest_float" else IntDistribution
    return kind(arguments["low"], arguments["high"], log=arguments["log"], step=arguments["step"])


def index_of(choices: Sequence[Any], value: Any) -> int:
    return next(index for index, choice in enumerate(choices) if is_same(choice, value))


def is_same(choice: Any, value: Any) -> bool:
    """Tell whether two choices are one: 1 and True are two, NaN is itself."""
    return type(choice) is type(value) and (choice == value or (choice != choice and value != value))


def suggest(trial: Any, name: str, distribution: BaseDistribution) -> Any:
    """Draw a parameter from its distribution; raises what the trial raises."""
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    assert isinstance(distribution, (FloatDistribution, IntDistribution))
    draw = trial.suggest_int if isinstance(distribution, IntDistribution) else trial.suggest_float
    return draw(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)
