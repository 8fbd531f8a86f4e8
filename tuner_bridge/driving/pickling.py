"""Pickles an objective for its replicas: code by value, modules that can be imported by name, large data apart.

What an objective closes over and the globals that it reads travel as they are now. Functions and classes of
``__main__`` (a script, a notebook, ``python -m``) and of modules that replicas could not import by name go by value,
all others by name, as in Ray, Dask and submitit.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import importlib
import io
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import cloudpickle

from scheduler.client.carriers import Parts
from trials.inside.user_code import this_machine
from tuner_bridge.driving.unpicklable import explained, large_parts
from tuner_bridge.in_replica import shipped
from tuner_bridge.in_replica.module_values import gather, users_modules
from tuner_bridge.in_replica.process_settings import settings_of_process
from tuner_bridge.in_replica.shipped import ALIGNMENT, ShippedCode

LARGE_BYTES = 1 << 16
"""A buffer of so many travels apart from the pickle."""
TOLD_BYTES = 1 << 20
"""Bytes of all data from which the driver says how much travels."""
_DRAWN_FROM = frozenset(
    {
        ("numpy.random._generator", "Generator"),
        ("numpy.random.mtrand", "RandomState"),
        ("random", "Random"),
        ("itertools", "count"),
        ("itertools", "cycle"),
    }
)
"""Types whose objects give something else each time, by module and name."""
_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}

StandIn = tuple[object, Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Pickled:
    shipped: ShippedCode
    contents: Mapping[str, bytes | Parts]
    """Contents that the scheduler is to keep, by digest."""
    modules: tuple[str, ...]
    """Names of modules that are imported when it is loaded."""


def pickled(value: Any, what: str, stand_in: StandIn | None = None) -> Pickled:
    """Pickle a value for replicas; messages call it ``what``.

    ``stand_in``: an object, and what makes that which replicas find in its place.

    Raises InvalidSweep for what cannot be pickled, by its name and the way to it.
    """
    own = users_modules()
    unfindable = [module for name, module in own.items() if not is_found_by_name(name, module.__file__ or "")]
    file = io.BytesIO()
    with _by_value(unfindable):
        pickler = _Pickler(file, stand_in)
        try:
            pickler.dump(value)
            pickler.dump(pickler.classes)
        except Exception as error:
            # Whatever an object's class raises when it is pickled.
            raise explained(value, what, error, lambda each: _Pickler(io.BytesIO(), stand_in).dump(each)) from error
    for note in pickler.notes:
        print(f"elastune: {what} {note}", file=sys.stderr)
    by_name = {name: module for name, module in own.items() if module not in unfindable}
    pickler.dump(gather(by_name))
    content = file.getvalue()
    digest = hashlib.sha256(content).hexdigest()
    contents: dict[str, bytes | Parts] = {digest: content}
    data = ""
    if pickler.buffers:
        parts = Parts([part for buffer in pickler.buffers for part in _aligned(buffer)])
        data = _digest(parts)
        contents[data] = parts
        if len(parts) >= TOLD_BYTES:
            large = "; ".join(large_parts(value, what, TOLD_BYTES))
            words = f"{what} carries {len(parts) / 2**20:.0f} MiB of data, sent once to each node"
            print(f"elastune: {words}{': ' * bool(large)}{large}", file=sys.stderr)
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    code = ShippedCode(
        pickle=digest,
        data=data,
        sizes=tuple(buffer.nbytes for buffer in pickler.buffers),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        machine=this_machine(),
        main={
            "file": _path_of(main),
            "package": getattr(main, "__package__", None) or "",
            "name": spec.name if spec is not None and spec.name != "__main__" else "",
        },
        imports=tuple(imports_of(main)),
        process=settings_of_process(),
    )
    return Pickled(code, contents, tuple({**pickler.modules, **dict.fromkeys(code.imports)}))


def _path_of(main: types.ModuleType) -> str:
    file = getattr(main, "__file__", None)
    return str(Path(file).absolute()) if file else ""


def _aligned(buffer: memoryview) -> Iterator[memoryview]:
    yield buffer
    rest = -buffer.nbytes % ALIGNMENT
    if rest:
        yield memoryview(bytes(rest))


def _digest(parts: Parts) -> str:
    found = hashlib.sha256()
    for part in parts.parts:
        found.update(part)
    return found.hexdigest()


@contextmanager
def _by_value(modules: Sequence[types.ModuleType]) -> Iterator[None]:
    """Have what these modules define be pickled as what ``__main__`` defines is."""
    registered = []
    try:
        for module in modules:
            if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


class _Scope(dict[str, Any]):
    """Stands for a module's globals in a pickle; where that is loaded, they are the module's there."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(__name__=module.__name__)
        file = getattr(module, "__file__", None) or ""
        package = getattr(module, "__package__", None) or ""
        importable = module.__name__ != "__main__" and is_found_by_name(module.__name__, file)
        self._facts = module.__name__, file, package, importable

    def __reduce_ex__(self, protocol: Any) -> Any:
        return shipped.globals_of, self._facts


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def __init__(self, file: io.BytesIO, stand_in: StandIn | None) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keeps)
        self.buffers: list[memoryview] = []
        self._stand_in: StandIn = stand_in or (object(), object)
        self.modules: dict[str, None] = {}
        """Names of the modules that it pickles something of by name."""
        self.classes: list[tuple[type, str, bool]] = []
        """Classes by value with their qualified names, and whether that name leads to the class in its module."""
        self.notes: dict[str, None] = {}
        """Words for parts of it that do not do in replicas what they do in the script."""

    def _keeps(self, buffer: pickle.PickleBuffer) -> bool:
        """Tell whether a buffer goes into the pickle itself."""
        raw = buffer.raw()
        if raw.nbytes < LARGE_BYTES:
            return True
        self.buffers.append(raw)
        return False

    def reducer_override(self, obj: Any) -> Any:
        if obj is self._stand_in[0]:
            return self._stand_in[1], ()
        if isinstance(obj, types.ModuleType) and obj.__name__ == "__main__":
            return shipped.main_module, ()
        if type(obj) in _LOCKS:
            # Of this process; a replica has one of its own.
            return _LOCKS[type(obj)], ()
        if type(obj) is functools._lru_cache_wrapper and _goes_by_value(obj):
            parameters = obj.cache_parameters()
            return shipped.cached, (obj.__wrapped__, parameters["maxsize"], parameters["typed"])
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor:
            return _tensor_reduced(obj, torch)
        if isinstance(obj, types.ModuleType) and sys.modules.get(obj.__name__) is obj and _has_class_of_its_own(obj):
            # It imports its parts when they are asked for.
            self.modules[obj.__name__] = None
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, getattr(sys.modules.get("tqdm"), "tqdm", ())):
            self.notes.setdefault(
                "carries a progress bar, which stands still in replicas (show_progress_bar=True shows one)"
            )
            told = (getattr(obj, name, None) for name in ("iterable", "total", "desc"))
            return shipped.resting_bar, (*told,)
        kind = type(obj)
        if (kind.__module__, kind.__name__) in _DRAWN_FROM:
            self.notes.setdefault(
                f"carries a generator that other trials draw from too (a {kind.__module__}.{kind.__name__}): each "
                "replica begins with a copy, so trials repeat its draws. Make one in the objective, with trial.number "
                "in its seed"
            )
        reduced = super().reducer_override(obj)
        if isinstance(obj, types.ModuleType):
            self.modules[obj.__name__] = None
        elif reduced is NotImplemented and isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType):
            self.modules[str(obj.__module__)] = None
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2:
            self.classes.append((obj, obj.__qualname__, _leads_to(obj)))
        return reduced

    def _function_getnewargs(self, func: types.FunctionType) -> Any:
        scope = func.__globals__
        changed = sorted(set(_globals_set(func.__code__)))
        if changed:
            names = ", ".join(changed)
            self.notes.setdefault(
                f"sets the global {names}, of which each replica has its own: neither the script nor all other trials "
                "see what it is set to. What is to be known of all trials belongs into a callback (callbacks=[...])"
            )
        module = sys.modules.get(scope.get("__name__", ""))
        if id(scope) not in self.globals_ref and module is not None and vars(module) is scope:
            self.globals_ref[id(scope)] = _Scope(module)
        return super()._function_getnewargs(func)


