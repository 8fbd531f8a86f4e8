"""Teller: passes a trial's intermediate results on to NNI beside its work, in order, several at a time.

What has not been passed on is part of the trial's state. So a checkpoint that counts a result holds it too, until NNI
has it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from dist_core.errors import ControlChannelError
from dist_core.trial.plain_replica import Participant
from tuner_bridge.errors import InvalidValue
from tuner_bridge.in_replica.run import naming_what_is_not_taken
from tuner_bridge.in_replica.wire import encode_value

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
    """What the scheduler hears of it: step, value and progress."""


class Teller:
    def __init__(self, core: Participant, question: Callable[[], str]) -> None:
        """``question`` gives names for what is asked, each another."""
        self._core, self._question = core, question
        self._changed = threading.Condition()
        self._untold: deque[Result] = deque()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def tell(self, result: Result) -> None:
        """Raises RuntimeError when NNI has refused an earlier one, ControlChannelError when nobody listens."""
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
        """Until NNI has all of them, or this replica is not wanted any more. Raises as ``tell``."""
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
            raise RuntimeError(f"NNI did not take the result: {answer['exception']['message']}")
        reports = [each["report"] for each in results if each["report"] is not None]
        if reports:
            channel.request("POST", "/reports", {"reports": reports})
