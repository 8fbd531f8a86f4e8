"""PopulationSweep: runs a population's members on a scheduler, each in a thread of its own."""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from dist_core.errors import NothingLeftToTrain
from scheduler.errors import RequestRefused, SchedulerError
from tuner_bridge.errors import InvalidSweep, SweepInterrupted, TrialLost
from tuner_bridge.optuna.bandit import Bandit, Stretch
from tuner_bridge.optuna.population import (
    ELASTIC,
    MEMBER,
    PARENT,
    POPULATION,
    Member,
    Population,
    Standings,
    begin_stretch,
)
from tuner_bridge.optuna.population_before import Left, PopulationBefore, stretch_before
from tuner_bridge.optuna.trial_driver import TRIAL_ATTRIBUTE, Begun, OptunaDriver

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
WAITS = "waits until the other members of its population have trained as long"


class PopulationSweep:
    """Runs a population's members, each in a thread of its own.

    ``catch``: exceptions that end a member and not the sweep. ``timeout``: seconds after which no stretch begins.
    ``resume``: go on with the members of the study's latest population, where an earlier driver has left some.
    """

    def __init__(
        self,
        driver: OptunaDriver,
        population: Population,
        *,
        catch: tuple[type[Exception], ...] = (),
        callbacks: Sequence[Callable[[optuna.Study, FrozenTrial], None]] = (),
        timeout: float | None = None,
        resume: bool = False,
    ) -> None:
        self._driver = driver
        self._study = driver.study
        self._population = population
        self._catch = catch
        self._callbacks = callbacks
        self._ends_at = None if timeout is None else time.monotonic() + timeout
        self._rng = random.Random(population.seed)
        self._numpy = np.random.default_rng(population.seed)
        self._bandit = Bandit()
        self._drawer = optuna.samplers.RandomSampler(seed=population.seed)
        self._standings = Standings()
        self._resume = resume
        self._outlives_this_process = not isinstance(self._study._storage, optuna.storages.InMemoryStorage)
        self._stretches: dict[str, list[optuna.Trial | FrozenTrial]] = {}
        """Stretches of each elastic trial, in order."""
        self._error: BaseException | None = None
        maximizes = self._study.direction is StudyDirection.MAXIMIZE
        self._sign = 1.0 if maximizes else -1.0

    def run(self) -> None:
        """Train all members to their end. Raises what ended the sweep."""
        before = self._before() if self._resume else None
        if before is None:
            self._mark = uuid.uuid4().hex[:8]
            self._study.set_user_attr(POPULATION, self._mark)
        else:
            self._take_up(before)
        for index in range(len(self._standings.members), self._population.size):
            self._standings.members.append(Member(index, self._ask(index)))
        threads = [
            threading.Thread(target=self._train, args=(member,), name=f"member-{member.index}", daemon=True)
            for member in self._standings.members
            if not member.is_over
        ]
        if not threads:
            logger.warning(
                "all members of the population of study %r have come to their end, so there is nothing to resume",
                self._study.study_name,
            )
            return
        for thread in threads:
            thread.start()
        for thread in threads:
            # With a limit, so that Ctrl-C is heard, and so that a pause which the scheduler missed is asked for again.
            while thread.is_alive():
                thread.join(LOOK_SECONDS)
                with self._standings.lock:
                    self._share_slots()
        if self._error is not None:
            raise self._error
        if not any(member.stretches for member in self._standings.members):
            raise InvalidSweep(
                f"Population's every is {self._population.every!r}, but no trial reported a step that ends a stretch "
                f"({self._population.stretch - 1}, {2 * self._population.stretch - 1}, ...), so no member was compared "
                "with another; shorten it, or report each epoch with trial.report(value, epoch)"
            )

    def _ask(self, index: int) -> optuna.Trial:
        """Return the first stretch of a member."""
        trial = self._study.ask()
        trial.set_user_attr(POPULATION, self._mark)
        trial.set_user_attr(MEMBER, index)
        return trial

    # ------------------------------------------------------------------ what an earlier driver has left

    def _before(self) -> PopulationBefore | None:
        """Return the study's latest population; None where it has none yet. Raises InvalidSweep."""
        mark = self._study.user_attrs.get(POPULATION)
        if mark is None:
            return None
        self._mark = mark
        trials = [
            trial
            for trial in self._study.get_trials(deepcopy=False)
            if trial.user_attrs.get(POPULATION) == mark and MEMBER in trial.user_attrs
        ]
        most = max((trial.user_attrs[MEMBER] for trial in trials), default=0)
        if most >= self._population.size:
            raise InvalidSweep(
                f"Population's size is {self._population.size}, but the population to resume has at least {most + 1} "
                "members; resume it with the size that it was started with"
            )
        return PopulationBefore(self._population, trials, self._driver.submitted(), self._sign)

    def _take_up(self, before: PopulationBefore) -> None:
        """Set up the members as they were left, and end what trains for none of them."""
        self._stretches = {trial_id: list(stretches) for trial_id, stretches in before.stretches.items()}
        for gain in before.gains():
            self._bandit.note(gain)
        for index in range(self._population.size):
            left = before.member(index)
            self._standings.members.append(Member(index, self._ask(index)) if left is None else self._as_left(left))
        for trial_id in before.deserted({member.trial_id for member in self._standings.members}):
            self._driver.cancel(trial_id, "its member goes on with another member's state")
        for member in self._standings.members:
            if member.goes_on:
                # It may have been waiting for others, whom nobody has led on meanwhile.
                self._ask_for(member, "resume", {})

    def _as_left(self, left: Left) -> Member:
        stretch = left.stretch
        member = Member(
            index=stretch.user_attrs[MEMBER],
            trial=optuna.Trial(self._study, stretch._trial_id),
            trial_id=left.trial_id,
            goes_on=bool(left.trial_id),
            stretches=left.stretches,
            score=left.began_with if left.goes_back else None,
            began_with=left.began_with,
            time=left.time,
            is_over=left.is_over,
        )
        if PARENT in stretch.user_attrs and not left.goes_back:
            if not stretch.intermediate_values:
                member.parent_id = self._driver.parent_of(member.trial)
            elif left.parent is not None:
                # The driver may have been killed between the first report and the naming of the parent.
                member.trial.set_user_attr(PARENT, left.parent)
        if left.ended_with is not None and not left.is_over:
            member.score = member.began_with = self._sign * left.ended_with
            member.time += 1
            if stretch.state is TrialState.RUNNING:
                member.stretches += 1
                self._tell(member.trial, left.ended_with)
            member.trial = self._begin(member, stretch, stretch.params)
            self._stretches[member.trial_id].append(member.trial)
        return member

    # ------------------------------------------------------------------ a member's thread

    def _train(self, member: Member) -> None:
        try:
            self._study._thread_local.in_optimize_loop = True
            while self._train_on(member):
                pass
        except BaseException as error:
            self._fail(error)
        finally:
            with self._standings.lock:
                member.is_over = True
                self._share_slots()

    def _fail(self, error: BaseException) -> None:
        """End the sweep with this error, unless it ends with another one already."""
        self._error = self._error or error
        self._driver.interrupt()

    def _train_on(self, member: Member) -> bool:
        """Train a member until it ends; True where a successor takes its place."""
        begun = self._begun(member.trial_id) if member.goes_on else None

        def submitted(trial_id: str) -> None:
            with self._standings.lock:
                member.trial_id, member.goes_on = trial_id, False
                if begun is None:
                    self._stretches[trial_id] = [member.trial]
                member.is_held = False
                self._share_slots()

        try:
            value = self._driver.run(
                member.trial, follow=lambda *report: self._follow(member, *report), submitted=submitted, begun=begun
            )
        except optuna.TrialPruned:
            with self._standings.lock:
                if member.successor is not None:
                    # The elastic trial that it had is over, and nobody begins with its state any more.
                    member.trial, member.successor, member.trial_id = member.successor, None, ""
                    return True
            if not member.is_to_end:
                self._tell(member.trial, None, TrialState.PRUNED)
        except SweepInterrupted:
            if not self._outlives_this_process:
                self._tell(member.trial, None, TrialState.FAIL)
            raise
        except NothingLeftToTrain:
            # The winner came to its end while its state was on its way.
            self._tell(member.trial, None, TrialState.PRUNED)
            return self._goes_on_from_another(member)
        except Exception as error:
            if isinstance(error, RequestRefused | TrialLost) and self._has_lost_its_parent(member):
                self._tell(member.trial, None, TrialState.PRUNED)
                return self._goes_on_from_another(member)
            self._tell(member.trial, None, TrialState.FAIL)
            if not isinstance(error, self._catch):
                raise
        else:
            self._tell(member.trial, value)
        return False

    def _begun(self, trial_id: str) -> Begun:
        """Return an elastic trial that an earlier driver has submitted."""
        stretches = [self._study._storage.get_trial(each._trial_id) for each in self._stretches[trial_id]]
        return Begun(stretches[0], frozenset(step for each in stretches for step in each.intermediate_values))

    def _follow(
        self, member: Member, trial: optuna.Trial, step: int, value: float, is_last: bool
    ) -> optuna.Trial | None:
        """Return the Optuna trial that a member's next reports belong to; None if the member is to end."""
        if member.parent_id:
            self._name_parent(member, trial, step)
        if not self._population.ends_stretch(step):
            return trial
        with self._standings.lock:
            score = self._sign * value
            if member.began_with is not None:
                gain = score - member.began_with
                self._bandit.note(Stretch(trial.params, member.time, member.began_with, gain))
            member.score = member.began_with = score
            member.time += 1
            member.stretches += 1
            if is_last:
                member.has_trained_all = True
                return trial
            self._tell(trial, value)
            if self._is_over:
                member.is_to_end = True
                self._driver.cancel(member.trial_id, "the sweep's time is over, or it was told to stop")
                return None
            winner = self._population.winner_for(member.index, self._standings.scores, self._rng)
            if winner is not None:
                self._replace(member, self._standings.members[winner])
                self._share_slots()
                return None
            member.trial = self._begin(member, trial, trial.params)
            self._stretches[member.trial_id].append(member.trial)
            self._share_slots()
            return member.trial

    @property
    def _is_over(self) -> bool:
        return self._study._stop_flag or (self._ends_at is not None and time.monotonic() > self._ends_at)

    def _replace(self, member: Member, winner: Member) -> None:
        member.successor = self._successor(member, winner)
        self._driver.cancel(
            member.trial_id,
            f"trial {member.successor.number} takes its place in the population, with the state of trial "
            f"{winner.trial.number}",
        )

    def _has_lost_its_parent(self, member: Member) -> bool:
        """Tell whether the winner was itself replaced before a successor could get its state."""
        with self._standings.lock:
            return bool(member.parent_id) and not any(
                each.trial_id == member.parent_id and not each.is_over and each.successor is None
                for each in self._standings.members
            )

    def _name_parent(self, member: Member, trial: optuna.Trial, step: int) -> None:
        """Name the stretch whose state a successor has: the winner trained on until it was asked to save."""
        with self._standings.lock:
            stretches, member.parent_id = self._stretches[member.parent_id], ""
            present = [self._study._storage.get_trial(stretch._trial_id) for stretch in stretches]
        parent = stretch_before(step, present)
        if parent is not None:
            trial.set_user_attr(PARENT, parent)

    def _goes_on_from_another(self, member: Member) -> bool:
        """Have a member go on from the best that still trains; False where there is none."""
        with self._standings.lock:
            scores = self._standings.scores
            scores.pop(member.index, None)
            if not scores or self._is_over:
                return False
            winner = self._standings.members[max(scores, key=lambda each: scores[each])]
            member.trial = self._successor(member, winner)
        return True

    def _successor(self, member: Member, winner: Member) -> optuna.Trial:
        """Return a stretch that begins with the winner's state and other parameters; under the standings' lock."""
        parameters, spaces = winner.trial.params, winner.trial.distributions
        member.began_with, member.time = winner.score, winner.time
        member.parent_id = winner.trial_id
        # Until it has trained there is no state of its own that others could begin with.
        member.score = None
        proposed: dict[str, Any] = {}
        if self._population.explore == "pb2" and winner.score is not None:
            others = [each for each in self._standings.members if each is not member]
            proposed = self._bandit.propose(
                self._population.to_change(spaces),
                Stretch(parameters, winner.time, winner.score),
                Standings(others).under_way(),
                self._numpy,
            )
        parameters = self._population.explored(parameters, spaces, self._draw, self._rng, proposed)
        return self._begin(member, winner.trial, parameters, parent_id=winner.trial_id)

    def _draw(self, name: str, space: BaseDistribution) -> Any:
        trial = self._study._storage.get_trial(self._standings.members[0].trial._trial_id)
        return self._drawer.sample_independent(self._study, trial, name, space)

    def _begin(
        self, member: Member, before: optuna.Trial | FrozenTrial, parameters: dict[str, Any], parent_id: str = ""
    ) -> optuna.Trial:
        """Begin a stretch behind another one; ``parent_id``: elastic trial of the member whose state it takes over."""
        attributes = {
            POPULATION: self._mark,
            MEMBER: member.index,
            PARENT: before.number,
            TRIAL_ATTRIBUTE: self._driver.study_key,
        }
        if not parent_id:
            attributes[ELASTIC] = member.trial_id
        made = begin_stretch(self._study, parameters, before.distributions, attributes)
        if parent_id:
            self._driver.begins_with(made.number, parent_id)
        return made

    def _tell(self, trial: optuna.Trial, value: Any, state: TrialState | None = None) -> None:
        frozen = self._study.tell(trial, value, state)
        for each in self._callbacks:
            try:
                each(self._study, frozen)
            except BaseException as error:
                self._fail(error)

    # ------------------------------------------------------------------ slots that are too few for all

    def _share_slots(self) -> None:
        """Have members that are ahead wait where slots are too few for all; under the standings' lock."""
        present = [each for each in self._standings.members if not each.is_over and each.trial_id]
        if len(present) * self._driver.template.min_slots <= self._driver.slots:
            waiting: list[Member] = []
        else:
            waiting = [each for each in present if self._standings.to_hold(each)]
        for member in present:
            if member.successor is not None or member.is_held == (member in waiting):
                continue
            action, body = ("pause", {"why": WAITS}) if member in waiting else ("resume", {})
            if self._ask_for(member, action, body):
                member.is_held = member in waiting

    def _ask_for(self, member: Member, action: str, body: dict[str, Any]) -> bool:
        """Have the scheduler pause or resume a member; False where it has ended just now, or is not paused."""
        try:
            self._driver.client.request("POST", f"/trials/{member.trial_id}/{action}", body)
        except SchedulerError:
            return False
        return True
