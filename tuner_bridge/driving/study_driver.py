"""The tuner's side of a sweep: submits its trials, answers their replicas' questions, hears how they end.

Concurrency: each trial is served by the thread that runs it, so that what the front end holds for it is used by one
thread only. One poll thread fetches questions and news for all trials of the study and puts them into the threads'
inboxes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from scheduler.client.connection import SchedulerClient
from scheduler.errors import RequestRefused, SchedulerError, SchedulerUnreachable
from scheduler.runtime import differences, runtime
from trials.checks import LONGEST_NAME
from trials.inside.user_code import this_machine
from trials.plain_words import one_line
from trials.spec import TrialSpec
from tuner_bridge.driving.exchange import Answers, Ask, Inboxes, Message, Told, ToldParameters
from tuner_bridge.driving.sent_code import CodeOnCluster, SentCode
from tuner_bridge.driving.sent_environ import this_user
from tuner_bridge.errors import BridgeError, SweepInterrupted

logger = logging.getLogger(__name__)

UNREACHABLE_SECONDS = 120.0
"""Seconds that a scheduler may be away before the sweep gives up on it."""
REACHABLE_SECONDS = 15.0
"""A scheduler that dies just when the sweep begins is waited for, or started again, for so long."""
POLL_SECONDS = 5.0

Watch = Callable[[Mapping[str, Any]], None]
"""Callback with what the scheduler knows of a running trial, whenever that has changed."""


class StudyDriver:
    """A study's connection to its scheduler: submits trials, answers replicas, hears of ends.

    ``title``: what its people call the study. ``reconnect`` gives a fresh client after the scheduler has gone.
    """

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
        self.owner = driver_identity()
        self._namespace = os.environ.get("ELASTUNE_NAMESPACE", "")
        """Namespace of its trials on a cluster, if not the scheduler's."""
        self.study_key = self._within(study_key)
        self._title = one_line(self._within(title))[:LONGEST_NAME] if title else ""
        self._direction = direction
        self._reconnect = reconnect
        self._inboxes = Inboxes()
        self._answers = Answers()
        self.parameters = ToldParameters()
        self._granted: dict[str, str] = {}
        self.on_wish: Callable[[Mapping[str, Any], int | None, int], None] | None = None
        """Has a trial of these parameters run, which begins with the state of the trial of that number, if any.

        Raises ValueError with the reason why not; the poll thread calls."""
        self._lock = threading.Lock()
        self._interrupted = threading.Event()
        self._closed = threading.Event()
        self.fatal: Exception | None = None
        """Why the sweep cannot go on; None while it can."""
        self.on_fatal: Callable[[], None] = lambda: None
        """Called from the poll thread when it cannot."""
        self.ends_when_spent = False
        """True if the front end ends a sweep whose budget is used; otherwise its trials wait for a larger one."""
        self.spent = False
        """The study's budget is used, and none of its trials holds a slot any more: nothing would go on by itself."""
        self._has_begun = False
        """True once a trial was submitted."""
        self._left: list[str] = []
        self._heard = -1
        self.code = SentCode(None)
        """Code that its trials run."""
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
        ``patience_seconds``: how long to wait for a dead one's lease to run out. One that died on this machine is known
        to be dead, and is followed at once.
        """
        body: dict[str, Any] = {
            "title": self._title,
            "direction": self._direction,
            "owner": self.owner,
            "user": this_user(),
        }
        if self._namespace:
            body["namespace"] = self._namespace
        if terms is not None:
            body["terms"] = dict(terms)
            if "yields_to" in terms:
                body["terms"]["yields_to"] = [self._within(name) for name in terms["yields_to"]]
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                answer = self._once_reached(lambda: self.client.request("PUT", f"/studies/{self.study_key}", body))
                break
            except RequestRefused:
                earlier = self._present_driver()
                if earlier and has_ended(earlier) and body.get("takes_over") != earlier:
                    body["takes_over"] = earlier
                    continue
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        for warning in answer.get("warnings", ()):
            logger.warning("%s", one_line(warning))
        self.slots = answer["slots"]
        self.emulated = answer.get("emulated", "")
        if answer.get("runs_elsewhere"):
            self.code = SentCode(CodeOnCluster.from_environ())
        self._runtime = answer.get("runtime") or {}
        self._poller.start()

    def _once_reached(self, call: Callable[[], Any]) -> Any:
        """Return what a call returns, made again with a scheduler that has come back."""
        reachable_by = time.monotonic() + REACHABLE_SECONDS
        while True:
            try:
                return call()
            except SchedulerUnreachable:
                if time.monotonic() > reachable_by:
                    raise
                time.sleep(0.2)
                self.client = self._reconnect(self.client)

    def _present_driver(self) -> str | None:
        """Return the study's present driver; None where there is none, or that cannot be told."""
        try:
            studies = self.client.request("GET", "/studies")
        except SchedulerError as error:
            logger.debug("who drives the study was not read: %s", error)
            return None
        return next((each.get("driver") for each in studies if each["name"] == self.study_key), None)

    def _within(self, name: str) -> str:
        return f"{self._namespace}.{name}" if self._namespace else name

    def say_what_differs(self, withheld: Sequence[str]) -> None:
        """Warn of what differs between this process and the trials of a shared scheduler."""
        if withheld:
            logger.warning(
                "set here but not sent to the trials, because they may be secret: %s. If trials need one of these "
                "variables, name it: environ=[%r]",
                ", ".join(withheld),
                withheld[0],
            )
        unlike = differences(runtime(), self._runtime) if self._runtime else []
        if unlike:
            logger.warning(
                "trials run in another installation than this process: %s. Results may differ, and objects saved by "
                "one may not load in the other; start `elastune up` and the sweep from one environment",
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
            logger.debug("could not leave the study; its lease will run out instead: %s", error)
        if self._poller.ident is not None:
            self._poller.join(timeout=POLL_SECONDS + 5.0)
        self.client.close()

    def interrupt(self) -> None:
        """Interrupt from a signal handler or another thread: serving threads unwind, trials stay to be resumed."""
        self._interrupted.set()

    @property
    def interrupted(self) -> bool:
        return self._interrupted.is_set()

    def cancel_all(self, why: str) -> None:
        """End the trials that an interrupted sweep left: nobody can resume them."""
        for trial_id in self._left:
            self.cancel(trial_id, why)

    def cancel(self, trial_id: str, why: str) -> None:
        """Ask once to cancel a trial; ``cancel_for_sure`` repeats it while the scheduler is away."""
        try:
            self.client.request("POST", f"/trials/{trial_id}/cancel", {"why": why})
        except SchedulerError as error:
            logger.warning("trial %s was not cancelled: %s", trial_id, error)

    def cancel_for_sure(self, trial_id: str, why: str) -> None:
        try:
            self._patiently(lambda: self.client.request("POST", f"/trials/{trial_id}/cancel", {"why": why}))
        except (SchedulerError, SweepInterrupted) as error:
            logger.warning("trial %s was not cancelled: %s", trial_id, error)

    def history(self, trial_id: str) -> list[str]:
        """Return the trial's history, one line of text per event."""
        try:
            entries = self.client.request("GET", f"/trials/{trial_id}")["history"]
        except SchedulerError as error:
            logger.debug("the history was not read: %s", error)
            return []
        began = entries[0]["at"] if entries else 0.0
        return [f"{entry['at'] - began:7.1f} s  {entry['what']}: {entry['reason']['sentence']}" for entry in entries]

    # ------------------------------------------------------------------ one trial

    def run_trial(
        self, spec: TrialSpec, ask: Ask, watch: Watch, submitted: Callable[[str], None] = lambda _: None
    ) -> Mapping[str, Any]:
        """Submit a trial, serve it, and give the scheduler's summary of its end.

        ``submitted`` is told the trial's id. Raises SweepInterrupted, also when the scheduler is lost (`fatal`).
        """
        if self._interrupted.is_set() or self.fatal is not None:
            raise SweepInterrupted
        is_first, self._has_begun = not self._has_begun, True
        spec = self._patiently(lambda: self.code.place(spec, self.client))
        with self._lock:
            self.left = None if self.left is None else max(0, self.left - 1)
        summary = self._patiently(lambda: self.client.request("POST", "/trials", spec.to_json()))
        trial_id = summary["trial_id"]
        submitted(trial_id)
        inbox = self._inboxes.open(trial_id)
        # The poll under way does not ask for this trial yet.
        self._patiently(lambda: self.client.request("POST", f"/studies/{self.study_key}/poke"))
        try:
            return self._serve(trial_id, inbox, ask, watch, self._first_words(trial_id) if is_first else None)
        except SweepInterrupted:
            self._left.append(trial_id)
            raise
        except BaseException:
            # Nobody will ask for this trial again: it must not hold slots.
            self.cancel(trial_id, "its sweep ended with an error")
            raise
        finally:
            self._inboxes.close(trial_id)

    def _first_words(self, trial_id: str) -> FirstWords:
        def reason() -> str:
            try:
                found = self.client.request("GET", f"/trials/{trial_id}")
                if found["state"] == "starting":
                    return "its replica has started and is importing modules"
                return one_line(found["reason"]["sentence"])
            except SchedulerError as error:
                return f"the scheduler does not answer ({error})"

        return FirstWords(reason, lambda words: print(words, file=sys.stderr))

    def _serve(
        self,
        trial_id: str,
        inbox: queue.SimpleQueue[Message],
        ask: Ask,
        watch: Watch,
        first_words: FirstWords | None = None,
    ) -> Mapping[str, Any]:
        """Answer the trial's questions until it is over; returns how it ended."""
        while True:
            if self._interrupted.is_set() or self.fatal is not None:
                raise SweepInterrupted
            try:
                message = inbox.get(timeout=0.2)
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
            self._send_answer(self._answers.to(question, ask))
            self._inboxes.is_answered(trial_id, question["id"])

    def _send_answer(self, answer: Told) -> None:
        if not self._answers.leave(answer):
            self._patiently(lambda: self._post_answer(answer))

    def _post_answer(self, body: Mapping[str, Any]) -> None:
        self.client.request("POST", f"/studies/{self.study_key}/answers", body)

    # ------------------------------------------------------------------ the poll thread

    def _poll(self) -> None:
        try:
            self._follow_news()
        except Exception as error:
            # Nobody would answer the replicas any more.
            self.fatal = error
        if self.fatal is not None:
            self.on_fatal()

    def _post_each(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Post answers one by one, after one of them was refused: its trial is told, and the others get theirs."""
        for body in answers:
            try:
                self._post_answer(body)
            except SchedulerError as error:
                self._inboxes.refuse(str(body["id"]).partition(":")[0], error)

    def _follow_news(self) -> None:
        unreachable_since: float | None = None
        answers: list[Told] = []
        while not self._closed.is_set():
            seen, known_ids = self._inboxes.known()
            parameters, granted = self.parameters.waiting(), self._granted
            try:
                news = self.client.request(
                    "POST",
                    f"/studies/{self.study_key}/news",
                    {
                        "owner": self.owner,
                        "trials": list(seen),
                        "seen": seen,
                        "known": known_ids,
                        "answers": answers,
                        "heard": self._heard,
                        "wait": POLL_SECONDS,
                        "plans": self._plans(),
                        "parameters": parameters,
                        "granted": granted,
                        "ends_when_spent": self.ends_when_spent,
                    },
                )
                self._heard = news.get("heard", -1)
                self.parameters.are_told(parameters)
                wishes = news.get("wishes", ())
                self._granted = {each["id"]: self._grant(each) for each in wishes}
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
                    self.fatal = BridgeError(f"the sweep no longer drives its study: {error}") if lost else error
                return
            if news.get("spent"):
                self.spent = True
                self.interrupt()
                return
            questions, fresh = self._inboxes.hand_out(news)
            if not fresh and (news["questions"] or news["finished"]):
                # Being worked on already: the next poll would return at once with the same.
                time.sleep(0.002)
            answers = self._answers.collect(questions) if questions else []
            self.code.send_again(news.get("missing_packages", ()), self.client)

    def _grant(self, wish: Mapping[str, Any]) -> str:
        """Return why no such trial will run; empty where one will."""
        if self.on_wish is None:
            return "the tuner of this study chooses all parameters itself"
        try:
            self.on_wish(wish["parameters"], wish["parent"], wish["more_epochs"])
        except ValueError as error:
            return str(error)
        return ""

    def _plans(self) -> dict[str, Any] | None:
        """Return the plans, so that slots which the next trials need are not given to others meanwhile."""
        return None if self.at_a_time is None else {"at_a_time": self.at_a_time, "left": self.left}

    def _try_reconnect(self) -> None:
        try:
            before, self.client = self.client, self._reconnect(self.client)
            if before is not self.client:
                before.close()
        except Exception as error:
            logger.warning("the scheduler does not answer: %s", error)

    def _patiently(self, request: Callable[[], Any]) -> Any:
        """Repeat a request while the scheduler is away; the poll thread brings it back."""
        while True:
            try:
                return request()
            except SchedulerUnreachable:
                if self._interrupted.is_set() or self.fatal is not None:
                    raise SweepInterrupted from None
                time.sleep(0.2)


LONGEST_FILE_NAME = 120
"""Bytes of a name that is a folder's."""


def file_name(study_name: str) -> str:
    """Return a name for paths and addresses: another one for each study's name, and not too long for a folder's."""
    kept = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in study_name).lstrip(".")
    if kept == study_name and kept and len(kept.encode()) <= LONGEST_FILE_NAME:
        return kept
    unlike = hashlib.sha256(study_name.encode()).hexdigest()[:8]
    shortened = kept.encode()[: LONGEST_FILE_NAME - len(unlike) - 1].decode(errors="ignore")
    return f"{shortened}-{unlike}"


CLOCK_SECONDS = 2.0
"""Seconds by which two looks at the moment when a process began may differ."""


def driver_identity() -> str:
    """Return a new identity of at most 64 characters, another one at each call."""
    began = psutil.Process().create_time()
    return f"{this_machine()}-{os.getpid()}-{began:.0f}-{uuid.uuid4().hex[:8]}"


def has_ended(identity: str) -> bool:
    """Tell whether that process was one of this machine, and is gone; False where that cannot be told."""
    parts = identity.split("-")
    if len(parts) != 4 or parts[0] != this_machine() or not (parts[1].isdigit() and parts[2].isdigit()):
        return False
    try:
        there = psutil.Process(int(parts[1]))
        is_other = abs(there.create_time() - int(parts[2])) > CLOCK_SECONDS
        return is_other or there.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


PATIENCE_SECONDS = 2.0
"""Seconds without a start after which the driver prints why the first trial waits."""


class FirstWords:
    """Tells a user who waits for a trial's first report why it has not come.

    ``reason``: what the scheduler says of the trial at the moment. ``tell``: where people read it.
    """

    def __init__(
        self, reason: Callable[[], str], tell: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reason = reason
        self._tell = tell
        self._clock = clock
        self._looks_at = clock() + PATIENCE_SECONDS
        self._said = ""

    def look(self) -> None:
        """Look, now and then, why the trial has not begun; tell each reason once."""
        now = self._clock()
        if now < self._looks_at:
            return
        self._looks_at = now + PATIENCE_SECONDS
        reason = self._reason()
        if reason != self._said:
            self._said = reason
            self._tell(f"elastune: the first trial has not begun yet: {reason}")
