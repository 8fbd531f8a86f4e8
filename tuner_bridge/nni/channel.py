"""Channel that ``nni.get_next_parameter`` and ``nni.report_*`` speak through in a replica.

All ranks get the same parameters, rank 0 alone reports. Intermediate results are numbered by the trial's state, not by
the process: one that restarts from a checkpoint goes on counting where that was taken, and what it reports again has
the number that it had. They are passed on beside the trial's work; a final one, after all before it, is waited for.
A replica that becomes rank 0 because that one was lost asks how many NNI has: its own code may
have reported nothing so far, or something that was not passed on.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import nni
from nni.runtime.trial_command_channel import TrialCommandChannel, get_default_trial_command_channel

import dist_core
from dist_core.errors import ControlChannelError
from dist_core.trial.current import get_core
from dist_core.trial.plain_replica import Participant
from tuner_bridge.errors import InvalidValue
from tuner_bridge.in_replica.run import ask_driver, naming_what_is_not_taken
from tuner_bridge.in_replica.wire import decode_value, encode_value
from tuner_bridge.nni.plain_json import check_parameter, number_in

MOST_UNTOLD = 1000
"""A trial that reports faster than NNI writes down waits at so many."""
MOST_AT_ONCE = 100
LOOK_SECONDS = 1.0
"""Whoever waits looks up this often, to see whether it should leave instead."""


class Result(TypedDict):
    metric: str
    """As NNI's package writes it."""
    order: int
    """The number that it is known by if it comes twice."""
    report: dict[str, Any] | None
    """Report for the scheduler: step, value and progress."""


class Teller:
    def __init__(self, core: Participant, question: Callable[[], str]) -> None:
        """``question`` gives names for what is asked, each another."""
        self._core, self._question = core, question
        self._changed = threading.Condition()
        self._untold: deque[Result] = deque()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def tell(self, result: Result) -> None:
        """Tell NNI a result.

        Raise RuntimeError when it has refused an earlier one, ControlChannelError when nobody listens.
        """
        self._wait(lambda: len(self._untold) < MOST_UNTOLD)
        with self._changed:
            self._untold.append(result)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nni-teller", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def untold(self) -> list[Result]:
        with self._changed:
            return list(self._untold)

    def flush(self) -> None:
        """Wait until NNI has all results, or this replica is not wanted any more; raise as ``tell``."""
        self._wait(lambda: not self._untold)

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not self._has_come(condition):
            self._core.leave_if_asked()

    def _has_come(self, condition: Callable[[], bool]) -> bool:
        with self._changed:
            come = self._changed.wait_for(lambda: self._error is not None or condition(), LOOK_SECONDS)
            error = self._error
        if error is not None:
            raise error
        return come

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._untold))
                    results = [*self._untold][:MOST_AT_ONCE]
                self._pass_on(results)
                with self._changed:
                    for _ in results:
                        self._untold.popleft()
                    self._changed.notify_all()
        except (ControlChannelError, RuntimeError) as error:
            # Raised where the trial reports next.
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _pass_on(self, results: Sequence[Result]) -> None:
        channel = self._core.channel
        assert channel is not None
        metrics = [{"metric": each["metric"], "order": each["order"]} for each in results]
        body = {"id": self._question(), "method": "metrics", "arguments": {"metrics": encode_value(metrics)}}
        answer: dict[str, Any] | None = None
        while answer is None:
            try:
                with naming_what_is_not_taken("a result"):
                    answer = channel.request("POST", "/call", body)["answer"]
            except InvalidValue as error:
                raise RuntimeError(str(error)) from error
        if "exception" in answer:
            raise RuntimeError(f"NNI did not accept the result: {answer['exception']['message']}")
        reports = [each["report"] for each in results if each["report"] is not None]
        if reports:
            channel.request("POST", "/reports", {"reports": reports})


STATE = "nni-results"
UNKNOWN = -1
"""Count in a checkpoint that has to be asked for."""
UNTOLD_KEPT = MOST_UNTOLD + 64
"""Untold results that a silent replica remembers: more than the reporting one can have kept to itself."""


