"""The tuner's side of a sweep: submits its trials, answers their replicas' questions, hears how they end.

Concurrency: each trial is served by the thread that runs it, so that what the front end holds for it is used by one
thread only. One poll thread fetches questions and news for all trials of the study and puts them into the threads'
queues.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.api.client import SchedulerClient
from scheduler.errors import RequestRefused, SchedulerError, SchedulerUnreachable
from scheduler.runtime import differences, runtime
from trials.checks import LONGEST_NAME
from trials.plain_words import one_line
from trials.spec import TrialSpec
from tuner_bridge.driving.code_on_cluster import CodeOnCluster
from tuner_bridge.driving.first_words import FirstWords
from tuner_bridge.driving.packing import Package
from tuner_bridge.errors import BridgeError, SweepInterrupted
from tuner_bridge.in_replica.wire import decode_value, encode_value
from tuner_bridge.in_replica.wired_errors import encode_exception

logger = logging.getLogger(__name__)

UNREACHABLE_SECONDS = 120.0
"""How long a scheduler may be away before the sweep gives up on it."""
REACHABLE_SECONDS = 15.0
"""A scheduler that dies just when the sweep begins is waited for, or started again, for so long."""
POLL_SECONDS = 5.0
ANSWERS_KEPT = 4096
ANSWERED_SECONDS = 0.005
"""Answers that are there so soon travel with the next poll, which saves a request for each; others go alone."""

Ask = Callable[[str, dict[str, Any]], Any]
"""A question of a replica, as method and arguments; what it returns or raises goes back to the replica."""

Watch = Callable[[Mapping[str, Any]], None]
"""What the scheduler knows of a trial that runs, whenever that has changed."""


@dataclass(slots=True)
class _Served:
    """A trial whose replicas are being served by one thread."""

    inbox: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    queued: set[str] = field(default_factory=set)
    seen: str = ""
    """What the scheduler's last news of it was, so that it is told only when there is other news."""


