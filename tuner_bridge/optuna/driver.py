"""The driver's side of a sweep: owns the real trials and answers their replicas.

Concurrency: Optuna runs each objective call in a thread of its own (or the caller's, with n_jobs=1). That thread
submits the trial and then serves its replicas' questions, so the real ``optuna.Trial`` is used by one thread only. One
poll thread fetches questions and outcomes for all trials of the study and puts them into the threads' queues.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import distribution_to_json
from optuna.storages._heartbeat import is_heartbeat_enabled

from scheduler.client import SchedulerClient
from scheduler.errors import RequestRefused, SchedulerError, SchedulerUnreachable
from trials.spec import TrialSpec
from trials.terms import StudyTerms
from tuner_bridge.errors import BridgeError, SweepInterrupted, TrialLost
from tuner_bridge.shipping import ShippedFunction
from tuner_bridge.wire import decode_exception, decode_value, encode_exception, encode_value

logger = logging.getLogger(__name__)

ENTRYPOINT = "tuner_bridge.optuna.replica:main"
TRIAL_ATTRIBUTE = "elastune:trial"
STUDY_ATTRIBUTE = "elastune:study"
UNREACHABLE_SECONDS = 120.0
"""How long a scheduler may be away before the sweep gives up on it."""
REACHABLE_SECONDS = 15.0
"""A scheduler that dies just when the sweep begins is waited for, or started again, for so long."""
POLL_SECONDS = 5.0
ANSWERS_KEPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTemplate:
    """What all trials of a sweep have in common."""

    objective: ShippedFunction
    min_replicas: int
    max_replicas: int
    working_dir: str
    python_path: tuple[str, ...]
    preload: tuple[str, ...]


@dataclass(slots=True)
class _Served:
    """A trial whose replicas are being served by one thread."""

    inbox: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    queued: set[str] = field(default_factory=set)


class StudyDriver:
    """``reconnect`` gives a fresh client after the scheduler has gone away."""

    def __init__(
        self,
        study: optuna.Study,
        client: SchedulerClient,
        template: TrialTemplate,
        *,
        reconnect: Callable[[SchedulerClient], SchedulerClient],
    ) -> None:
        self.study = study
        self.client = client
        self.template = template
        self.owner = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.study_key = _study_key(study)
        self._reconnect = reconnect
        self._served: dict[str, _Served] = {}
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._sampler_lock = threading.Lock()
        self._interrupted = threading.Event()
        self._closed = threading.Event()
        self._fatal: Exception | None = None
        self._left: list[str] = []
        self._poller = threading.Thread(target=self._poll, name="elastune-driver", daemon=True)
        self.slots = 0

    # ------------------------------------------------------------------ life

    def attach(self, terms: StudyTerms | None = None, *, patience_seconds: float = 0.0) -> None:
        """Become the study's driver; raises RequestRefused while another one is alive.

        ``terms``: the study's from now on; None leaves those that it has.
        ``patience_seconds``: how long to wait for a dead one's lease to run out.
        """
        body: dict[str, Any] = {"direction": self.study.directions[0].name.lower(), "owner": self.owner}
        if terms is not None:
            body["terms"] = terms.to_json()
        deadline = time.monotonic() + patience_seconds
        reachable_by = time.monotonic() + REACHABLE_SECONDS
        while True:
            try:
                answer = self.client.request("PUT", f"/studies/{self.study_key}", body)
                break
            except RequestRefused:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            except SchedulerUnreachable:
                if time.monotonic() > reachable_by:
                    raise
                time.sleep(0.2)
                self.client = self._reconnect(self.client)
        self.slots = answer["slots"]
        self._poller.start()

    def detach(self) -> None:
        self._closed.set()
        try:
            self.client.request("POST", f"/studies/{self.study_key}/detach", {"owner": self.owner})
        except SchedulerError as error:
            # Its lease runs out instead.
            logger.debug("not detached: %s", error)
        if self._poller.ident is not None:
            self._poller.join(timeout=POLL_SECONDS + 5.0)
        self.client.close()

    def interrupt(self) -> None:
        """From the signal handler: objective threads unwind, trials stay to be resumed."""
        self._interrupted.set()

    @property
    def interrupted(self) -> bool:
        return self._interrupted.is_set()

    def cancel_all(self, why: str) -> None:
        """End the trials that an interrupted sweep left: nobody can resume them."""
        for trial_id in self._left:
            self._cancel(trial_id, why)

    def _cancel(self, trial_id: str, why: str) -> None:
        try:
            self.client.request("POST", f"/trials/{trial_id}/cancel", {"why": why})
        except SchedulerError as error:
            logger.warning("trial %s was not cancelled: %s", trial_id, error)

    def adopt_interrupted(self) -> int:
        """Queue again the trials that a dead driver of this study left running; returns how many.

        Optuna's own loop then takes them up as it does enqueued trials: same number, same parameters.
        """
        interrupted = self.interrupted_trials()
        storage = self.study._storage
        for trial in interrupted:
            if is_heartbeat_enabled(storage):
                # Else Optuna would fail it as stale before it is taken up.
                storage.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]  # only storages with heartbeat
            storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.WAITING)
        return len(interrupted)

    def interrupted_trials(self) -> list[optuna.trial.FrozenTrial]:
        """Trials of this study's sweeps that Optuna holds to be running; before ours begins nobody runs them."""
        running = self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        return [trial for trial in running if TRIAL_ATTRIBUTE in trial.user_attrs]

    def mark_next_trial(self) -> None:
        """Mark the trial that ``study.ask`` is about to give out, making one where none waits.

        The mark is there before the trial runs: whatever happens from then on, a resumed sweep knows it for its own.
        """
        waiting = self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,))
        if not waiting:
            mark = {TRIAL_ATTRIBUTE: self.study_key}
            self.study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.WAITING, user_attrs=mark))
        elif TRIAL_ATTRIBUTE not in waiting[0].user_attrs:
            self.study._storage.set_trial_user_attr(waiting[0]._trial_id, TRIAL_ATTRIBUTE, self.study_key)

    # ------------------------------------------------------------------ one trial

    def run(self, trial: optuna.Trial) -> Any:
        """The objective as Optuna calls it: returns the value, raises TrialPruned or the objective's exception."""
        if self._interrupted.is_set():
            raise SweepInterrupted
        spec = TrialSpec(
            study=self.study_key,
            number=trial.number,
            entrypoint=ENTRYPOINT,
            payload={"objective": self.template.objective.to_json()},
            min_replicas=self.template.min_replicas,
            max_replicas=self.template.max_replicas,
            working_dir=self.template.working_dir,
            python_path=self.template.python_path,
            preload=self.template.preload,
            user_code=(self.template.objective.loaded_as,),
        )
        served = _Served()
        summary = self._patiently(lambda: self.client.request("POST", "/trials", spec.to_json()))
        trial_id = summary["trial_id"]
        with self._lock:
            self._served[trial_id] = served
        # The poll under way does not ask for this trial yet.
        self._patiently(lambda: self.client.request("POST", f"/studies/{self.study_key}/poke"))
        try:
            ended = self._serve(trial, served, _reported_steps(self.study, trial))
        except SweepInterrupted:
            self._left.append(trial_id)
            raise
        except BaseException:
            # Nobody will ask for this trial again: it must not hold slots.
            self._cancel(trial_id, "its sweep ended with an error")
            raise
        finally:
            with self._lock:
                del self._served[trial_id]
        return _conclude(ended)

    def _serve(self, trial: optuna.Trial, served: _Served, reported: set[int]) -> Mapping[str, Any]:
        """Answer the trial's questions until it is over; returns how it ended."""
        while True:
            if self._fatal is not None:
                raise self._fatal
            if self._interrupted.is_set():
                raise SweepInterrupted
            try:
                message = served.inbox.get(timeout=0.2)
            except queue.Empty:
                continue
            if "finished" in message:
                ended: Mapping[str, Any] = message["finished"]
                return ended
            question = message["question"]
            answer = self._answers.get(question["id"])
            if answer is None:
                answer = self._answer(trial, question, reported)
                self._remember(question["id"], answer)
            self._send_answer(question["id"], answer)
            with self._lock:
                served.queued.discard(question["id"])

    def _send_answer(self, question_id: str, answer: dict[str, Any]) -> None:
        body = {"id": question_id, "answer": answer}
        self._patiently(lambda: self.client.request("POST", f"/studies/{self.study_key}/answers", body))

    def _remember(self, question_id: str, answer: dict[str, Any]) -> None:
        """A question that is asked again, because its answer got lost, gets the same answer."""
        with self._lock:
            self._answers[question_id] = answer
            while len(self._answers) > ANSWERS_KEPT:
                self._answers.popitem(last=False)

    def _answer(self, trial: optuna.Trial, question: Mapping[str, Any], reported: set[int]) -> dict[str, Any]:
        try:
            # Samplers are not written for several threads; one suggestion at a time.
            with self._sampler_lock:
                return {"value": encode_value(_call(trial, question, reported))}
        except Exception as error:
            return {"exception": encode_exception(error)}

    # ------------------------------------------------------------------ the poll thread

    def _poll(self) -> None:
        unreachable_since: float | None = None
        while not self._closed.is_set():
            with self._lock:
                waiting = list(self._served)
            try:
                news = self.client.request(
                    "POST",
                    f"/studies/{self.study_key}/news",
                    {"owner": self.owner, "trials": waiting, "wait": POLL_SECONDS},
                )
                unreachable_since = None
            except SchedulerUnreachable as error:
                now = time.monotonic()
                unreachable_since = unreachable_since or now
                if now - unreachable_since > UNREACHABLE_SECONDS:
                    self._fatal = error
                    return
                time.sleep(0.3)
                self._try_reconnect()
                continue
            except SchedulerError as error:
                if not self._closed.is_set():
                    lost = isinstance(error, RequestRefused)
                    self._fatal = BridgeError(f"the sweep lost its study: {error}") if lost else error
                return
            self._distribute(news)

    def _try_reconnect(self) -> None:
        try:
            before, self.client = self.client, self._reconnect(self.client)
            if before is not self.client:
                before.close()
        except Exception as error:
            logger.warning("the scheduler is away: %s", error)

    def _distribute(self, news: dict[str, Any]) -> None:
        fresh = False
        with self._lock:
            for question in news["questions"]:
                served = self._served.get(question["trial_id"])
                if served is not None and question["id"] not in served.queued:
                    served.queued.add(question["id"])
                    served.inbox.put({"question": question})
                    fresh = True
            for summary in news["finished"]:
                served = self._served.get(summary["trial_id"])
                if served is not None and "finished" not in served.queued:
                    served.queued.add("finished")
                    served.inbox.put({"finished": summary})
                    fresh = True
        if not fresh and (news["questions"] or news["finished"]):
            # Being worked on already: the next poll would return at once with the same.
            time.sleep(0.002)

    def _patiently(self, request: Callable[[], Any]) -> Any:
        """Repeat a request while the scheduler is away; the poll thread brings it back."""
        while True:
            try:
                return request()
            except SchedulerUnreachable:
                if self._fatal is not None:
                    raise
                if self._interrupted.is_set():
                    raise SweepInterrupted from None
                time.sleep(0.2)


