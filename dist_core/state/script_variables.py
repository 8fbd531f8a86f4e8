"""ScriptVariables: what the script keeps in variables around its loop over epochs, as a state of the trial.

Counters, the best weights so far, patience, averages: a script holds them in variables, or in attributes of objects of
its own, that exist before its loop over epochs and change within it. A replica that joins, or a trial that resumes,
would begin them anew. So what has changed since the loop began travels with the trial's state, from rank 0: numbers,
texts, tensors, arrays, lists, deques, sets and dictionaries of them, generators of random numbers, modules that are not
trained, and other objects with ``state_dict`` and ``load_state_dict``. What has not changed stays as each replica's own
code has made it, such as its rank and its data.
"""

from __future__ import annotations

import ctypes
import functools
import json
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel

from dist_core.life import Listener
from dist_core.older_python import qualified_name
from dist_core.state.position import Position

_DEPTH = 2
"""Objects of the script that are looked into, one within the other, as a trainer's stopper is."""
MOST_ITEMS = 10_000
"""Items of a list or dictionary; what has more is data, and stays where it is."""
_ARRAYS = (torch.Tensor, np.ndarray)
SAMPLED = 32
"""Elements of a tensor that are looked at to see whether it has changed."""
NUMBERS_AND_TEXTS = (type(None), bool, int, float, str)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_NOTHING = object()
_OURS = ("dist_core", "tuner_bridge", "trials", "scheduler")
_SERVED = ("accelerate", "lightning", "optuna", "pytorch_lightning", "torch", "transformers", "trl")
"""Libraries whose objects a trial has by other ways, or whose state is not to be touched."""
_GLOBAL = "global "
NAME = "variables"
"""Name of this state among the trial's."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """Copy of what an object with ``state_dict`` held."""

    content: dict[str, Any]


class ScriptVariables(Listener):
    """Variables that the script changes in its loop over epochs, as a state of the trial.

    ``belongs_to_trial``: returns a test that tells of an object whether it is a part of the trial's other states, as a
    trained model is.

    ``warn``: told once of variables that have changed and that no other replica can be given.
    """

    def __init__(
        self, position: Position, belongs_to_trial: Callable[[], Callable[[Any], bool]], warn: Callable[[str], None]
    ) -> None:
        self._position = position
        self._belongs_to_trial = belongs_to_trial
        self._warn = warn
        self._frame: FrameType | None = None
        self._at_first: dict[str, Any] = {}
        """Fingerprint of each variable when the loop began, by its path."""
        self._have_changed: dict[str, None] = {}
        self._waiting: dict[str, Any] = {}
        """Content that came before the loop began, until code comes to where the trial stands."""
        self._warned_paths: set[str] = set()

    # ------------------------------------------------------------------ the loop over epochs

    def begin(self, caller: FrameType) -> None:
        """Begin to watch the loop over epochs in the user's code that ``caller`` belongs to or is called by."""
        self.end()
        frame = users_frame(caller)
        if frame is None:
            return
        self._frame = frame
        self._at_first = {path: _fingerprint(value) for path, value in self._leaves()}
        self._load(self._waiting)

    def loop_began(self, *, completed: bool) -> None:
        """Take what came once more: code between the epoch's beginning and here has run a second time."""
        if completed or self._waiting.get("in_loop"):
            self._load(self._waiting)
        if not completed:
            self._waiting = {}

    def look(self) -> None:
        """Note what has changed by now: a counter may be back at its first value when somebody asks."""
        for path, value in self._leaves():
            if path in self._at_first and path not in self._have_changed:
                now = _fingerprint(value)
                if now is None or now != self._at_first[path]:
                    self._have_changed[path] = None

    def runs_again(self) -> None:
        self.end()

    def end(self) -> None:
        self._frame = None
        self._at_first, self._have_changed = {}, {}

    def tensors(self) -> dict[str, tuple[torch.Tensor, Any]]:
        """Return tensors of the script's own by path, those in modules and lists included, and what each is now.

        An ``AveragedModel`` is left out: its updates pass through the wrapped model.
        """
        return {
            path: (tensor, _fingerprint(tensor))
            for name, value in self._leaves()
            if name in self._at_first and not isinstance(value, AveragedModel)
            for path, tensor in _tensors_in(value, name)
        }

    def remember(self) -> Callable[..., None]:
        """Return a call that puts back what the variables are now; with ``copies_only`` what holds tensors alone."""
        copies = {
            path: _copied(value)
            for path, value in self._leaves()
            if path in self._at_first and (path in self._have_changed or not _is_large(value))
        }
        held = {path: value for path, value in copies.items() if value is not _NOTHING}
        frame = self._frame

        def undo(*, copies_only: bool = False) -> None:
            if self._frame is not frame or frame is None:
                return
            present = dict(self._leaves())
            for path, value in held.items():
                if copies_only and not isinstance(value, _Copy) and not _holds_tensors(value):
                    continue
                if _is_plain(value, MOST_ITEMS):
                    self._put(path, value, present.get(path))
                else:
                    self._load_into(path, present.get(path), value.content)

        return undo

    # ------------------------------------------------------------------ a state of the trial

    def state_dict(self) -> dict[str, Any]:
        if self._frame is None or self._waiting:
            return self._waiting
        self.look()
        now, variables = dict(self._leaves()), dict[str, dict[str, Any]]()
        for path in self._have_changed:
            value = now.get(path, _NOTHING)
            if value is not _NOTHING and _is_listed(value):
                variables[path] = {"value": list(value), "kind": type(value).__name__}
            elif value is not _NOTHING and _is_generator(value):
                variables[path] = {"generator": _read_generator(value)}
            elif value is _NOTHING or not _is_plain(value, MOST_ITEMS):
                content = _state_of(value)
                if content is None:
                    self._tell(path)
                    continue
                variables[path] = {"state": content}
            else:
                variables[path] = {"value": value}
        within = self._position.in_training_loop
        return {"code": _name_of(self._frame.f_code), "in_loop": within, "variables": variables}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._frame is None:
            self._waiting = state
        else:
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        if self._frame is None or state.get("code") != _name_of(self._frame.f_code):
            return
        present = dict(self._leaves())
        for path, content in state["variables"].items():
            if path not in self._at_first:
                continue
            self._have_changed[path] = None
            if "state" in content:
                self._load_into(path, present.get(path), content["state"])
            elif "generator" in content:
                _set_generator(present.get(path), content["generator"])
            else:
                value = content["value"]
                if present.get(path) is None and "kind" in content:
                    value = set(value) if content["kind"] == "set" else deque(value)
                self._put(path, value, present.get(path))

    def _load_into(self, path: str, present: Any, content: dict[str, Any]) -> None:
        if not (_is_module(present) or _is_stateful(present)):
            return
        try:
            present.load_state_dict(content)
        except Exception:
            if _is_users_class(type(present)):
                raise
            # A library's object that takes its state in a certain moment only.
            self._tell(path)

    def _tell(self, path: str) -> None:
        if path in self._warned_paths:
            return
        self._warned_paths.add(path)
        self._warn(
            f"the script's variable {path!r} has changed since its loop over epochs began, but it cannot be sent to "
            "replicas that join later, or restored when the trial resumes: they begin with the value that the "
            "script sets before the loop. Keep numbers, strings, tensors and lists and dictionaries of them in "
            "dist_core.keep(), or give the object state_dict() and load_state_dict()"
        )

    # ------------------------------------------------------------------ variables

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield variables by path, attributes of the script's own objects among them (``stopper.best``).

        Of the script's own modules, which are saved by ``state_dict()``, the numbers that are not in it, and the
        tensors of those that are not trained, as losses are; and numbers that are global where the loop stands in a
        function.
        """
        if self._frame is None:
            return
        if self._frame.f_locals is not self._frame.f_globals:
            for name, value in list(self._frame.f_globals.items()):
                if type(value) in NUMBERS_AND_TEXTS and not name.startswith("__"):
                    yield f"{_GLOBAL}{name}", value
        belongs = self._belongs_to_trial()
        for name, value in list(self._frame.f_locals.items()):
            if name.startswith("__"):
                continue
            if _is_module(value) and _is_users_class(type(value)):
                kinds = NUMBERS_AND_TEXTS if any(map(belongs, value.modules())) else (*NUMBERS_AND_TEXTS, *_ARRAYS)
                for attribute, held in list(vars(value).items()):
                    if type(held) in kinds and attribute != "training" and not attribute.startswith("_"):
                        yield f"{name}.{attribute}", held
            yield from self._leaves_of(name, value, belongs, depth=_DEPTH)

    def _leaves_of(
        self, path: str, value: Any, belongs: Callable[[Any], bool], depth: int
    ) -> Iterator[tuple[str, Any]]:
        if depth and _is_loader(value):
            # A script reaches the dataset by way of its loader as well.
            yield from self._leaves_of(f"{path}.dataset", value.dataset, belongs, depth - 1)
        if belongs(value):
            return
        if _is_module(value) and any(map(belongs, value.modules())):
            yield from _beside_trained(path, value, belongs)
        elif _is_leaf(value) or path in self._at_first:
            yield path, value
        elif depth and is_object_of_user(value):
            for attribute, held in list(vars(value).items()):
                yield from self._leaves_of(f"{path}.{attribute}", held, belongs, depth - 1)
        elif isinstance(value, torch.utils.data.Dataset) and _is_users_class(type(value)):
            for attribute, held in list(vars(value).items()):
                # No lists and dictionaries, which may be caches of its samples.
                if type(held) in (*NUMBERS_AND_TEXTS, *_ARRAYS) and _is_leaf(held):
                    yield f"{path}.{attribute}", held

    def _put(self, path: str, value: Any, present: Any) -> None:
        assert self._frame is not None
        value = placed(value, present)
        if value is present or (_is_sealed(value) and value == present):
            return
        if path.startswith(_GLOBAL):
            self._frame.f_globals[path.removeprefix(_GLOBAL)] = value
            return
        try:
            put_variable(self._frame, path, value)
        except (AttributeError, TypeError):
            # Of an object that does not let its attributes be set.
            self._tell(path)


def _beside_trained(path: str, module: Any, belongs: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield what a module around a trained one has of its own, as an average's or a teacher's weights."""
    for name, tensor in (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)):
        if not tensor.requires_grad:
            yield f"{path}.{name}", tensor
    for name, child in module.named_children():
        if any(map(belongs, child.modules())):
            if not belongs(child):
                yield from _beside_trained(f"{path}.{name}", child, belongs)
        else:
            yield f"{path}.{name}", child


