"""A sweep's code as its replicas get it: objects of the driver's process by value, made again here.

The driver pickles (``driving.pickling``), the scheduler keeps the bytes by their digest and opens none, a replica loads
them. Nothing goes back that way.

What is ``__main__``'s in the driver is ``__main__``'s here: functions share its globals, and classes are found there by
whoever pickles their objects, as in the script itself.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import logging
import mmap
import os
import pickle
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from dist_core.errors import ControlChannelError
from dist_core.link.client import ControlChannel
from dist_core.link.environment import ReplicaEnvironment
from trials.inside.user_code import moved_path, this_machine
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.in_replica.module_values import ModuleValues, set_values
from tuner_bridge.in_replica.process_settings import set_process

ALIGNMENT = 64
"""Alignment in bytes of each buffer in the file of the data."""
DOWNLOAD_SECONDS = 600.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedCode:
    """Description of pickled objects: where replicas find them, and what their process has to be like first."""

    pickle: str
    """SHA-256 digest."""
    data: str = ""
    """Digest of the file with the large buffers, each at a multiple of ``ALIGNMENT``; empty: there are none."""
    sizes: tuple[int, ...] = ()
    """Bytes of each buffer."""
    python: str
    """Version of Python, as "3.11": another one has other code."""
    machine: str
    """The driver's, as ``this_machine`` names it."""
    main: Mapping[str, str]
    """Facts of the driver's ``__main__``: ``file``, ``package``, and the ``name`` that ``python -m`` started it by."""
    imports: tuple[str, ...] = ()
    """Modules that the driver's ``__main__`` imports at its top, some for what they do by that alone."""
    process: Mapping[str, Any]
    """Settings of the driver's process; see ``process_settings``."""

    @property
    def digests(self) -> tuple[str, ...]:
        return (self.pickle, self.data) if self.data else (self.pickle,)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sizes": list(self.sizes), "imports": list(self.imports)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ShippedCode:
        lists = {name: tuple(document[name]) for name in ("sizes", "imports")}
        return cls(**{**document, **lists})


def receive(shipped: ShippedCode, channel: ControlChannel, environment: ReplicaEnvironment) -> Any:
    """Load what was pickled; the same object for the same code, as long as this process lives.

    Raises InvalidSweep where it cannot be loaded here, with what to do about it, and what its modules raise.
    """
    if shipped.pickle not in _kept:
        _kept[shipped.pickle] = receive_from(shipped, lambda digest: _fetched(digest, channel, environment))
    return _kept[shipped.pickle]


def resting_bar(iterable: Any, total: float | None, words: str | None) -> Any:
    """Return a progress bar of tqdm's that shows nothing: the driver's counts its own process's work."""
    return importlib.import_module("tqdm").tqdm(iterable, total=total, desc=words, disable=True)


_kept: dict[str, Any] = {}


def has_code() -> bool:
    """Tell whether this process has a sweep's code: what it runs is a trial then, and no longer an import."""
    return bool(_kept)


def receive_from(shipped: ShippedCode, file_of: Callable[[str], Path]) -> Any:
    """Load the shipped object; ``file_of`` finds a file by its digest."""
    present = f"{sys.version_info.major}.{sys.version_info.minor}"
    if shipped.python != present:
        image = os.environ.get("ELASTUNE_IMAGE")
        where = f"the image {image}" if image else "this node"
        raise InvalidSweep(
            f"the sweep was started with Python {shipped.python}, and {where} has {present}: pickled code "
            "needs the same version. Use one version in both, or run a script instead: "
            'optimize(study, script("train.py"))'
        )
    content = file_of(shipped.pickle).read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != shipped.pickle:
        raise InvalidSweep(
            f"the pickled code is damaged: its digest is {found}, it should be {shipped.pickle}. Start the sweep again"
        )
    buffers = list(_mapped(file_of(shipped.data), shipped.sizes)) if shipped.data else []
    _become_main(shipped.main)
    set_process(shipped.process)
    for name in shipped.imports:
        _import_if_there(name)
    unpickler = pickle.Unpickler(io.BytesIO(content), buffers=buffers)  # noqa: S301  # from the driver, which started us
    try:
        made = unpickler.load()
        classes: Sequence[tuple[type, str, bool]] = unpickler.load()
        values: ModuleValues = unpickler.load()
    except ModuleNotFoundError as error:
        raise _with_advice(error) from error
    for kind, name, leads_to_it in classes:
        kind.__qualname__ = name
        if leads_to_it and "." not in name:
            # Whoever pickles its objects looks for it there.
            vars(sys.modules[kind.__module__]).setdefault(name, kind)
    set_values(values, same_machine=shipped.machine == this_machine())
    return made