def _call(trial: optuna.Trial, question: Mapping[str, Any], reported: set[int]) -> Any:
    """One question put to the real trial."""
    method = question["method"]
    arguments = {name: decode_value(value) for name, value in question["arguments"].items()}
    if method in ("suggest_float", "suggest_int"):
        return getattr(trial, method)(**arguments)
    if method == "suggest_categorical":
        choices = arguments["choices"]
        value = trial.suggest_categorical(arguments["name"], choices)
        return next(i for i, choice in enumerate(choices) if choice == value and type(choice) is type(value))
    if method == "report":
        # A trial that resumed from its checkpoint reports again what it had reported since; the first value stays.
        if arguments["step"] not in reported:
            trial.report(arguments["value"], arguments["step"])
            reported.add(int(arguments["step"]))
        return None
    if method == "should_prune":
        return trial.should_prune()
    if method == "set_user_attr":
        return trial.set_user_attr(arguments["key"], arguments["value"])
    if method == "set_constraint":
        return trial.set_constraint(arguments["key"], arguments["value"])
    if method == "distributions":
        return {name: distribution_to_json(value) for name, value in trial.distributions.items()}
    if method in ("user_attrs", "constraints"):
        return getattr(trial, method)
    if method == "datetime_start":
        return trial.datetime_start.isoformat() if trial.datetime_start is not None else None
    raise ValueError(f"an elastic trial has no method {method!r}")