def put_variable(frame: FrameType, path: str, value: Any) -> None:
    """Give a variable of a function that runs another value, or an attribute of what it holds (``stopper.best``)."""
    variables = frame.f_locals
    name, *attributes = path.split(".")
    if attributes:
        setattr(functools.reduce(getattr, attributes[:-1], variables[name]), attributes[-1], value)
        return
    variables[name] = value
    if sys.version_info < (3, 13):
        # There, f_locals is a copy of a function's variables.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the nearest frame of the user's code, from this one outwards: a progress bar may lie between.

    None where code of ours drives the loop.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        return None
    return frame


def _name_of(code: CodeType) -> str:
    return f"{qualified_name(code)}:{code.co_firstlineno}"


def _is_leaf(value: Any) -> bool:
    is_plain = _is_plain(value, MOST_ITEMS) or _is_listed(value)
    return is_plain or _is_generator(value) or _is_module(value) or _is_stateful(value)


def _is_listed(value: Any) -> bool:
    """Tell whether a value is a deque or a set of plain values; it travels as a list."""
    return type(value) in (deque, set) and len(value) <= MOST_ITEMS and _is_plain(list(value), MOST_ITEMS)


def _is_sealed(value: Any) -> bool:
    """Tell whether a value is a number, a text or a tuple of them, which may be equal without being the same."""
    return type(value) in NUMBERS_AND_TEXTS or (type(value) is tuple and all(map(_is_sealed, value)))