class StudyDriver:
    """``title``: what its people call the study. ``reconnect`` gives a fresh client after the scheduler has gone."""

    def __init__(
        self,
        study_key: str,
        direction: str,
        client: SchedulerClient,
        *,
        reconnect: Callable[[SchedulerClient], SchedulerClient],
        title: str = "",
    ) -> None:
        self.client = client
        self.owner = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._namespace = os.environ.get("ELASTUNE_NAMESPACE", "")
        """Where its trials live on a cluster, if not with the scheduler."""
        self.study_key = self._within(study_key)
        self._title = one_line(self._within(title))[:LONGEST_NAME] if title else ""
        self._direction = direction
        self._reconnect = reconnect
        self._served: dict[str, _Served] = {}
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._outgoing: list[dict[str, Any]] = []
        """Answers for the next poll."""
        self._collects = False
        """Whether the next poll waits for answers."""
        self._answered = threading.Condition()
        self._interrupted = threading.Event()
        self._closed = threading.Event()
        self.fatal: Exception | None = None
        """Why the sweep cannot go on; None while it can."""
        self.on_fatal: Callable[[], None] = lambda: None
        """Called from the poll thread when it cannot."""
        self._has_begun = False
        """Whether a trial was submitted."""
        self._left: list[str] = []
        self._heard = -1
        self._code: CodeOnCluster | None = None
        self._packing = threading.Lock()
        self._sent: set[str] = set()
        self._poller = threading.Thread(target=self._poll, name="elastune-driver", daemon=True)
        self.slots = 0
        self.at_a_time: int | None = None
        """Trials that the front end keeps submitted; None: it cannot tell."""
        self.left: int | None = None
        """Trials that it will still submit; None: nobody knows."""
        self._runtime: Mapping[str, str] = {}
        self.emulated = ""
        """A sentence for people where slots stand for devices that are not there."""

    # ------------------------------------------------------------------ life

    def attach(self, terms: Mapping[str, Any] | None = None, *, patience_seconds: float = 0.0) -> None:
        """Become the study's driver; raises RequestRefused while another one is alive.

        ``terms``: the study's from now on (StudyTerms as JSON); those that are not named stay as they are.
        ``patience_seconds``: how long to wait for a dead one's lease to run out.
        """
        body: dict[str, Any] = {"title": self._title, "direction": self._direction, "owner": self.owner}
        if self._namespace:
            body["namespace"] = self._namespace
        if terms is not None:
            body["terms"] = dict(terms)
            if "yields_to" in terms:
                body["terms"]["yields_to"] = [self._within(name) for name in terms["yields_to"]]
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
        for warning in answer.get("warnings", ()):
            logger.warning("%s", one_line(warning))
        self.slots = answer["slots"]
        self.emulated = answer.get("emulated", "")
        if answer.get("runs_elsewhere"):
            self._code = CodeOnCluster.from_environ()
        self._runtime = answer.get("runtime") or {}
        self._poller.start()

    def _within(self, name: str) -> str:
        return f"{self._namespace}.{name}" if self._namespace else name

    def say_what_differs(self, withheld: Sequence[str]) -> None:
        """Between this process and the trials of a scheduler that others share."""
        if withheld:
            logger.warning(
                "set here but not sent to the trials, because it could be secret: %s. If trials need one of them, name "
                "it: environ=[%r]",
                ", ".join(withheld),
                withheld[0],
            )
        unlike = differences(runtime(), self._runtime) if self._runtime else []
        if unlike:
            logger.warning(
                "trials run in another installation than this process: %s. Results may differ, and objects that one "
                "saves may not load in the other; start `elastune up` and the sweep from one environment",
                "; ".join(unlike),
            )

    def say_if_emulated(self) -> None:
        if self.emulated:
            print(f"elastune: {self.emulated}", file=sys.stderr)

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
        """From a signal handler or another thread: serving threads unwind, trials stay to be resumed."""
        self._interrupted.set()

    @property
    def interrupted(self) -> bool:
        return self._interrupted.is_set()

    def cancel_all(self, why: str) -> None:
        """End the trials that an interrupted sweep left: nobody can resume them."""
        for trial_id in self._left:
            self.cancel(trial_id, why)

    def cancel(self, trial_id: str, why: str) -> None:
        """Once; ``cancel_for_sure`` repeats it while the scheduler is away."""
        try:
            self.client.request("POST", f"/trials/{trial_id}/cancel", {"why": why})
        except SchedulerError as error:
            logger.warning("trial %s was not cancelled: %s", trial_id, error)

    def cancel_for_sure(self, trial_id: str, why: str) -> None:
        try:
            self._patiently(lambda: self.client.request("POST", f"/trials/{trial_id}/cancel", {"why": why}))
        except (SchedulerError, SweepInterrupted) as error:
            logger.warning("trial %s was not cancelled: %s", trial_id, error)

    # ------------------------------------------------------------------ one trial

    def run_trial(
        self, spec: TrialSpec, ask: Ask, watch: Watch, submitted: Callable[[str], None] = lambda _: None
    ) -> Mapping[str, Any]:
        """Submit a trial, serve it, and give the scheduler's summary of its end.

        ``submitted`` is told the trial's id. Raises SweepInterrupted, also when the scheduler is lost (`fatal`).
        """
        if self._interrupted.is_set() or self.fatal is not None:
            raise SweepInterrupted
        served = _Served()
        is_first, self._has_begun = not self._has_begun, True
        spec = self._placed(spec)
        with self._lock:
            self.left = None if self.left is None else max(0, self.left - 1)
        summary = self._patiently(lambda: self.client.request("POST", "/trials", spec.to_json()))
        trial_id = summary["trial_id"]
        submitted(trial_id)
        with self._lock:
            self._served[trial_id] = served
        # The poll under way does not ask for this trial yet.
        self._patiently(lambda: self.client.request("POST", f"/studies/{self.study_key}/poke"))
        try:
            return self._serve(served, ask, watch, self._first_words(trial_id) if is_first else None)
        except SweepInterrupted:
            self._left.append(trial_id)
            raise
        except BaseException:
            # Nobody will ask for this trial again: it must not hold slots.
            self.cancel(trial_id, "its sweep ended with an error")
            raise
        finally:
            with self._lock:
                del self._served[trial_id]

    def _placed(self, spec: TrialSpec) -> TrialSpec:
        """Where its replicas find the code, on a cluster."""
        if self._code is None:
            return spec
        with self._packing:
            placed = self._code.place(spec)
            if self._code.package is not None and self._code.package.digest not in self._sent:
                self._send_package(self._code.package)
        return placed

    def _send_package(self, package: Package) -> None:
        def send() -> None:
            if not self.client.request("GET", f"/packages/{package.digest}")["here"]:
                print(f"elastune: the working folder goes to {self.client.url}: {package}", file=sys.stderr)
                self.client.send(f"/packages/{package.digest}", package.content)

        self._patiently(send)
        self._sent.add(package.digest)

    def _first_words(self, trial_id: str) -> FirstWords:
        def reason() -> str:
            try:
                found = self.client.request("GET", f"/trials/{trial_id}")
                if found["state"] == "starting":
                    return "its replica has been started, and imports what it needs"
                return one_line(found["reason"]["sentence"])
            except SchedulerError as error:
                return f"the scheduler does not answer ({error})"

        return FirstWords(reason, lambda words: print(words, file=sys.stderr))

    def _serve(
        self, served: _Served, ask: Ask, watch: Watch, first_words: FirstWords | None = None
    ) -> Mapping[str, Any]:
        """Answer the trial's questions until it is over; returns how it ended."""
        while True:
            if self._interrupted.is_set() or self.fatal is not None:
                raise SweepInterrupted
            try:
                message = served.inbox.get(timeout=0.2)
            except queue.Empty:
                if first_words is not None:
                    first_words.look()
                continue
            if "live" not in message or message["live"]["state"] not in ("pending", "starting"):
                first_words = None
            if "finished" in message:
                ended: Mapping[str, Any] = message["finished"]
                return ended
            if "live" in message:
                watch(message["live"])
                continue
            if "refused" in message:
                raise message["refused"]
            question = message["question"]
            answer = self._answers.get(question["id"])
            if answer is None:
                answer = _answer(ask, question)
                self._remember(question["id"], answer)
            self._send_answer(question["id"], answer)
            with self._lock:
                served.queued.discard(question["id"])

    def _send_answer(self, question_id: str, answer: dict[str, Any]) -> None:
        body = {"id": question_id, "answer": answer}
        with self._answered:
            if self._collects:
                self._outgoing.append(body)
                self._answered.notify()
                return
        self._patiently(lambda: self._post_answer(body))

    def _post_answer(self, body: Mapping[str, Any]) -> None:
        self.client.request("POST", f"/studies/{self.study_key}/answers", body)

    def _remember(self, question_id: str, answer: dict[str, Any]) -> None:
        """A question that is asked again, because its answer got lost, gets the same answer."""
        with self._lock:
            self._answers[question_id] = answer
            while len(self._answers) > ANSWERS_KEPT:
                self._answers.popitem(last=False)

    # ------------------------------------------------------------------ the poll thread

    def _poll(self) -> None:
        try:
            self._follow_news()
        except Exception as error:
            # Nobody would answer the replicas any more.
            self.fatal = error
        if self.fatal is not None:
            self.on_fatal()

    def _collect_answers(self, questions: int) -> list[dict[str, Any]]:
        """What the serving threads answer at once to so many questions that they have just been given."""
        with self._answered:
            self._collects = True
            self._answered.wait_for(lambda: len(self._outgoing) >= questions, ANSWERED_SECONDS)
            self._collects = False
            answers, self._outgoing = self._outgoing, []
        return answers

    def _post_each(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """One of them is not taken: its trial is told, and the others get theirs."""
        for body in answers:
            try:
                self._post_answer(body)
            except SchedulerError as error:
                with self._lock:
                    served = self._served.get(str(body["id"]).partition(":")[0])
                if served is not None:
                    served.inbox.put({"refused": error})

    def _follow_news(self) -> None:
        unreachable_since: float | None = None
        answers: list[dict[str, Any]] = []
        while not self._closed.is_set():
            with self._lock:
                seen = {trial_id: served.seen for trial_id, served in self._served.items()}
                known = [each for served in self._served.values() for each in served.queued]
            try:
                news = self.client.request(
                    "POST",
                    f"/studies/{self.study_key}/news",
                    {
                        "owner": self.owner,
                        "trials": list(seen),
                        "seen": seen,
                        "known": known,
                        "answers": answers,
                        "heard": self._heard,
                        "wait": POLL_SECONDS,
                        "plans": self._plans(),
                    },
                )
                self._heard = news.get("heard", -1)
                unreachable_since = None
            except SchedulerUnreachable as error:
                now = time.monotonic()
                unreachable_since = unreachable_since or now
                if now - unreachable_since > UNREACHABLE_SECONDS:
                    self.fatal = error
                    return
                time.sleep(0.3)
                self._try_reconnect()
                continue
            except SchedulerError as error:
                if answers and isinstance(error, RequestRefused):
                    self._post_each(answers)
                    answers = []
                    continue
                if not self._closed.is_set():
                    lost = isinstance(error, RequestRefused)
                    self.fatal = BridgeError(f"the sweep lost its study: {error}") if lost else error
                return
            questions = self._distribute(news)
            answers = self._collect_answers(questions) if questions else []
            self._send_again(news.get("missing_packages", ()))

    def _send_again(self, digests: Sequence[str]) -> None:
        """A scheduler that has moved may have lost what it was sent."""
        package = None if self._code is None else self._code.package
        for digest in digests:
            if package is None or package.digest != digest:
                # Of an earlier run of this sweep: its code is gone. Those trials end when nobody can start them.
                time.sleep(1.0)
                continue
            try:
                self.client.send(f"/packages/{digest}", package.content)
            except SchedulerError as error:
                logger.warning("the packed working folder was not sent again: %s", error)
                time.sleep(1.0)

    def _plans(self) -> dict[str, Any] | None:
        """So that slots which the next trials need are not given to others meanwhile."""
        return None if self.at_a_time is None else {"at_a_time": self.at_a_time, "left": self.left}

    def _try_reconnect(self) -> None:
        try:
            before, self.client = self.client, self._reconnect(self.client)
            if before is not self.client:
                before.close()
        except Exception as error:
            logger.warning("the scheduler is away: %s", error)

    def _distribute(self, news: dict[str, Any]) -> int:
        """Into the inboxes of the threads; how many new questions there are."""
        fresh, asked = False, 0
        with self._lock:
            for live in news["live"]:
                served = self._served.get(live["trial_id"])
                if served is not None and served.seen != live["seen"]:
                    served.seen = live["seen"]
                    served.inbox.put({"live": live})
                    fresh = True
            for question in news["questions"]:
                served = self._served.get(question["trial_id"])
                if served is not None and question["id"] not in served.queued:
                    served.queued.add(question["id"])
                    served.inbox.put({"question": question})
                    fresh, asked = True, asked + 1
            for summary in news["finished"]:
                served = self._served.get(summary["trial_id"])
                if served is not None and "finished" not in served.queued:
                    served.queued.add("finished")
                    served.inbox.put({"finished": summary})
                    fresh = True
        if not fresh and (news["questions"] or news["finished"]):
            # Being worked on already: the next poll would return at once with the same.
            time.sleep(0.002)
        return asked

    def _patiently(self, request: Callable[[], Any]) -> Any:
        """Repeat a request while the scheduler is away; the poll thread brings it back."""
        while True:
            try:
                return request()
            except SchedulerUnreachable:
                if self._interrupted.is_set() or self.fatal is not None:
                    raise SweepInterrupted from None
                time.sleep(0.2)


def _answer(ask: Ask, question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = {name: decode_value(value) for name, value in question["arguments"].items()}
        return {"value": encode_value(ask(question["method"], arguments), lenient=True)}
    except Exception as error:
        return {"exception": encode_exception(error)}


def file_name(study_name: str) -> str:
    """The study's name with what does not belong into paths and addresses replaced."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in study_name).lstrip(".") or "-"
