"""Counts that a script keeps by itself: numbers, and what holds some, around the batch that its loop's body computes.

A step that loses a replica does not count, and its body runs again with the same batch. A count of batches, a sum of
losses or a list that the body appends to would move twice then, and a loop that ends by its own count would end a step
early. So they are put back to what they were when the step began.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from dist_core.life import Listener
from dist_core.older_python import qualified_name
from dist_core.state.position import Position
from dist_core.state.script_variables import (
    NUMBERS_AND_TEXTS,
    copied_plain,
    is_object_of_user,
    placed,
    put_variable,
    users_frame,
)

MOST_FRAMES = 3
"""The user's functions that are looked at, from the one with the loop over batches outwards."""
_COUNTED = frozenset({*NUMBERS_AND_TEXTS, np.float32, np.float64, np.int32, np.int64})
_DICTIONARIES = frozenset({dict, OrderedDict, defaultdict, Counter})
MOST_ITEMS = 64
"""Largest size of a dictionary or a deque of counts."""
_IN_GLOBALS = None


class Counts:
    """Counts of the functions that call this, as they are when it is made."""

    def __init__(self) -> None:
        # Made in every step: whatever is no count is left out at once, for a batch must not be held beyond its step.
        self._numbers: dict[CodeType, dict[str | None, dict[str, Any]]] = {}
        """Numbers by function, and of each by the name of what holds them."""
        self._lists: dict[int, tuple[list[Any], int]] = {}
        self._dictionaries: dict[int, tuple[dict[Any, Any], frozenset[Any], dict[Any, Any]]] = {}
        """Dictionaries, their keys, and the numbers in them."""
        self._deques: dict[int, tuple[deque[Any], tuple[Any, ...]]] = {}
        for frame in users_frames():
            numbers = self._numbers[frame.f_code] = {}
            for held_by, variables in _variables_of(frame):
                numbers[held_by] = {name: value for name, value in variables.items() if type(value) in _COUNTED}
                for value in variables.values():
                    self._note(value)

    def _note(self, value: Any) -> None:
        kind = type(value)
        if kind is list:
            self._lists[id(value)] = (value, len(value))
        elif kind in _DICTIONARIES and len(value) <= MOST_ITEMS:
            numbers = {name: each for name, each in value.items() if type(each) in _COUNTED}
            self._dictionaries[id(value)] = (value, frozenset(value), numbers)
            self._lists |= {id(each): (each, len(each)) for each in value.values() if type(each) is list}
        elif kind is deque and len(value) <= MOST_ITEMS and all(type(each) in _COUNTED for each in value):
            self._deques[id(value)] = (value, tuple(value))

    def put_back(self) -> None:
        """Put them back, where the same functions have called."""
        for values, length in self._lists.values():
            del values[length:]
        for dictionary, names, counted in self._dictionaries.values():
            for name in [name for name, each in dictionary.items() if name not in names and type(each) in _COUNTED]:
                del dictionary[name]
            dictionary.update(counted)
        for recent, kept in self._deques.values():
            recent.clear()
            recent.extend(kept)
        for frame in users_frames():
            numbers = self._numbers.get(frame.f_code, {})
            for held_by, variables in _variables_of(frame):
                for name, value in numbers.get(held_by, {}).items():
                    now = variables.get(name)
                    if type(now) not in _COUNTED or now == value:
                        continue
                    if held_by is _IN_GLOBALS:
                        frame.f_globals[name] = value
                    else:
                        path = f"{held_by}.{name}" if held_by else name
                        put_variable(frame, path, value)


class LoopSums(Listener):
    """Sums and counts of the present training loop, as a state of the trial.

    A trial that resumes within an epoch runs the script from the epoch's top, which sets its sums to 0: a mean loss
    would be that of the rest of the epoch. Only where one replica has seen all samples: others' sums are their own.
    """

    def __init__(self, position: Position, is_alone: Callable[[], bool]) -> None:
        self._position = position
        self._is_alone = is_alone
        self._at_first: dict[str, dict[str, Any]] = {}
        """Numbers by function when the loop began."""
        self._waiting: dict[str, Any] = {}

    @property
    def _loop(self) -> list[int]:
        return [self._position.epoch, self._position.loops_begun]

    def loop_began(self, *, completed: bool) -> None:
        if completed:
            return
        present = numbers_by_function()
        is_the_one = self._waiting.get("loop") == self._loop and self._is_alone()
        for function, numbers in self._waiting["numbers"].items() if is_the_one else ():
            frame, variables = present.get(function, (None, {}))
            for path in numbers.keys() & variables.keys():
                assert frame is not None
                put_variable(frame, path, placed(numbers[path], variables[path]))
        self._waiting = {}
        self._at_first = {name: copied_plain(numbers) for name, (_, numbers) in numbers_by_function().items()}

    def loop_ended(self) -> None:
        self._at_first = {}

    def runs_again(self) -> None:
        self._at_first = {}

    def state_dict(self) -> dict[str, Any]:
        if self._waiting or not (self._position.in_training_loop and self._is_alone()):
            return self._waiting
        moved = {
            name: {
                path: value
                for path, value in numbers.items()
                if path in self._at_first.get(name, {}) and not bool(self._at_first[name][path] == value)
            }
            for name, (_, numbers) in numbers_by_function().items()
        }
        return {"loop": self._loop, "numbers": {name: copied_plain(found) for name, found in moved.items() if found}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # A survivor that takes over another one's state stays in its loop.
        self._waiting = {} if self._position.in_training_loop else state


def numbers_by_function() -> dict[str, tuple[FrameType, dict[str, Any]]]:
    """Return the numbers, and tensors of one, that the user's functions hold in variables and objects, by path."""
    by_function = {}
    for frame in users_frames():
        numbers = {
            f"{held_by}.{name}" if held_by else name: value
            for held_by, variables in _variables_of(frame)
            if held_by is not _IN_GLOBALS
            for name, value in variables.items()
            if type(value) in (int, float) or _is_a_number(value)
        }
        by_function[f"{qualified_name(frame.f_code)}:{frame.f_code.co_firstlineno}"] = frame, numbers
    return by_function


def _is_a_number(value: Any) -> bool:
    return type(value) is torch.Tensor and value.ndim == 0 and value.device.type == "cpu" and not value.requires_grad


def users_frames() -> Iterator[FrameType]:
    """Yield the user's functions, from the one that has the loop over batches outwards; each once."""
    frame: FrameType | None = sys._getframe(1)
    seen: set[CodeType] = set()
    while len(seen) < MOST_FRAMES:
        while frame is not None and frame.f_globals.get("__name__", "").startswith("dist_core"):
            frame = frame.f_back
        frame = users_frame(frame)
        if frame is None:
            return
        if frame.f_code not in seen:
            seen.add(frame.f_code)
            yield frame
        frame = frame.f_back


def _variables_of(frame: FrameType) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """Yield a function's variables, by no name; attributes of the user's objects, by the object's path; and globals."""
    variables = dict(frame.f_locals)
    yield "", variables
    for name, value in variables.items():
        if is_object_of_user(value):
            yield name, vars(value)
            for attribute, held in list(vars(value).items()):
                if type(held) not in _COUNTED and is_object_of_user(held):
                    yield f"{name}.{attribute}", vars(held)
    if frame.f_locals is not frame.f_globals:
        own = frame.f_globals
        yield _IN_GLOBALS, {name: own[name] for name in frame.f_code.co_names if name in own}