class _Count:
    """Count of intermediate results, as a part of the trial's checkpoints."""

    def __init__(self, channel: ElasticChannel) -> None:
        self.value = 0
        self.finals = 0
        """Final results; NNI keeps each, and gives all of them the sequence 0."""
        self._channel = channel

    def state_dict(self) -> dict[str, Any]:
        count = self.value if self._channel.knows_count() else UNKNOWN
        return {"value": count, "finals": self.finals, "untold": self._channel.untold()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.finals = max(0, state["value"]), state["finals"]
        self._channel.take_up(state["untold"])
        if state["value"] == UNKNOWN:
            get_core().generation.note_taking_over(is_new=True)


_present: ElasticChannel | None = None


def result_is_told() -> bool:
    return _present is not None and _present.has_told_final


def flush() -> None:
    """Wait until NNI has all that was reported. Raises as ``nni.report_intermediate_result`` does."""
    if _present is not None:
        _present.flush()


def present_channel() -> ElasticChannel:
    channel = get_default_trial_command_channel()
    assert isinstance(channel, ElasticChannel)
    return channel


class ElasticChannel(TrialCommandChannel):  # type: ignore[misc]  # NNI has no types
    def __init__(self) -> None:
        self._core = get_core()
        self._count = _Count(self)
        self._questions = itertools.count()
        self._untold: deque[tuple[int, Result]] = deque(maxlen=UNTOLD_KEPT)
        """Intermediate results, by number, that rank 0 has told, or not any more."""
        self._teller = Teller(self._core, self._question)
        self._process = os.getpid()
        self._stay_registered()
        atexit.register(self.flush)
        global _present
        _present = self

    def _stay_registered(self) -> None:
        """Register the channel again when the user's code runs again: NNI keeps one."""
        if not self._core.registry.has(STATE):
            self._core.registry.register(STATE, self._count)

    def receive_parameter(self) -> Any:
        self._stay_registered()
        channel = self._core.channel
        if channel is None:
            raise RuntimeError("this process is not a replica of an elastic trial; unset NNI_TRIAL_COMMAND_CHANNEL")
        return nni.load(check_parameter(channel.request("GET", "/trial")["payload"]["nni"]["parameter"]))

    def send_metric(self, type: str, parameter_id: int | None, trial_job_id: str, sequence: int, value: Any) -> None:  # noqa: A002
        self._core.raise_postponed()
        self._stay_registered()
        if self._core.passes_do_not_count:
            # What it would report has been reported, or will be by others.
            return
        if self._core.generation.took_over and self._core.reports:
            self._take_over(self._ask("taken", {}))
        if type == "PERIODICAL":
            sequence = self._count.value
        result = self._result(type, parameter_id, trial_job_id, sequence, value)
        if self._core.reports:
            self._tell(result, wait=type != "PERIODICAL")
        elif type == "PERIODICAL":
            self._untold.append((sequence, result))
        if type == "PERIODICAL":
            self._count.value += 1
        else:
            # Not before it has been taken: a replica that leaves meanwhile saves the count with its state.
            self._count.finals += 1

    def untold(self) -> list[Result]:
        """Results that are counted, and that NNI does not have."""
        return self._teller.untold()

    def take_up(self, untold: list[Result]) -> None:
        """Take up what the trial had reported and not told when its state was taken."""
        for result in untold:
            if self._core.reports:
                self._teller.tell(result)
            else:
                self._untold.append((result["order"], result))

    def flush(self) -> None:
        if os.getpid() == self._process:
            self._teller.flush()

    @property
    def counted(self) -> int:
        """Intermediate results of the trial so far, whoever told them."""
        return self._count.value

    @property
    def finals(self) -> int:
        return self._count.finals

    @property
    def has_told_final(self) -> bool:
        """Tell whether NNI has this trial's result: what happens to its process afterwards takes nothing from it."""
        return self._count.finals > 0 and self._core.reports

    def knows_count(self) -> bool:
        """Tell whether the count is the trial's. Asked when a checkpoint is taken, perhaps because nobody answers."""
        if not self._core.generation.took_over:
            return True
        body = {"id": self._question(), "method": "taken", "arguments": {}}
        try:
            assert self._core.channel is not None
            answer = self._core.channel.request("POST", "/call", body, give_up_after=1.0)["answer"]
        except ControlChannelError:
            return False
        if answer is None or "value" not in answer:
            return False
        self._count.value = max(self._count.value, int(decode_value(answer["value"])))
        return True

    def _take_over(self, taken: int) -> None:
        self._core.generation.note_taking_over(is_new=False)
        for sequence, result in self._untold:
            if sequence >= taken:
                self._tell(result, wait=False)
        self._untold.clear()
        self._count.value = max(self._count.value, taken)

    def _result(self, kind: str, parameter_id: int | None, trial_job_id: str, sequence: int, value: Any) -> Result:
        metric = {
            "parameter_id": parameter_id,
            "trial_job_id": trial_job_id,
            "type": kind,
            "sequence": sequence,
            "value": nni.dump(value),
        }
        order, step = (sequence, sequence) if kind == "PERIODICAL" else (self._count.finals, self._count.value)
        number = number_in(value)
        report = None if number is None else {"step": step, "value": number, "progress": self._core.progress}
        return Result(metric=nni.dump(metric), order=order, report=report)

    def _tell(self, result: Result, *, wait: bool) -> None:
        """Pass it on, now or soon. A process that the trial has forked has nobody who does it later."""
        if not wait and os.getpid() == self._process:
            self._teller.tell(result)
            return
        self.flush()
        self._ask("metric", {"metric": result["metric"], "order": result["order"]})
        if result["report"] is not None:
            dist_core.report(result["report"]["value"], result["report"]["step"])

    def _ask(self, method: str, arguments: dict[str, Any]) -> Any:
        answer = ask_driver(self._core, self._question(), method, arguments)
        if "exception" in answer:
            raise RuntimeError(f"NNI did not accept the result: {answer['exception']['message']}")
        return decode_value(answer["value"])

    def _question(self) -> str:
        environment = self._core.environment
        assert environment is not None
        # Processes that the trial forks count from where this one was.
        return f"{environment.replica_id}/nni-{os.getpid()}.{next(self._questions)}"