def _fetched(digest: str, channel: ControlChannel, environment: ReplicaEnvironment) -> Path:
    """Return the scheduler's own file where this machine has it, else a copy shared by the study here."""
    if environment.code_dir is not None and (environment.code_dir / digest).is_file():
        return environment.code_dir / digest
    folder = (environment.prepared_dir or environment.checkpoint_dir) / "code"
    target = folder / digest
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="partial-", delete=False) as partial:
        try:
            channel.download(f"/code/{digest}", Path(partial.name), give_up_after=DOWNLOAD_SECONDS)
            os.replace(partial.name, target)
        except (ControlChannelError, OSError):
            Path(partial.name).unlink(missing_ok=True)
            raise
    return target


def _mapped(path: Path, sizes: Sequence[int]) -> Iterator[memoryview]:
    """Yield the buffers, without a copy: a page is this process's own when it writes into it."""
    with open(path, "rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    start = 0
    for size in sizes:
        yield whole[start : start + size]
        start += -(-size // ALIGNMENT) * ALIGNMENT


def _with_advice(error: ModuleNotFoundError) -> ModuleNotFoundError:
    image = os.environ.get("ELASTUNE_IMAGE")
    if not image:
        return error
    return ModuleNotFoundError(
        f"{error}: the image {image} does not have it. The script's own code is sent, but modules that it imports "
        "are not: build an image with that module, mount a volume that has it and name its path with ELASTUNE_CODE, "
        "or start the sweep in the folder that holds it, which is then packed",
        name=error.name,
    )


def _import_if_there(name: str) -> None:
    """Import a module if it exists; what the code needs of it shows when the code is loaded."""
    try:
        importlib.import_module(name)
    except Exception as error:
        logger.info("the script imports %s, which cannot be imported here: %s", name, error)


# ---------------------------------------------------------------------- called by the pickles


def _become_main(facts: Mapping[str, str]) -> None:
    """Install a ``__main__`` module like the driver's, without executing the script."""
    main = types.ModuleType("__main__")
    file = facts.get("file")
    if file:
        main.__file__ = moved_path(file)
    if facts.get("package"):
        main.__package__ = facts["package"]
    if facts.get("name"):
        # For processes that its code spawns, which load it again.
        main.__spec__ = ModuleSpec(facts["name"], None, origin=main.__file__)
    vars(main)["__builtins__"] = __builtins__
    sys.modules["__main__"] = main


def globals_of(name: str, file: str, package: str, importable: bool) -> dict[str, Any]:
    """Globals of a function that came by value: those of its module, which need not be a file here."""
    if name not in sys.modules:
        if importable:
            importlib.import_module(name)
        else:
            module = types.ModuleType(name)
            module.__file__, module.__package__ = moved_path(file), package
            vars(module)["__builtins__"] = __builtins__
            sys.modules[name] = module
    return vars(sys.modules[name])


def main_module() -> types.ModuleType:
    return sys.modules["__main__"]


def cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    """Return a function with an empty cache of its results."""
    return functools.lru_cache(maxsize=maxsize, typed=typed)(function)


def tensor(content: Any, kind: str, shape: Sequence[int], requires_grad: bool) -> Any:
    """Return a tensor over an array of bytes."""
    torch = importlib.import_module("torch")
    made = torch.from_numpy(content).view(getattr(torch, kind)).reshape(tuple(shape))
    return made.requires_grad_(requires_grad)