def _is_generator(value: Any) -> bool:
    """Tell whether a value generates random numbers; torch's generators are left to loaders, which have their state."""
    return type(value) in (np.random.Generator, np.random.RandomState, random.Random)


def _read_generator(generator: Any) -> str:
    """Return where a generator stands, as JSON: its numbers are larger than a checkpoint's."""
    if isinstance(generator, random.Random):
        return json.dumps(generator.getstate())
    is_new = isinstance(generator, np.random.Generator)
    state = generator.bit_generator.state if is_new else generator.get_state(legacy=False)
    return json.dumps(state, default=lambda array: array.tolist())


def _set_generator(generator: Any, state: str) -> None:
    content = json.loads(state)
    if isinstance(generator, random.Random):
        version, numbers, following = content
        generator.setstate((version, tuple(numbers), following))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(content)
    elif isinstance(generator, np.random.Generator) and _bits_of(generator) == content["bit_generator"]:
        generator.bit_generator.state = content


def _bits_of(generator: np.random.Generator) -> str:
    return str(generator.bit_generator.state["bit_generator"])


def _is_plain(value: Any, items: int) -> bool:
    """Tell whether a value is made of numbers, texts, tensors and arrays alone, of few enough items."""
    if type(value) in NUMBERS_AND_TEXTS or (isinstance(value, np.generic) and value.dtype.kind in "biuf"):
        return True
    if isinstance(value, torch.Tensor):
        lies_plainly = value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.is_conj())
        return type(value) is torch.Tensor and lies_plainly
    if isinstance(value, np.ndarray):
        lies_plainly = value.flags.writeable and value.dtype.isnative and all(stride >= 0 for stride in value.strides)
        return value.dtype.kind in "biuf" and value.itemsize <= 8 and lies_plainly
    if type(value) in (list, tuple):
        return len(value) <= items and all(_is_plain(each, items // max(1, len(value))) for each in value)
    if isinstance(value, dict):
        keys_are_plain = len(value) <= items and all(type(key) in (int, str) for key in value)
        return keys_are_plain and all(_is_plain(each, items // max(1, len(value))) for each in value.values())
    return False


def _is_loader(value: Any) -> bool:
    is_ours = type(value).__module__ == "dist_core.training.loader"
    return isinstance(value, torch.utils.data.DataLoader) or (is_ours and hasattr(value, "dataset"))


def _is_module(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


def _is_stateful(value: Any) -> bool:
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, (type, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler))
        and type(value).__module__.partition(".")[0] not in (*_OURS, *_SERVED)
    )


def is_object_of_user(value: Any) -> bool:
    """Tell whether a value is an object of a class that the script, or a module beside it, defines."""
    is_users = _is_users_class(type(value)) and hasattr(value, "__dict__")
    return is_users and not isinstance(value, (type, torch.utils.data.Dataset))


def _is_users_class(kind: type) -> bool:
    name = kind.__module__
    return name in sys.modules and is_users_module(name)


@functools.cache
def is_users_module(name: str) -> bool:
    """Tell whether a module that has been imported is the script, or lies beside it."""
    file = getattr(sys.modules.get(name), "__file__", None)
    is_ours = name.partition(".")[0] in _OURS
    return name == "__main__" or (file is not None and not file.startswith(_LIBRARIES) and not is_ours)


def _tensors_in(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors by path, of modules, lists and dictionaries each one."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif _is_module(value):
        yield from ((f"{path}.{name}", each) for name, each in value.named_parameters())
    elif type(value) in (list, tuple):
        for index, each in enumerate(value):
            yield from _tensors_in(each, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors_in(each, f"{path}[{key!r}]")
    elif _is_stateful(value):
        yield from _tensors_in(_state_of(value), path)


def _is_large(value: Any) -> bool:
    """Tell whether a value is copied only once it has been seen to change."""
    if type(value) in (list, tuple):
        return any(map(_is_large, value))
    if isinstance(value, dict):
        return any(map(_is_large, value.values()))
    return _holds_tensors(value) or (isinstance(value, np.ndarray) and value.size > MOST_ITEMS)


def _holds_tensors(value: Any) -> bool:
    return next(_tensors_in(value, ""), None) is not None


def _fingerprint(value: Any) -> Any:
    """Return something that differs when a value has changed; None where nothing tells."""
    if type(value) in NUMBERS_AND_TEXTS:
        return type(value), value
    if isinstance(value, torch.Tensor):
        return id(value), *_elements_of(value)
    if isinstance(value, np.ndarray):
        stride = max(1, value.size // SAMPLED)
        return id(value), value.shape, value.flat[::stride].tobytes()
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple, deque):
        return id(value), *map(_fingerprint, value)
    if type(value) is set:
        return id(value), frozenset(value)
    if _is_generator(value):
        return id(value), _read_generator(value)
    if isinstance(value, dict) and _is_plain(value, MOST_ITEMS):
        return id(value), *((key, _fingerprint(each)) for key, each in value.items())
    if _is_module(value):
        return id(value), *(_elements_of(each) for each in (*value.parameters(), *value.buffers()))
    content = _state_of(value)
    return None if content is None else _fingerprint({**content, "": id(value)})[1:]


def _elements_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, version and a few elements: a change by way of ``.data`` leaves the version as it is."""
    version = 0 if tensor.is_inference() else tensor._version
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return tuple(tensor.shape), version
    if tensor.device.type != "cpu":
        # Reading from a device would wait for all that it has to do.
        return tuple(tensor.shape), version, tensor.data_ptr()
    stride = max(1, tensor.numel() // SAMPLED)
    elements = tensor.detach().reshape(-1)[::stride] if tensor.is_contiguous() else tensor.detach().flatten()[:SAMPLED]
    return tuple(tensor.shape), version, str(elements.tolist())


def _state_of(value: Any) -> dict[str, Any] | None:
    """Return the state of an object with ``state_dict``, where it can travel; else None."""
    if value is _NOTHING or not (_is_module(value) or _is_stateful(value)):
        return None
    try:
        content = value.state_dict()
    except Exception:
        # Code of others, which nobody had asked for its state so far.
        return None
    return dict(content) if isinstance(content, dict) and _is_plain(dict(content), MOST_ITEMS) else None


def _copied(value: Any) -> Any:
    if _is_listed(value):
        return copied_plain(list(value))
    if _is_plain(value, MOST_ITEMS):
        return copied_plain(value)
    content = _state_of(value)
    return _NOTHING if content is None else _Copy(copied_plain(content))


def copied_plain(value: Any) -> Any:
    """Copy tensors and arrays, and the lists and dictionaries that hold them."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(map(copied_plain, value))
    if isinstance(value, dict):
        return {key: copied_plain(each) for key, each in value.items()}
    return value


def placed(value: Any, present: Any) -> Any:
    """Return the value in what holds it now where that fits: other names may lead there, too."""
    if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
        if present.shape == value.shape and present.dtype == value.dtype and not present.requires_grad:
            with torch.no_grad():
                present.copy_(value)
            return present
        return value.to(present.device)
    if isinstance(present, np.ndarray) and isinstance(value, torch.Tensor):
        if tuple(value.shape) == present.shape:
            np.copyto(present, value.numpy(), casting="unsafe")
            return present
        return value.numpy()
    if type(value) is list and type(present) in (deque, set):
        present.clear()
        (present.extend if type(present) is deque else present.update)(value)
        return present
    if type(value) is list and type(present) is list:
        before = [*present, *[None] * max(0, len(value) - len(present))]
        present[:] = [placed(each, there) for each, there in zip(value, before, strict=False)]
        return present
    if isinstance(value, dict) and isinstance(present, dict):
        held = {key: placed(each, present.get(key)) for key, each in value.items()}
        present.clear()
        present.update(held)
        return present
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: placed(each, None) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(placed(each, None) for each in value)
    return value
