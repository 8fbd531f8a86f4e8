"""ElasticTrial: the trial object that an objective sees in a replica.

It has Optuna's interface and no sampler: each call goes to the real ``optuna.Trial`` in the driver. Suggestions are
asked for by every replica on its own, before any group exists; the driver's trial gives one answer per name, so all
replicas and all restarts get the same value bit for bit. ``report`` and ``should_prune`` act once per trial: rank 0
asks, every rank gets its answer or its exception.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import numbers
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    json_to_distribution,
)
from optuna.study import StudyDirection

import dist_core
from dist_core.link.client import LARGEST_STEP
from dist_core.state.states import FunctionState
from dist_core.trial.plain_replica import Participant
from tuner_bridge.in_replica.run import ask_driver
from tuner_bridge.in_replica.wire import decode_exception, decode_value, encode_exception, encode_value
from tuner_bridge.optuna.ahead import TakenAhead, space_of, suggest
from tuner_bridge.optuna.reports import ALONE_AFTER_SECONDS, PendingReports, Report

STATE = "optuna-reports"


class ElasticTrial(optuna.Trial):
    """An ``optuna.Trial`` to those who look, so that artifacts, integrations and callbacks take it for one.

    ``promise_metric``: of those given to ``report_metrics``, the one that the scheduler judges the trial by.
    """

    def __init__(
        self,
        replica: Participant,
        number: int,
        storage_id: int = 0,
        *,
        promise_metric: str | None = None,
        prunes: bool = True,
    ) -> None:
        """``prunes``: whether the study has a pruner that could ever say yes."""
        # Not Optuna's: that one would draw parameters.
        self._replica = replica
        self._number = number
        self._trial_id = storage_id
        self._promise_metric = promise_metric
        self._calls = itertools.count()
        self._prunes = prunes
        self.has_reported = False
        """True once this process has reported since it took up the trial; the same on all replicas."""
        self._steps: set[int] = set()
        """Steps reported in this run of the objective: one that resumes reports again what it had."""
        self._reports = PendingReports(
            self._tell_reports, lambda: self._core.reports, lambda: self._core.leave_if_asked()
        )
        self._suggested: dict[str, Any] = {}
        self._ahead = TakenAhead()
        self._draws = threading.Lock()
        """Threads of an objective draw one after the other: what comes ahead is for whoever draws next."""
        self._teller: threading.Timer | None = None
        self.study: Any = _StudyOfTrial(self)
        self.storage: Any = _StorageOfTrial(self)

    def __copy__(self) -> ElasticTrial:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ElasticTrial:
        # Whoever holds it asks for the same trial.
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a trial cannot be pickled for another process: draw its parameters in the objective, send those "
            "(trial.params), and report what comes back there"
        )

    @property
    def _core(self) -> Participant:
        """The training core, once the objective's code has use for one."""
        return self._replica.present

    # ------------------------------------------------------------------ asking the driver

    def _ask(self, method: str, **arguments: Any) -> Any:
        """Ask the driver; raise the exception that the real trial raised.

        Pending reports go along.
        """
        reports = self._reports.take() if self._core.reports else []
        try:
            answer = self._put(method, arguments, reports)
        except BaseException:
            self._reports.give_back()
            raise
        self._reports.arrived()
        return _content(answer)

    def _put(
        self, method: str, arguments: Mapping[str, Any], reports: Sequence[Report], **options: Any
    ) -> dict[str, Any]:
        environment = self._core.environment
        assert environment is not None
        news: dict[str, Any] = {"reports": [[each["step"], each["value"]] for each in reports]} if reports else {}
        position = getattr(self._core, "position", None)
        if reports and position is not None and position.limit is not None and position.epoch >= position.limit - 1:
            news["is_last"] = True
        took = self._ahead.untold
        if took:
            news["took"] = took
        # Processes that the objective forks count from where this one was.
        question = f"{environment.replica_id}/{os.getpid()}.{next(self._calls)}"
        answer = ask_driver(self._core, question, method, {**arguments, **news}, reports=reports, **options)
        self._ahead.told(took)
        return answer

    def _tell_reports(self, reports: Sequence[Report]) -> None:
        """Send reports from a thread, when no question has taken them along."""
        _content(self._put("reports", {}, reports, look_up=lambda: None))

    def finish_reports(self) -> None:
        """Wait until the study has all that was reported; raise what it raised."""
        self._stay_registered()
        if self._core.reports and not (self._reports.are_settled and not self._ahead.untold):
            self._ask("reports")

    def leave_if_asked(self) -> None:
        """Leave if asked to, while nothing is reported; raise ReplicaExit."""
        self._core.leave_if_asked()

    def close(self) -> None:
        """Close: the objective is done with the trial."""
        teller = self._teller
        if teller is not None:
            teller.cancel()
            teller.join()
        self._reports.close()

    def _stay_registered(self) -> None:
        """Register the trial's states again when the user's code runs again from its top."""
        if not self._core.registry.has(STATE):
            self._steps.clear()
            self._core.registry.register(STATE, FunctionState(self._save, self._load, lambda parents: None))

    def _save(self) -> dict[str, Any]:
        return {**self._reports.state_dict(), "has_reported": self.has_reported}

    def _load(self, state: dict[str, Any]) -> None:
        # A joiner asks together with the others from its first report on, or not.
        self.has_reported = state["has_reported"]
        self._reports.load_state_dict(state)

    def _once(self, act: Callable[[], Any], *, otherwise: Any = None) -> Any:
        """Run ``act`` on rank 0 and give its result, or raise its exception, on every rank.

        ``otherwise``: the result in a training step in which a replica is lost, and whose body runs again.
        """
        self._core.raise_postponed()
        if self._core.stands_alone:
            return act()
        acted: list[dict[str, Any]] = []

        def tell(group: Any) -> Any:
            if group.rank == 0 and not acted:
                try:
                    acted.append({"value": encode_value(act(), lenient=True)})
                except Exception as error:
                    acted.append({"exception": encode_exception(error)})
            return group.broadcast_json(acted[0] if group.rank == 0 else None)

        answer = self._core.together(tell, otherwise=lambda: {"value": encode_value(otherwise)})
        if self._core.broken is None and not self._core.reports:
            self._reports.forget()
        return _content(answer)

    @property
    def _stands_outside(self) -> bool:
        """Tell whether this replica has to stay silent, because the value was reported or others report it."""
        core = self._core
        return core.passes_do_not_count or not (core.joined or core.reports)

    @property
    def speaks(self) -> bool:
        """Tell whether this replica tells the trial's value."""
        return self._core.reports and not self._core.is_outside

    def last_report(self) -> float | None:
        """Return the value at the trial's last step, whichever replica reported it; None without any."""
        found = self._ask("last_report")
        return None if found is None else float(found)

    # ------------------------------------------------------------------ suggestions

    def _draw(self, method: str, **arguments: Any) -> Any:
        """Return the value for a suggestion (of a choice its index), which may have come with an earlier answer."""
        name = arguments["name"]
        with self._draws:
            try:
                taken = self._ahead.take(name, space_of(method, arguments))
            except (TypeError, ValueError):
                # Optuna says what is wrong with it.
                taken = None
            if taken is not None:
                self._tell_soon()
                return taken[0]
            environment = self._core.environment
            assert environment is not None
            answer = self._ask(method, **arguments, asker=f"{environment.replica_id}/{os.getpid()}")
            self._ahead.came(answer["ahead"])
        return answer["value"]

    def _tell_soon(self) -> None:
        """Have the study hear what was taken where no question follows soon."""
        if self._core.reports and self._teller is None:
            self._teller = threading.Timer(ALONE_AFTER_SECONDS, self._tell_taken)
            self._teller.daemon = True
            self._teller.start()

    def _tell_taken(self) -> None:
        # What is taken from now on has a timer of its own.
        self._teller = None
        if self._ahead.untold:
            # What does not arrive goes with the next question, or at the end; that one raises what is wrong.
            with contextlib.suppress(Exception):
                self._tell_reports([])

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        value = float(self._draw("suggest_float", name=name, low=low, high=high, step=step, log=log))
        self._suggested[name] = value
        return value

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        value = int(self._draw("suggest_int", name=name, low=low, high=high, step=step, log=log))
        self._suggested[name] = value
        return value

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        # Taken once: what is no sequence is read in another order, or not at all, the second time.
        choices = tuple(choices)
        plain = [choice.item() if type(choice).__module__ == "numpy" else choice for choice in choices]
        for choice in plain:
            if not (choice is None or isinstance(choice, (bool, int, float, str))):
                raise ValueError(
                    f"choice {choice!r} of {name!r} is a {type(choice).__name__}; an elastic trial takes None, bool, "
                    "int, float and str. Suggest a name or an index and look the object up"
                )
        index = self._draw("suggest_categorical", name=name, choices=plain)
        self._suggested[name] = choices[index]
        return choices[index]

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        """Draw from a distribution, as libraries do that are handed a space."""
        return suggest(self, name, distribution)

    # ------------------------------------------------------------------ reports

    def report(self, value: float, step: int) -> None:
        """Report the objective at ``step``, once per trial; ``step`` has to mean the same in all trials."""
        if self._stands_outside:
            return

        self._core.raise_postponed()
        self._stay_registered()
        plain = issubclass(type(step), numbers.Integral) and 0 <= step <= LARGEST_STEP
        try:
            number = float(value)
        except (TypeError, ValueError):
            plain = False
        report = Report(step=int(step), value=number, progress=self._core.progress) if plain else None

        if report is not None:
            if report["step"] in self._steps:
                warnings.warn(f"step {step} has already been reported, and keeps its first value", stacklevel=2)
                return
            self._steps.add(report["step"])
            self._reports.add(report)
            if not self.has_reported:
                # Optuna has its say on the first one: the study may take no reports at all.
                self._once(lambda: self._ask("reports"))
        elif not self.has_reported:
            self._once(lambda: self._report_unusual(value, step))
        elif self._core.reports:
            # And on what is unusual. The replicas do not meet any more, for what is unusual may be so on one only.
            self._report_unusual(value, step)
        self.has_reported = True

    def _report_unusual(self, value: Any, step: Any) -> None:
        """Raise what Optuna raises for such a value or step, if it does."""
        self._ask("report", value=value, step=step)
        dist_core.report(float(value), int(step))

    def report_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Tell how a trial with several objectives is doing, which Optuna's ``report`` does not take.

        The latest values become the user attribute ``metrics``.
        """
        if self._stands_outside:
            return

        def act() -> None:
            values = {name: float(value) for name, value in metrics.items()}
            self._ask("set_user_attr", key="metrics", value={**values, "step": int(step)})
            if self._promise_metric in values:
                dist_core.report(values[self._promise_metric], int(step))

        self._once(act)

    def should_prune(self) -> bool:
        if self._stands_outside:
            return False
        self._core.raise_postponed()
        self._stay_registered()
        if not self._prunes and self.has_reported:
            return False
        return bool(self._once(lambda: self._ask("should_prune"), otherwise=False))

    def set_user_attr(self, key: str, value: Any) -> None:
        if not self._stands_outside:
            self._once(lambda: self._ask("set_user_attr", key=key, value=value))

    def set_constraint(self, key: str, value: float) -> None:
        if not self._stands_outside:
            self._once(lambda: self._ask("set_constraint", key=key, value=value))

    def set_system_attr(self, key: str, value: Any) -> None:
        if not self._stands_outside:
            self._once(lambda: self._ask("set_system_attr", key=key, value=value))

    # ------------------------------------------------------------------ what is known

    @property
    def params(self) -> dict[str, Any]:
        return dict(self._suggested)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        return {name: json_to_distribution(text) for name, text in self._ask("distributions").items()}

    @property
    def user_attrs(self) -> dict[str, Any]:
        return dict(self._ask("user_attrs"))

    @property
    def system_attrs(self) -> dict[str, Any]:
        return dict(self._ask("system_attrs"))

    @property
    def relative_params(self) -> dict[str, Any]:
        raise AttributeError("relative_params is not available in a replica: the sampler runs in the driver")

    @property
    def constraints(self) -> dict[str, float]:
        return dict(self._ask("constraints"))

    @property
    def datetime_start(self) -> datetime.datetime | None:
        text = self._ask("datetime_start")
        return datetime.datetime.fromisoformat(text) if text else None

    @property
    def number(self) -> int:
        return self._number

    def __repr__(self) -> str:
        return f"ElasticTrial(number={self._number}, optuna={optuna.__version__})"


def _content(answer: Mapping[str, Any]) -> Any:
    if "exception" in answer:
        raise decode_exception(answer["exception"])
    return decode_value(answer["value"])


_OF_STUDY = ("study_name", "best_value", "best_params", "user_attrs", "metric_names")


class _StudyOfTrial:
    """Study as a replica sees it; the real one lives in the driver."""

    def __init__(self, trial: ElasticTrial) -> None:
        self._trial = trial

    def _get(self, name: str) -> Any:
        return self._trial._ask("study", name=name)

    def stop(self) -> None:
        """End the sweep after the trials that run."""
        if not self._trial._stands_outside:
            self._trial._once(lambda: self._trial._ask("stop_study"))

    @property
    def direction(self) -> StudyDirection:
        return StudyDirection[self._get("direction")]

    @property
    def directions(self) -> list[StudyDirection]:
        return [StudyDirection[name] for name in self._get("directions")]

    def set_user_attr(self, key: str, value: Any) -> None:
        if not self._trial._stands_outside:
            self._trial._once(lambda: self._trial._ask("set_study_user_attr", key=key, value=value))

    def __getattr__(self, name: str) -> Any:
        if name in _OF_STUDY:
            return self._get(name)
        raise AttributeError(
            f"study.{name} is not available in a replica, because the study is in the process that called "
            "optimize(); a callback of optimize() can use it there"
        )


class _StorageOfTrial:
    """Storage that Optuna's own helpers write through: artifacts' descriptions, scores of a cross-validation."""

    def __init__(self, trial: ElasticTrial) -> None:
        self._trial = trial

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._trial.set_system_attr(key, value)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._trial.set_user_attr(key, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a replica has no access to the study's storage, so {name} is not available")
