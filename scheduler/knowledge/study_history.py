"""Measurements of one study's trials, live and ended, and the profiles that they make."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence, Set
from dataclasses import replace

from dist_core.goodput import BatchBounds, Configuration, Hints, Observation
from dist_core.goodput.layout_terms import LayoutTerms
from dist_core.layout import Layout
from scheduler.knowledge.profile import StudyProfile, TrialModel, noise_at, noise_bin, pool
from scheduler.knowledge.survival import Survival

REFIT_SECONDS = 2.0
"""Least time between two fits of one study."""
SURPRISE = 0.03
"""Mean distance in log units between measured and believed step times from which on the profile is made anew."""
GROWTH = 1.15
"""Growth in the number of configurations after which a profile is made anew."""


class StudyHistory:
    def __init__(self) -> None:
        self._measured: dict[tuple[str, str], _Alike] = {}
        """Measurements by kind of nodes and layout."""
        self._noise: dict[int, dict[str, float]] = {}
        self._targets: dict[str, float] = {}
        self._progress: dict[str, float] = {}
        self._stopped: set[str] = set()
        self._bounds: BatchBounds | None = None
        self._slots_per_share = 1
        self._layouts: tuple[LayoutTerms, ...] = ()
        self._predicted: dict[str, dict[str, float]] = {}
        """Seconds that a trial is predicted to take with a layout."""
        self._slot_memory: dict[str, float] = {}
        """Slot memory that each trial reported last, of the nodes it is on."""
        self._given_up: dict[str, set[str]] = {}
        """Layouts that a trial has run out of memory with."""

    def note(self, trial_id: str, hints: Hints) -> None:
        """Replace what a trial said before by what it says now."""
        alike: dict[tuple[str, str], list[Observation]] = {}
        for row in hints.observations:
            alike.setdefault((row.configuration.kind, row.configuration.layout), []).append(row)
        for key, rows in alike.items():
            self._measured.setdefault(key, _Alike()).note(trial_id, tuple(rows))
        if hints.layouts:
            names = {str(each.layout): each.seconds for each in hints.layouts}
            for lost in self._predicted.get(trial_id, {}).keys() - names.keys():
                self.give_up(trial_id, lost)
            self._predicted[trial_id] = names
            self._layouts = hints.layouts
            if hints.slot_memory_bytes is not None:
                self._slot_memory[trial_id] = hints.slot_memory_bytes
        self._bounds = hints.bounds or self._bounds
        self._slots_per_share = hints.slots_per_share
        self._progress[trial_id] = hints.progress
        if hints.target_progress:
            self._targets[trial_id] = hints.target_progress
            if hints.statistics is not None and hints.statistics.sqr > 0:
                fraction = hints.progress / hints.target_progress
                ratio = hints.statistics.var / hints.statistics.sqr
                self._noise.setdefault(noise_bin(fraction), {})[trial_id] = ratio

    def note_end(self, trial_id: str, *, stopped: bool) -> None:
        if stopped:
            self._stopped.add(trial_id)
        if len(self._slot_memory) > 1:
            # The last one's is told the next.
            self._slot_memory.pop(trial_id, None)

    def fraction(self, trial_id: str) -> float:
        """Part of the declared length that the trial is known to have done."""
        target = self._targets.get(trial_id)
        return min(1.0, self._progress.get(trial_id, 0.0) / target) if target else 0.0

    @property
    def survival(self) -> Survival:
        stopped = [self.fraction(name) for name in self._stopped]
        return Survival.of(stopped, [self.fraction(name) for name in self._progress if name not in self._stopped])

    def refresh(self, now: float) -> None:
        """Make profiles anew when what was measured since is more, or other, than they explain."""
        for measured in self._measured.values():
            measured.refresh(now)

    @property
    def typical_target(self) -> float | None:
        """Declared length of the study's trials, for one that has not said its own; None when none has."""
        return statistics.median(self._targets.values()) if self._targets else None

    def _noise_history(self) -> dict[int, float]:
        return {index: statistics.median(values.values()) for index, values in self._noise.items()}

    def give_up(self, trial_id: str, layout: str) -> None:
        self._given_up.setdefault(trial_id, set()).add(layout)

    def layouts(self, trial_id: str, hints: Hints | None) -> tuple[Sequence[LayoutTerms], float]:
        """Return the layouts that the trial may have, as it or else another one has said, and the memory of a slot.

        That is the least that any of the study has: where nodes are of several kinds, it may come to all of them.
        """
        terms = hints.layouts if hints is not None and hints.layouts else self._layouts
        given_up = self._given_up.get(trial_id, ())
        left = [each for each in terms if str(each.layout) not in given_up]
        # With none left, its code says so.
        return left or terms, min(self._slot_memory.values(), default=math.inf)

    def model(self, trial_id: str, hints: Hints | None) -> TrialModel | None:
        """Return the trial's model, on the kind of nodes that most is known of.

        None before anybody has measured anything.
        """
        layout = "" if hints is None else hints.layout
        kind = self._best_known({layout} if self._kinds(layout) else {layout for _, layout in self._measured})
        if kind is None:
            return None
        slots = self._slots_per_share if hints is None else hints.slots_per_share
        return self._model(trial_id, hints, kind, slots_per_share=slots)

    def model_of(self, trial_id: str, hints: Hints | None, terms: LayoutTerms, memory: float) -> TrialModel | None:
        """Return the trial's model with that layout: as measured, else predicted from another layout.

        None where nothing was measured with any.
        """
        name, slots = str(terms.layout), terms.layout.slots_per_share
        kind = self._basis_for(trial_id, name)
        if kind is None:
            return None
        model = self._model(trial_id, hints, kind, slots_per_share=slots)
        if not self._measured[kind].has_measured(trial_id) or kind[1] != name:
            # Of what others, or it with another layout, have measured: as the predictions are to each other.
            model = model.slower(terms.seconds / (self._predicted_for(trial_id, kind) or self._of_whole(hints)))
        return replace(model, bounds=terms.bounds(model.bounds, memory))

    def _basis_for(self, trial_id: str, layout: str) -> tuple[str, str] | None:
        """Return the measurements that say most of a trial with a layout: of one that is like it, rather its own."""
        measured_keys = [key for key, measured in self._measured.items() if measured.profile is not None]

        def says(key: tuple[str, str]) -> tuple[int, bool, int, tuple[str, str]]:
            measured = self._measured[key]
            likeness = _likeness(key[1], layout)
            return likeness, measured.has_measured(trial_id), measured.num_configurations, key

        return max(measured_keys, key=says, default=None)

    def _of_whole(self, hints: Hints | None) -> float:
        """Predicted seconds of the whole model, with which was measured what no layout is known of."""
        told = hints.layouts if hints is not None and hints.layouts else self._layouts
        return min((each.layout.slots, each.layout.recomputes, each.seconds) for each in told)[2]

    def _predicted_for(self, trial_id: str, kind: tuple[str, str]) -> float | None:
        """Seconds that what was measured there had been predicted to take: of the trial itself, else typically.

        None where nobody has said.
        """
        measured = self._measured[kind]
        whose = [trial_id] if measured.has_measured(trial_id) else measured.trials
        told = [self._predicted[name][kind[1]] for name in whose if kind[1] in self._predicted.get(name, {})]
        return statistics.median(told) if told else None

    def _kinds(self, layout: str) -> list[tuple[str, str]]:
        return [key for key, measured in self._measured.items() if key[1] == layout and measured.profile is not None]

    def _best_known(self, layouts: Set[str]) -> tuple[str, str] | None:
        """Return the kind of nodes and the layout with most measurements."""
        known = [key for layout in sorted(layouts) for key in self._kinds(layout)]
        return max(known, key=lambda key: (self._measured[key].num_configurations, key)) if known else None

    def _model(self, trial_id: str, hints: Hints | None, key: tuple[str, str], *, slots_per_share: int) -> TrialModel:
        bounds = self._bounds if hints is None or hints.bounds is None else hints.bounds
        assert bounds is not None, "hints with measured steps have bounds"
        profile, factor = self._measured[key].profile_of(trial_id)
        others = [other for other in self._kinds(key[1]) if other != key]
        return TrialModel(
            profile=profile,
            bounds=bounds,
            noise=self._noise_of(hints),
            factor=factor,
            kind=key[0],
            elsewhere={other[0]: self._measured[other].profile_of(trial_id) for other in others},
            slots_per_share=slots_per_share,
        )

    def _noise_of(self, hints: Hints | None) -> float:
        """Return the noise that the trial has measured, else that of others at the same part of their length."""
        if hints is not None and hints.statistics is not None and hints.statistics.sqr > 0:
            return hints.statistics.var / hints.statistics.sqr
        fraction = 0.0
        if hints is not None and hints.target_progress:
            fraction = hints.progress / hints.target_progress
        return noise_at(self._noise_history(), fraction) or 0.0


