"""Builds the policy's snapshot from the store and the launcher, and keeps what is costly to rebuild each time.

Kept between ticks: each study's profile, until its measurements say something new, how long its replicas take to
start, and the slot-seconds each trial has had. All can be rebuilt from the store, so a new scheduler starts without
them. One thread calls it.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from dist_core.goodput import Hints
from scheduler.knowledge.accounts import Usage, priorities_of
from scheduler.knowledge.coming import ComingTrials, Plans
from scheduler.knowledge.layouts import as_told, layout_fields, present_layout
from scheduler.knowledge.promise import Promise, Ranking
from scheduler.knowledge.study_history import StudyHistory
from scheduler.knowledge.survival import Survival
from scheduler.snapshot import Grant, NodeView, Placement, Snapshot, TrialView
from trials.errors import UnknownTrial
from trials.launch.base import NO_ROOM, Launcher
from trials.record import ReplicaRecord, Report, SlotQuota, Study, TrialRecord
from trials.states import TrialState
from trials.store import TrialStore
from trials.terms import StudyTerms

DEFAULT_PAUSE_SECONDS = 0.3
"""Assumed cost of a rescale until a trial has measured its own."""
DEFAULT_START_SECONDS = 2.0
"""Assumed time from a replica's launch to its first training step until the study has shown its own."""
IDLE_SECONDS = 86400.0
"""Seconds that knowledge of a study is kept in memory after anything of it ran."""
STOPPED = frozenset({TrialState.PRUNED, TrialState.CANCELLED})
SHORTEST_EPOCH_SECONDS = 1e-3
OFFER_SECONDS = 20.0
"""Longest time for which a generation is offered before the epoch in which its joiners wait, after hints that may be
half as old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StudyFacts:
    """Facts that are the same for all trials of a study at one moment."""

    study: Study | None
    quotas: Sequence[SlotQuota]
    survival: Survival
    priority: int


class Observer:
    def __init__(self, store: TrialStore, launcher: Launcher) -> None:
        self._store = store
        self._launcher = launcher
        self._documents: dict[str, Mapping[str, Any]] = {}
        self._hints: dict[str, Hints] = {}
        self._histories: dict[str, StudyHistory] = {}
        self._start_seconds: dict[str, deque[float]] = {}
        self._live_at: dict[str, float] = {}
        """Latest time that anything of each study ran, or could have been about to."""
        self._started_seen: set[str] = set()
        self._usage = Usage(store)
        self.latest_views: Mapping[str, TrialView] = {}
        self.under_way: set[str] = set()
        """Trials whose last decision was still being carried out at the last look."""
        self._coming = ComingTrials()
        self._rankings: dict[str, Ranking] = {}
        self._promised: dict[str, tuple[tuple[Set[str], Sequence[Report], bool], dict[str, Promise]]] = {}
        """Cache by study: inputs of its promises, and the promises."""

    def note_end(self, trial: TrialRecord, state: TrialState) -> None:
        """Note that the trial is over; what it measured stays with its study."""
        trial_id = trial.trial_id
        self._usage.note_end(trial)
        history = self._histories.get(trial.spec.study)
        if history is not None:
            history.note_end(trial_id, stopped=state in STOPPED)
        self._documents.pop(trial_id, None)
        self._hints.pop(trial_id, None)

    def forget(self, trial_id: str) -> None:
        """Forget a trial that ended long ago; its study keeps what it has measured and used."""
        self._usage.forget(trial_id)

    def near_epoch(self, trial_id: str) -> int | None:
        """Return the latest epoch that the trial will have begun soon; None while nothing is known of it."""
        hints = self._hints.get(trial_id)
        if hints is None:
            return None
        if not hints.epoch_seconds:
            return hints.epoch
        return hints.epoch + int(OFFER_SECONDS / max(hints.epoch_seconds, SHORTEST_EPOCH_SECONDS))

    def present_layout(self, trial: TrialRecord) -> str:
        """Return the layout with which its replicas train, as far as they have said."""
        return present_layout(trial, self._hints.get(trial.trial_id))

    def give_up_layout(self, trial: TrialRecord) -> None:
        """Give up a layout whose replicas were ended for want of memory."""
        history = self._histories.get(trial.spec.study)
        if history is not None and trial.layout:
            history.give_up(trial.trial_id, self.present_layout(trial))

    def progress(self, trial_id: str) -> float:
        """Return the progress that the trial said last; 0 while nothing is known."""
        hints = self._hints.get(trial_id)
        return 0.0 if hints is None else hints.progress

    def snapshot(
        self,
        trials: Sequence[TrialRecord],
        now: float,
        *,
        backing_off: Set[str],
        plans: Mapping[str, Plans],
        granted: Mapping[str, Grant],
    ) -> Snapshot:
        """Return the snapshot that the policy decides on, for these trials (all that are live).

        ``backing_off``: those that must not be given further replicas yet, because launches failed or losses repeat.
        ``plans``: what drivers say of their studies. ``granted``: the last decision, which may still be under way.
        """
        replicas = self._store.replicas()
        held = {(replica.node, replica.slot) for replica in replicas}
        nodes = tuple(
            NodeView(
                name=node.node,
                slots=node.slots - sum((node.node, slot) not in held for slot in node.in_use),
                kind=node.kind,
                reserved_for=node.reserved_for,
            )
            for node in self._launcher.nodes()
        )
        self._note_starts(trials, replicas)
        studies = {study.name: study for study in self._store.studies()}
        self._forget_studies({trial.spec.study for trial in trials}, studies, now)
        priorities = priorities_of(studies)
        replicas_of: dict[str, list[ReplicaRecord]] = {}
        for replica in replicas:
            replicas_of.setdefault(replica.trial_id, []).append(replica)
        self._usage.look(replicas_of, {trial.trial_id: trial.spec.study for trial in trials}, now)
        self._read_hints(trials, now)
        standing = self._promises(trials, studies)
        facts = {name: self._facts_of(name, studies, priorities) for name in {trial.spec.study for trial in trials}}
        self.under_way = set()
        views = tuple(
            self._view(
                trial,
                replicas_of.get(trial.trial_id, []),
                facts[trial.spec.study],
                standing.get(trial.trial_id),
                now,
                self._launcher.quotas(trial.trial_id),
                backs_off=trial.trial_id in backing_off,
                granted=granted.get(trial.trial_id),
            )
            for trial in trials
        )
        self.latest_views = {view.trial_id: view for view in views}
        return Snapshot(
            now=now,
            nodes=nodes,
            trials=views,
            queued=tuple(self._launcher.queued()),
            coming=self._coming_views(trials, studies, priorities, plans, now, sum(node.slots for node in nodes)),
        )

    def _coming_views(
        self,
        trials: Sequence[TrialRecord],
        studies: Mapping[str, Study],
        priorities: Mapping[str, int],
        plans: Mapping[str, Plans],
        now: float,
        slots: int,
    ) -> tuple[TrialView, ...]:
        """Return the trials that drivers are about to submit, as far as they could have slots."""
        self._coming.look(trials, plans, now)
        views: list[TrialView] = []
        for name, study in studies.items():
            history = self._histories.get(name)
            number, latest = self._coming.of(name, now)
            if study.owner is None or history is None or latest is None:
                continue
            try:
                quotas = self._launcher.quotas(latest.trial_id)
            except UnknownTrial:
                continue
            facts = self._facts_of(name, studies, priorities)
            for index in range(min(number, slots // max(1, latest.spec.min_slots))):
                trial = replace(
                    latest,
                    trial_id=f"coming-{index}-{name}",
                    state=TrialState.PENDING,
                    hold=None,
                    generation=0,
                    members=(),
                    layout="",
                    submitted_at=now,
                )
                views.append(self._view(trial, [], facts, None, now, quotas, backs_off=False))
        return tuple(views[:slots])

    def _forget_studies(self, live: Set[str], studies: Mapping[str, Study], now: float) -> None:
        """Forget what was learned of studies in which nothing has run for long, and nobody is about to run anything.

        Should one go on, what its ended trials have measured is read again.
        """
        for name in live | {name for name, study in studies.items() if study.owner is not None}:
            self._live_at[name] = now
        for name in [name for name, at in self._live_at.items() if now - at > IDLE_SECONDS]:
            for learned in (self._live_at, self._histories, self._start_seconds):
                learned.pop(name, None)
            self._coming.forget(name)
            if name not in studies:
                self._usage.forget_study(name)

    def _read_hints(self, trials: Sequence[TrialRecord], now: float) -> None:
        """Parse what is new, and hand it to the studies' histories."""
        for study in {trial.spec.study for trial in trials} - self._histories.keys():
            self._histories[study] = self._history_of(study)
        documents = self._store.hints([trial.trial_id for trial in trials])
        for trial in trials:
            document = documents.get(trial.trial_id)
            if document is None or self._documents.get(trial.trial_id) == document:
                continue
            self._documents[trial.trial_id] = document
            self._hints[trial.trial_id] = Hints.from_json(document)
            self._histories[trial.spec.study].note(trial.trial_id, self._hints[trial.trial_id])
        for study in {trial.spec.study for trial in trials}:
            self._histories[study].refresh(now)

    def _history_of(self, study: str) -> StudyHistory:
        """Return the study's history, with what its trials before this scheduler's start have left."""
        history = StudyHistory()
        ended = {row.trial_id: row for row in self._store.trials() if row.spec.study == study and row.state.is_final}
        for trial_id, document in self._store.hints(list(ended)).items():
            history.note(trial_id, Hints.from_json(document))
            history.note_end(trial_id, stopped=ended[trial_id].state in STOPPED)
        return history

    def _note_starts(self, trials: Sequence[TrialRecord], replicas: Sequence[ReplicaRecord]) -> None:
        """Note how long replicas of each study take from launch to their first training step."""
        studies_of = {trial.trial_id: trial.spec.study for trial in trials}
        self._started_seen &= {replica.replica_id for replica in replicas}
        for replica in replicas:
            if replica.ready_at is None or replica.replica_id in self._started_seen:
                continue
            self._started_seen.add(replica.replica_id)
            study = studies_of.get(replica.trial_id)
            if study is not None:
                known = self._start_seconds.setdefault(study, deque(maxlen=15))
                known.append(max(0.0, replica.ready_at - replica.launched_at))

    def _facts_of(self, name: str, studies: Mapping[str, Study], priorities: Mapping[str, int]) -> _StudyFacts:
        return _StudyFacts(
            study=studies.get(name),
            quotas=_quotas_of_studies(studies, name),
            survival=self._histories[name].survival,
            priority=priorities.get(name, 0),
        )

    def _view(
        self,
        trial: TrialRecord,
        replicas: Sequence[ReplicaRecord],
        facts: _StudyFacts,
        promise: Promise | None,
        now: float,
        launchers_quotas: Sequence[SlotQuota],
        *,
        backs_off: bool,
        granted: Grant | None = None,
    ) -> TrialView:
        study, survival = facts.study, facts.survival
        terms = StudyTerms() if study is None else study.terms
        placement: Placement = Counter(replica.node for replica in replicas)
        # Between two sizes it holds slots of both; what is decided next starts from where it is going.
        hints = self._hints.get(trial.trial_id)
        layout = present_layout(trial, hints)
        # So does one that starts: slots that an ended trial's replicas are just leaving are its own already.
        under_way = granted is not None and granted.slots > 0 and bool(trial.members or replicas) and not backs_off
        if granted is not None and under_way:
            going_to = as_told(granted.layout, hints) if granted.layout else layout
            under_way = placement != granted.placement or layout != going_to
            placement, layout = granted.placement, going_to
        if under_way:
            self.under_way.add(trial.trial_id)
        history = self._histories[trial.spec.study]
        remaining = history.typical_target
        if hints is not None:
            remaining = None if hints.target_progress is None else max(0.0, hints.target_progress - hints.progress)
        held = trial.hold
        if held is None and backs_off and not replicas:
            held = "waits a moment before the next attempt, because it could not be launched"
            if trial.reason.code in ("lost", "launch_failed", NO_ROOM):
                held = trial.reason.sentence
        fraction = history.fraction(trial.trial_id)
        goes_on = survival.probability(fraction, promise.weight if promise is not None and promise.rank else None)
        pause = hints.rescale_pause_seconds if hints is not None else None
        return TrialView(
            trial_id=trial.trial_id,
            study=trial.spec.study,
            study_title="" if study is None else study.title,
            layout=layout,
            **layout_fields(trial, hints, history, layout, starts=bool(replicas)),
            placement=placement,
            can_rescale=trial.state is TrialState.RUNNING
            and trial.generation > 0
            and not trial.switching
            and not backs_off
            and not under_way,
            held=held,
            goes_on=goes_on,
            expected_part=goes_on + (1.0 - goes_on) * survival.part_until_stopped(fraction),
            promise=promise.weight if promise is not None else 0.5,
            rank_sentence=promise.sentence if promise is not None else "nothing reported yet",
            progress=hints.progress if hints is not None else 0.0,
            remaining_progress=remaining,
            pause_seconds=DEFAULT_PAUSE_SECONDS if pause is None else pause,
            start_seconds=statistics.median(self._start_seconds.get(trial.spec.study, (DEFAULT_START_SECONDS,))),
            since_rescale_seconds=0.0 if under_way else now - trial.rescaled_at,
            steps_measured=0 if under_way else _steps_measured(hints, len(placement), len(replicas)),
            submitted_at=trial.submitted_at,
            attained_slot_seconds=self._usage.of_trial(trial.trial_id),
            served_seconds=self._usage.served_seconds(trial.trial_id),
            num_rescales=max(0, trial.generation - 1),
            preemptible=trial.spec.preemptible,
            only_on=trial.spec.only_on,
            study_weight=terms.weight,
            study_priority=facts.priority,
            quotas=(*facts.quotas, *launchers_quotas),
            goal=terms.goal,
            deadline_in=None if terms.deadline_at is None else terms.deadline_at - now,
            budget_left=None
            if terms.budget_slot_hours is None
            else terms.budget_slot_hours * 3600.0 - self._usage.of_study(trial.spec.study),
        )

    def _promises(self, trials: Sequence[TrialRecord], studies: Mapping[str, Study]) -> dict[str, Promise]:
        """Return the promises of these trials, computed anew where there are reports or other trials than before."""
        result: dict[str, Promise] = {}
        live: dict[str, set[str]] = {}
        for trial in trials:
            live.setdefault(trial.spec.study, set()).add(trial.trial_id)
        for name, trials_of_study in live.items():
            study = studies.get(name)
            maximize = study is not None and study.direction == "maximize"
            asked = frozenset(trials_of_study), self._store.reports(name), maximize
            promised = self._promised.get(name)
            if promised is None or promised[0] != asked:
                ranking = self._ranking_of(name, maximize=maximize)
                promised = self._promised[name] = asked, ranking.promises(_by_trial(asked[1]), trials_of_study)
            result.update(promised[1])
        for forgotten in (self._promised, self._rankings):
            for name in forgotten.keys() - live.keys():
                forgotten.pop(name)
        return result

    def _ranking_of(self, name: str, *, maximize: bool) -> Ranking:
        known = self._rankings.get(name)
        if known is None or known.maximize != maximize:
            known = self._rankings[name] = Ranking(maximize=maximize)
        return known


def _by_trial(reports: Sequence[Report]) -> dict[str, list[Report]]:
    found: dict[str, list[Report]] = {}
    for report in reports:
        found.setdefault(report.trial_id, []).append(report)
    return found


def _steps_measured(hints: Hints | None, nodes: int, slots: int) -> int:
    """Return the number of steps measured on so many slots and nodes."""
    if hints is None:
        return 0
    shares = slots // hints.slots_per_share
    at_present = min(nodes, shares), shares, hints.layout
    return sum(
        row.count
        for row in hints.observations
        if (row.configuration.num_nodes, row.configuration.num_replicas, row.configuration.layout) == at_present
    )


def _quotas_of_studies(studies: Mapping[str, Study], name: str) -> list[SlotQuota]:
    """Return a study's own quotas, and those of the study that was there beforehand under its title."""
    study = studies.get(name)
    names = () if study is None else dict.fromkeys((name, study.title))
    quotas = {each: studies[each].terms.quota for each in names if each in studies}
    return [
        SlotQuota(f"study {each}", quota, f"its study's quota of {quota} slots leaves too few for it")
        for each, quota in quotas.items()
        if quota is not None
    ]
