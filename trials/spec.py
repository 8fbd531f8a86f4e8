"""Specification of a trial: which code, with what, on how many replicas. Checked when made; plain JSON on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trials.checks import is_integer
from trials.errors import InvalidTrialSpec
from trials.fields import Flag, Integer, Integers, Name, Text, Texts, Values, Variables, check, described, parsed, plain

MOST_REPLICAS = 4096
LARGEST_NUMBER = 2**31 - 1
MOST_SLOTS_PER_REPLICA = 1024
MOST_SIZES = 16
"""Most replica sizes that a trial may offer."""
_REPLICAS = Integer(1, MOST_REPLICAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """Specification of what to run as a trial and within which bounds, checked when it is made."""

    study: str = described(
        Name(), "The study that the trial belongs to; default: the trial's own name.", called="the name of its study"
    )
    number: int = described(
        Integer(0, LARGEST_NUMBER), "The tuner's own number of the trial within its study.", called="trial number"
    )
    entrypoint: str = described(
        Text("have the form 'package.module:function'", r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"),
        "module:function that every replica calls without arguments.",
    )
    payload: Mapping[str, Any] = described(
        Values(), "JSON value that the entrypoint gets with its trial.", default_factory=dict
    )
    min_replicas: int = described(_REPLICAS, default=1)
    max_replicas: int = described(_REPLICAS, default=1)
    slots_per_replica: int = described(
        Integer(1, MOST_SLOTS_PER_REPLICA),
        "Slots of one replica, with one process on each: for models that do not fit on one slot.",
        default=1,
    )
    replica_sizes: tuple[int, ...] = described(
        Integers(1, MOST_SLOTS_PER_REPLICA),
        "Numbers of slots per replica from which the scheduler chooses; empty: slotsPerReplica.",
        default=(),
    )
    preemptible: bool = described(
        Flag(),
        "true: the scheduler may take slots away or change their number. false: the trial keeps its slots from "
        "start to end.",
        default=True,
    )
    only_on: tuple[str, ...] = described(
        Texts(), "Names or kinds of the nodes that the trial may run on; empty: any.", default=()
    )
    working_dir: str = described(Text("be a path"), default=".")
    python_path: tuple[str, ...] = described(
        Texts(), "Folders put in front of sys.path, so that the user's modules are found.", default=()
    )
    preload: tuple[str, ...] = described(
        Texts(), "Installed modules the code needs; a fork server may import them beforehand.", default=()
    )
    code: tuple[str, ...] = described(
        Texts(),
        "SHA-256 digests of the pickled code and its data, which replicas get from the scheduler.",
        default=(),
    )
    environ: Mapping[str, str] = described(Variables(), key="env", default_factory=dict)
    max_losses: int = described(
        Integer(0, LARGEST_NUMBER),
        "How many times in a row the trial is restarted after its replicas were lost without progress in between.",
        default=5,
    )
    image: str = described(
        Text(),
        "On a cluster, the container image of the replicas; empty: that of the study, or of the cluster.",
        default="",
    )
    package: str = described(
        Text("be a SHA-256 digest in hexadecimal", r"^([0-9a-f]{64})?$"),
        "Digest of a packed working folder that the scheduler keeps; empty: the code is already where the "
        "replicas run.",
        default="",
    )
    moved_to: str = described(
        Text(),
        "Path of the working folder on the replicas, if it differs; paths below the working folder are looked for "
        "there.",
        default="",
    )
    parent: str = described(
        Text(),
        "Id of the trial whose state this one begins with, under its own hyperparameters; empty: it begins anew.",
        default="",
    )
    keep_state: bool = described(
        Flag(), "true: the state that the trial ends with is kept, for other trials to begin with.", default=False
    )
    parent_epoch: int = described(
        Integer(0, LARGEST_NUMBER),
        "Epochs after which the trial shares no more with its parent: it begins with the state that the parent had "
        "then, and anew where that was not kept. 0: with the parent's newest state.",
        default=0,
    )
    keep_after: tuple[int, ...] = described(
        Integers(1, LARGEST_NUMBER),
        "Epochs after which the trial's state is kept, for other trials to begin with.",
        default=(),
    )
    more_epochs: int = described(
        Integer(0, LARGEST_NUMBER), "Epochs to train beyond those that the code asks for.", default=0
    )
    driven: bool = described(
        Flag(),
        "true: a driver waits for the trial, which pauses without one. false: the trial runs without a driver.",
        default=True,
    )

    def __post_init__(self) -> None:
        check_replica_bounds(self.min_replicas, self.max_replicas, self.slots_per_replica)
        check(self)
        if len(self.replica_sizes) > MOST_SIZES:
            raise InvalidTrialSpec(
                f"replica_sizes has {len(self.replica_sizes)} sizes; it must have at most {MOST_SIZES}"
            )
        if self.parent_epoch and not self.parent:
            raise InvalidTrialSpec(
                f"parent_epoch is {self.parent_epoch} but the trial has no parent; name one, or leave it out"
            )
        if self.replica_sizes and self.slots_per_replica not in (1, *self.replica_sizes):
            sizes = ", ".join(map(str, self.replica_sizes))
            raise InvalidTrialSpec(
                f"slots_per_replica is {self.slots_per_replica} but replica_sizes is {sizes}; set slots_per_replica "
                "to one of these, or leave it out"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Slots that one of its replicas may take, ascending."""
        return self.replica_sizes or (self.slots_per_replica,)

    @property
    def min_slots(self) -> int:
        return self.min_replicas * self.sizes[0]

    @property
    def max_slots(self) -> int:
        return self.max_replicas * self.sizes[-1]

    def to_json(self) -> dict[str, Any]:
        return plain(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TrialSpec:
        return cls(**parsed(cls, document))


def sizes_from(slots_per_replica: Any) -> tuple[int, ...]:
    """Return the replica sizes that people ask for, ascending. Raises InvalidTrialSpec."""
    several = isinstance(slots_per_replica, list | tuple)
    sizes = list(slots_per_replica) if several else [slots_per_replica]
    if not 1 <= len(sizes) <= MOST_SIZES or not all(
        is_integer(each) and 1 <= each <= MOST_SLOTS_PER_REPLICA for each in sizes
    ):
        raise InvalidTrialSpec(
            f"slots_per_replica is {slots_per_replica!r:.80}; it must be a whole number from 1 to "
            f"{MOST_SLOTS_PER_REPLICA}, or a list of at most {MOST_SIZES} such numbers"
        )
    return tuple(sorted(set(sizes)))


def check_replica_bounds(min_replicas: int, max_replicas: int, slots_per_replica: int = 1) -> None:
    """Raise InvalidTrialSpec for bounds that cannot be met."""
    given = {"min_replicas": min_replicas, "max_replicas": max_replicas, "slots_per_replica": slots_per_replica}
    for name, value in given.items():
        if not is_integer(value):
            raise InvalidTrialSpec(f"{name} is {value!r}; it must be a whole number")
    if min_replicas < 1:
        raise InvalidTrialSpec(f"min_replicas is {min_replicas}; it must be at least 1")
    if max_replicas < min_replicas:
        raise InvalidTrialSpec(
            f"min_replicas is {min_replicas} but max_replicas is {max_replicas}; it must not exceed max_replicas"
        )
    if max_replicas > MOST_REPLICAS:
        raise InvalidTrialSpec(f"max_replicas is {max_replicas}; it must be at most {MOST_REPLICAS}")
    if not 1 <= slots_per_replica <= MOST_SLOTS_PER_REPLICA:
        raise InvalidTrialSpec(
            f"slots_per_replica is {slots_per_replica}; it must be at least 1 and at most {MOST_SLOTS_PER_REPLICA}"
        )