def _likeness(name: str, other: str) -> int:
    if name == other:
        return 3
    if not name or not other:
        return 0
    one, two = Layout.from_name(name), Layout.from_name(other)
    return 2 * (one[:2] == two[:2]) or int(one.kind == two.kind)


class _Alike:
    """Step times on nodes of one kind, with one layout."""

    def __init__(self) -> None:
        self.profile: StudyProfile | None = None
        self._rows: dict[str, tuple[Observation, ...]] = {}
        self._new_rows: dict[str, list[Observation]] = {}
        self._configurations: set[Configuration] = set()
        self._factors: dict[str, float] = {}
        self._pooled_configurations = 0
        self._fitted_at = float("-inf")

    @property
    def num_configurations(self) -> int:
        return len(self._configurations)

    def note(self, trial_id: str, rows: tuple[Observation, ...]) -> None:
        before = set(self._rows.get(trial_id, ()))
        fresh = [row for row in rows if row not in before]
        self._new_rows.setdefault(trial_id, []).extend(fresh)
        self._configurations.update(row.configuration for row in fresh)
        self._rows[trial_id] = rows

    @property
    def trials(self) -> Collection[str]:
        """Return the trials that have measured anything here, as far as the profile knows."""
        return self._factors.keys()

    def has_measured(self, trial_id: str) -> bool:
        return trial_id in self._factors

    def profile_of(self, trial_id: str) -> tuple[StudyProfile, float]:
        """Return the pooled profile and the trial's factor."""
        assert self.profile is not None
        return self.profile, self._factors.get(trial_id, self.profile.typical_factor)

    def refresh(self, now: float) -> None:
        if not self._new_rows or now - self._fitted_at < REFIT_SECONDS:
            return
        if self.profile is None or self._is_surprised(self.profile):
            made = pool(self._rows)
            if made is None:
                return
            self.profile, self._factors = made
            self._pooled_configurations = len(self._configurations)
            self._fitted_at = now
        self._new_rows.clear()

    def _is_surprised(self, profile: StudyProfile) -> bool:
        if len(self._configurations) >= GROWTH * self._pooled_configurations:
            return True
        for trial_id, rows in self._new_rows.items():
            if not rows:
                continue
            factor = self._factors.get(trial_id)
            if factor is None or max(row.configuration.num_replicas for row in rows) > profile.most_replicas:
                return True
            if profile.surprise(rows, factor) > SURPRISE:
                return True
        return False