def _conclude(summary: Mapping[str, Any]) -> Any:
    """What Optuna gets to hear of a trial that is over."""
    outcome = summary["outcome"]
    if summary["state"] == "cancelled":
        raise optuna.TrialPruned(summary["reason"]["sentence"])
    if outcome is None:
        raise TrialLost(f"trial {summary['number']} was given up: {summary['reason']['sentence']}")
    if outcome["kind"] == "value":
        return decode_value(outcome["value"])
    if outcome["kind"] == "pruned":
        raise optuna.TrialPruned(outcome["message"])
    error = decode_exception(outcome["value"])
    error.add_note("raised in a replica:\n" + outcome["traceback"])
    raise error


def _reported_steps(study: optuna.Study, trial: optuna.Trial) -> set[int]:
    for known in study.get_trials(deepcopy=False):
        if known.number == trial.number:
            return set(known.intermediate_values)
    return set()


def _study_key(study: optuna.Study) -> str:
    """The study's name among all studies of a scheduler: two databases may hold studies of one name."""
    attributes = study.user_attrs
    if STUDY_ATTRIBUTE not in attributes:
        study.set_user_attr(STUDY_ATTRIBUTE, uuid.uuid4().hex[:8])
        attributes = study.user_attrs
    readable = file_name(study.study_name)[:80]
    return f"{readable}-{attributes[STUDY_ATTRIBUTE]}"


def file_name(study_name: str) -> str:
    """The study's name with what does not belong into paths and addresses replaced."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in study_name)