def _globals_set(code: types.CodeType) -> Iterator[str]:
    """Yield the global variables that a function, or one within it, sets."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL")
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _globals_set(each)


def _has_class_of_its_own(module: types.ModuleType) -> bool:
    """Tell whether a module is of a class that does not say how it is pickled."""
    kind = type(module)
    return (
        kind is not types.ModuleType
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
    )


def _goes_by_value(function: Any) -> bool:
    module = sys.modules.get(function.__module__)
    by_value = function.__module__ == "__main__" or function.__module__ in cloudpickle.list_registry_pickle_by_value()
    return by_value or getattr(module, function.__qualname__, None) is not function


def _leads_to(kind: type) -> bool:
    """Tell whether looking for a class by its name, as pickle does, finds it."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def _tensor_reduced(tensor: Any, torch: Any) -> Any:
    """Pickle a tensor's memory as a buffer, if it has all of that; else as torch does it."""
    plain = (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_leaf
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and not vars(tensor)
        and tensor.nbytes >= LARGE_BYTES
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
    if not plain:
        return NotImplemented
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    kind = str(tensor.dtype).removeprefix("torch.")
    return shipped.tensor, (content, kind, tuple(tensor.shape), tensor.requires_grad)


def is_found_by_name(name: str, file: str) -> bool:
    """Tell whether importing ``name`` from this process's folders gives the module of that file."""
    path: Any = None
    spec = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = _spec_of(".".join(parts[:count]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    origin = getattr(spec, "origin", None)
    return isinstance(origin, str) and bool(file) and os.path.realpath(origin) == os.path.realpath(file)


def _spec_of(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path)
        if spec is not None:
            return spec
    return None


_OWN_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def imports_of(main: types.ModuleType) -> list[str]:
    """Return the imported modules in the order of the script's lines."""
    names: dict[str, None] = {}
    for text in _texts_of(main):
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError):
            continue
        for statement in body:
            names |= dict.fromkeys(_imported(statement, getattr(main, "__package__", None) or ""))
    return [name for name in names if name in sys.modules]


def _texts_of(main: types.ModuleType) -> Iterator[str | bytes]:
    file = getattr(main, "__file__", None)
    if file:
        try:
            yield Path(file).read_bytes()
        except OSError:
            return
    interactive: Any = sys.modules.get("IPython")
    shell = None if interactive is None else interactive.get_ipython()
    if shell is not None:
        yield from map(shell.transform_cell, shell.user_ns.get("In", []))


def _imported(statement: ast.stmt, package: str) -> Iterator[str]:
    """Yield the modules that a statement imports, but not those imported within functions and classes."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, _OWN_SCOPES):
            continue
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                base = (
                    resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
                )
            except ImportError:
                continue
            yield base
            yield from (f"{base}.{each.name}" for each in node.names)
        waiting += ast.iter_child_nodes(node)
