"""What a trial is: which code, with what, on how many replicas. Checked when made; plain JSON on the wire."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trials.checks import are_texts, check_length, is_whole
from trials.errors import InvalidTrialSpec

_ENTRYPOINT = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
_DIGEST = re.compile(r"^[0-9a-f]{64}$")
MOST_REPLICAS = 4096
LARGEST_NUMBER = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """What to run as a trial and within which bounds: a pure description, checked when it is made."""

    study: str
    number: int
    """The tuner's own number of the trial within its study."""
    entrypoint: str
    """``module:function`` that every replica calls without arguments."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What the entrypoint finds when it asks for its trial; JSON."""
    min_replicas: int = 1
    max_replicas: int = 1
    preemptible: bool = True
    """Else its slots are its own from the start to its end, and their number does not change."""
    only_on: tuple[str, ...] = ()
    """Names or kinds of the nodes it may run on; empty: any."""
    working_dir: str = "."
    python_path: tuple[str, ...] = ()
    """Put in front of ``sys.path``, so that the user's modules are found."""
    preload: tuple[str, ...] = ()
    """Installed modules the code needs; a fork server may import them beforehand."""
    user_code: tuple[str, ...] = ()
    """Modules, and absolute paths of scripts, that the entrypoint loads with `trials.inside.user_code.load`."""
    environ: Mapping[str, str] = field(default_factory=dict)
    max_losses: int = 5
    """Times in a row that the trial is restarted when its replicas were lost and it made no progress in between."""
    image: str = ""
    """On a cluster: the container image of its replicas; empty: the study's, or the cluster's."""
    package: str = ""
    """Digest of a packed copy of ``working_dir`` that the scheduler keeps; empty: the code is where replicas run."""
    moved_to: str = ""
    """Where replicas find ``working_dir``, if not under its own name: paths below it are looked for there."""

    driven: bool = True
    """A driver waits for it, and without one it pauses; else it runs for its own sake."""

    def __post_init__(self) -> None:
        check_length("the name of its study", self.study)
        _check_whole("trial number", self.number, 0, LARGEST_NUMBER)
        _check_whole("max_losses", self.max_losses, 0, LARGEST_NUMBER)
        if not isinstance(self.entrypoint, str) or not _ENTRYPOINT.match(self.entrypoint):
            raise InvalidTrialSpec(f"entrypoint is {self.entrypoint!r}; it must read 'package.module:function'")
        for name in ("preemptible", "driven"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidTrialSpec(f"{name} is {getattr(self, name)!r}; it must be true or false")
        if not isinstance(self.working_dir, str):
            raise InvalidTrialSpec(f"working_dir is {self.working_dir!r}; it must be a path")
        for name in ("image", "package", "moved_to"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InvalidTrialSpec(f"{name} is {value!r:.80}; it must be a text")
        if self.package and not _DIGEST.match(self.package):
            raise InvalidTrialSpec(f"package is {self.package!r:.80}; it must be a SHA-256 digest in hexadecimal")
        for name in ("only_on", "python_path", "preload", "user_code"):
            value = getattr(self, name)
            if not are_texts(value):
                raise InvalidTrialSpec(f"{name} is {value!r:.80}; it must be a list of texts")
        if not isinstance(self.payload, Mapping):
            raise InvalidTrialSpec(f"payload is {self.payload!r:.80}; it must be an object with names and values")
        environ = self.environ
        if not isinstance(environ, Mapping) or not all(
            isinstance(each, str) for pair in environ.items() for each in pair
        ):
            raise InvalidTrialSpec(f"environ is {environ!r:.80}; it must be an object with texts for names and values")
        check_replica_bounds(self.min_replicas, self.max_replicas)

    def to_json(self) -> dict[str, Any]:
        return {
            "study": self.study,
            "number": self.number,
            "entrypoint": self.entrypoint,
            "payload": dict(self.payload),
            "min_replicas": self.min_replicas,
            "max_replicas": self.max_replicas,
            "preemptible": self.preemptible,
            "only_on": list(self.only_on),
            "working_dir": self.working_dir,
            "python_path": list(self.python_path),
            "preload": list(self.preload),
            "user_code": list(self.user_code),
            "environ": dict(self.environ),
            "max_losses": self.max_losses,
            "image": self.image,
            "package": self.package,
            "moved_to": self.moved_to,
            "driven": self.driven,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TrialSpec:
        fields = dict(document)
        for name in ("only_on", "python_path", "preload", "user_code"):
            if isinstance(fields.get(name), list):
                fields[name] = tuple(fields[name])
        return cls(**fields)


def _check_whole(name: str, value: object, least: int, most: int) -> None:
    if not is_whole(value) or not least <= value <= most:
        raise InvalidTrialSpec(f"{name} is {value!r:.80}; it must be a whole number of at least {least}")


def check_replica_bounds(min_replicas: int, max_replicas: int) -> None:
    """Raises InvalidTrialSpec for bounds that cannot be met."""
    for name, value in (("min_replicas", min_replicas), ("max_replicas", max_replicas)):
        if not is_whole(value):
            raise InvalidTrialSpec(f"{name} is {value!r}; it must be a whole number")
    if min_replicas < 1:
        raise InvalidTrialSpec(f"min_replicas is {min_replicas}; it must be at least 1")
    if max_replicas < min_replicas:
        raise InvalidTrialSpec(
            f"min_replicas is {min_replicas} but max_replicas is {max_replicas}; it must not exceed max_replicas"
        )
    if max_replicas > MOST_REPLICAS:
        raise InvalidTrialSpec(f"max_replicas is {max_replicas}; it must be at most {MOST_REPLICAS}")
