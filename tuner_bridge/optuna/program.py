"""Program: a command in any language as the objective of a study; what it prints tells how it does.

Its parameters are put into the command, its reports and its value are read from its lines by regular expressions, as
the collectors of Katib read theirs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, cast

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
    json_to_distribution,
)

from trials.inside.user_code import moved_path
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.optuna.ahead import suggest

LOOK_SECONDS = 0.5
"""Between two looks whether the trial is to leave, while its program prints nothing."""
ENDING_SECONDS = 10.0
"""Seconds of a program from being told to end until it is ended."""
WORDS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """See ``program``. Callable with a trial of Optuna's own as well, for a plain ``study.optimize``."""

    words: tuple[str, ...]
    space: Mapping[str, BaseDistribution]
    report: str | None
    value: str | None

    def to_json(self) -> dict[str, Any]:
        space = {name: distribution_to_json(each) for name, each in self.space.items()}
        return {"words": list(self.words), "space": space, "report": self.report, "value": self.value}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Program:
        space = {name: json_to_distribution(text) for name, text in document["space"].items()}
        return cls(words=tuple(document["words"]), space=space, report=document["report"], value=document["value"])

    def __call__(self, trial: Any) -> float:
        """Run it to its end; raises TrialPruned, or RuntimeError where it fails or prints no value."""
        drawn = {name: suggest(trial, name, each) for name, each in self.space.items()}
        words = [moved_path(_filled(word, drawn)) for word in self.words]
        reported: float | None = None
        value: float | None = None
        latest: deque[str] = deque(maxlen=WORDS_SHOWN)
        counted = itertools.count()
        with _running(words) as process:
            for line in _lines(process, trial):
                print(line, flush=True)
                latest.append(line)
                match = None if self.report is None else re.search(self.report, line)
                if match is not None:
                    reported = _number(match, "value", line)
                    has_step = "step" in match.groupdict()
                    trial.report(reported, int(_number(match, "step", line)) if has_step else next(counted))
                    if trial.should_prune():
                        raise optuna.TrialPruned
                match = None if self.value is None else re.search(self.value, line)
                if match is not None:
                    value = _number(match, "value", line)
            status = process.wait()
        if status != 0:
            raise RuntimeError(f"{words[0]} ended with status {status}; the last it printed: {' | '.join(latest)}")
        ended = value if self.value is not None else reported
        if ended is None:
            raise RuntimeError(
                f"no line that {words[0]} printed matches {self.value or self.report!r}; its last: {' | '.join(latest)}"
            )
        return ended


def program(
    command: str | list[str],
    space: Mapping[str, BaseDistribution],
    *,
    report: str | None = None,
    value: str | None = None,
) -> Program:
    """Make a command an objective: ``program("./train --lr {lr}", {"lr": FloatDistribution(1e-4, 1.0)}, ...)``.

    Args:
        command: A command, split as a shell would and run without one, or a list of texts. Names of the ``space`` in
            braces are replaced by what the trial has drawn.
        space: Distributions by the names of the parameters.
        report: Regular expression of lines that report. Its group ``value`` (or the first) is the objective and its
            group ``step`` the step; without the latter, lines are counted.
        value: Regular expression of the line with the trial's value; default: the last value that was reported.

    Raises:
        InvalidSweep: The command cannot be run, or a name or an expression does not fit.
    """
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    if not words:
        raise InvalidSweep("the command is empty; name a program and its arguments")
    named = {name for word in words for _, name, _, _ in Formatter().parse(word) if name is not None}
    for name in named - set(space):
        if not name.isidentifier():
            raise InvalidSweep(
                f"the command has {{{name}}}; write a parameter's name alone in the braces, and {{{{ }}}} for braces"
            )
        raise InvalidSweep(
            f"the command has {{{name}}}, which is not in the space; it has {', '.join(space) or 'none'}"
        )
    for name in set(space) - named:
        raise InvalidSweep(f"the parameter {name!r} is not used in the command; write it as {{{name}}}")
    for name, each in space.items():
        if not isinstance(each, (FloatDistribution, IntDistribution, CategoricalDistribution)):
            raise InvalidSweep(f"the distribution of {name!r} is {each!r}; give one of optuna.distributions")
    samples = {
        name: each.choices[0] if isinstance(each, CategoricalDistribution) else cast("FloatDistribution", each).low
        for name, each in space.items()
    }
    for word in words:
        try:
            _filled(word, samples)
        except (ValueError, TypeError) as error:
            raise InvalidSweep(f"{word!r} of the command cannot be formatted with {samples}: {error}") from error
    if report is None and value is None:
        raise InvalidSweep(
            "the value of a trial cannot be found; give report= or value=, a regular expression of a line"
        )
    for what, pattern in (("report", report), ("value", value)):
        _check_pattern(what, pattern)
    if "/" in words[0]:
        words[0] = os.path.abspath(words[0])
    return Program(words=tuple(words), space=dict(space), report=report, value=value)


def _check_pattern(what: str, pattern: str | None) -> None:
    if pattern is None:
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise InvalidSweep(f"{what} is {pattern!r}, which is not a valid regular expression: {error}") from error
    if not groups:
        raise InvalidSweep(f"{what} is {pattern!r}; put its number into a group, such as r'loss=(?P<value>\\S+)'")


def _filled(word: str, drawn: Mapping[str, Any]) -> str:
    """Return a word of the command with its parameters: in their own format where the word has none."""
    filled = []
    for literal, name, form, conversion in Formatter().parse(word):
        filled.append(literal)
        if name is not None:
            value = Formatter().convert_field(drawn[name], conversion)
            filled.append(format(value, form) if form else _written(value))
    return "".join(filled)


def _written(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _number(found: re.Match[str], group: str, line: str) -> float:
    text = found.group(group if group in found.groupdict() else 1)
    try:
        return float(text)
    except (TypeError, ValueError):
        raise RuntimeError(f"the {group} {text!r} is not a number, in the line {line!r:.200}") from None


@contextlib.contextmanager
def _running(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise RuntimeError(f"{words[0]} cannot be run: {error}") from error
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _lines(process: subprocess.Popen[str], trial: Any) -> Iterator[str]:
    """Yield the program's lines as they come; between them the trial may be told to leave."""
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as printed:
            for line in printed:
                arrived.put(line.rstrip("\n"))
        arrived.put(None)

    threading.Thread(target=read, name="program-lines", daemon=True).start()
    while True:
        try:
            line = arrived.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            sys.stdout.flush()
            if hasattr(trial, "leave_if_asked"):
                trial.leave_if_asked()
            continue
        if line is None:
            return
        yield line
