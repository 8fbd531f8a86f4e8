"""Replica identity and addresses: the one reader and the one writer of the environment.

A launcher writes these variables, a replica reads them; nothing else in the suite looks at the environment of a
replica. Without ``ELASTUNE_API`` the process is standalone: plain ``python train.py`` or ``torchrun``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_core.errors import InvalidTraining

if TYPE_CHECKING:
    from dist_core.goodput.speed_profiles import SpeedProfile

TOKEN, TOKEN_FILE = "ELASTUNE_REPLICA_TOKEN", "ELASTUNE_REPLICA_TOKEN_FILE"

ATTEMPTS = "ELASTUNE_ATTEMPTS"
SEED = "ELASTUNE_SEED"

SLOT_MEMORY = "ELASTUNE_SLOT_MEMORY"
"""Bytes of the machine's memory that a slot has, where that is limited."""

WATCH_THREAD = "elastune-watch"
"""Name of the thread in which a replica waits for news; it may still wait when the replica is over."""

GRACE_SECONDS = 60.0
"""Time to save that whoever runs the machine gives a replica, from the signal on; Kubernetes' and our launchers'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEnvironment:
    api_url: str
    """Base address of the scheduler, ``http://127.0.0.1:7300``."""
    token: str = field(repr=False)
    """Opens this replica's own trial and nothing else; empty: it stands in ``token_file``."""
    trial_id: str
    replica_id: str
    launch_index: int
    """Position among the replicas launched together; 0 reports until a first generation has given out ranks."""
    checkpoint_dir: Path
    node: str
    slot: int
    node_kind: str = ""
    """Kind of the node in a mixed cluster: step times of different kinds are kept apart."""
    token_file: Path | None = None
    """File with the token, which whoever runs the machine replaces before it expires."""
    server_file: Path | None = None
    """File that names the scheduler's present address, so that a restarted one on another port is found."""
    host: str = "127.0.0.1"
    """Address other replicas reach this one at; loopback on one machine."""
    replicas: int = 1
    """Processes that the trial is to have, this one included; once formed, the generation has the truth."""
    members: int = 1
    """Processes that its replica consists of."""
    member: int = 0
    """Index of this process within its replica."""
    whole: str = ""
    """Name of a replica of several processes: the ``replica_id`` of its first; empty if this is the only one."""
    layout: str = ""
    """Layout in which the replica holds the model (``dist_core.layout``), where the scheduler chooses it."""
    replica_sizes: tuple[int, ...] = ()
    """Slots that a replica of the trial may take, where it may choose."""
    grace_seconds: float = GRACE_SECONDS
    """Between being told to end and being ended."""
    prepared_dir: Path | None = None
    """Folder of the data that is prepared once for the study."""
    code_dir: Path | None = None
    """Folder in which the scheduler keeps what sweeps have sent, if this machine has it."""
    parent: str = ""
    """Trial whose state this one begins with; empty: none's."""
    keeps_state: bool = False
    """Keep the state that the trial ends with, for others to begin with."""
    keeps_after: tuple[int, ...] = ()
    """Keep the states that it has after so many epochs too."""
    more_epochs: int = 0
    """Epochs to train beyond those that the code asks for."""
    seed: int | None = None
    """Seed of the trial's random generators, where whoever submitted it has given one."""
    attempts: int | None = None
    """Times that its command came too late to join; None where the suite itself runs the training."""

    def to_environ(self) -> dict[str, str]:
        """Return the variables a launcher sets for this replica."""
        environ = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in _LEFT_OUT or value != ("" if each.default is MISSING else each.default):
                environ[_variable(each.name)] = _text(value)
        return environ

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> ReplicaEnvironment | None:
        """Read the replica's identity; None when this process was not started by a launcher.

        Raises InvalidTraining when the set of variables is incomplete or malformed.
        """
        if "ELASTUNE_API" not in environ:
            return None
        values: dict[str, Any] = {"token": ""} if environ.get(TOKEN_FILE) else {}
        try:
            for each in fields(cls):
                text = environ.get(_variable(each.name))
                if text is None and each.default is MISSING and each.name not in values:
                    raise KeyError(_variable(each.name))
                if text is not None and (text or each.type != "Path | None"):
                    values.setdefault(each.name, _READ[str(each.type)](text))
            return cls(**values)
        except KeyError as error:
            raise InvalidTraining(
                f"ELASTUNE_API is set but {error.args[0]} is not; a replica needs all variables that its launcher "
                "sets. Unset ELASTUNE_API to run this script alone"
            ) from error
        except ValueError as error:
            raise InvalidTraining(f"an environment variable of the replica is not a number: {error}") from error


_LEFT_OUT = frozenset(
    {
        "token",
        "token_file",
        "parent",
        "keeps_state",
        "keeps_after",
        "more_epochs",
        "seed",
        "attempts",
        "prepared_dir",
        "code_dir",
        "server_file",
    }
)
"""Fields without a variable where they have their default."""


def _variable(name: str) -> str:
    """Return the variable that holds a field."""
    other_names = {"api_url": "ELASTUNE_API", "token": TOKEN, "token_file": TOKEN_FILE}
    return other_names.get(name, f"ELASTUNE_{name.upper()}")


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "1" if value is True else str(value)


_READ: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "int | None": int,
    "float": float,
    "bool": lambda text: text == "1",
    "Path": Path,
    "Path | None": Path,
    "tuple[int, ...]": lambda text: tuple(int(each) for each in text.split(",") if each),
}
"""Reads a field's text, by the field's annotation."""


def emulated_profile(environ: Mapping[str, str] = os.environ) -> SpeedProfile | None:
    """Return the profile of the device that this replica's slot emulates; None for a real one."""
    text = environ.get("ELASTUNE_EMULATED")
    if not text:
        return None
    # Not for those who only look for their identity: it takes NumPy and SciPy along.
    from dist_core.goodput.speed_profiles import SpeedProfile

    return SpeedProfile.from_text(text)


def gpu_share(environ: Mapping[str, str] = os.environ) -> float:
    """Part of its GPU that belongs to this process: 1, or less where several replicas share one."""
    return float(environ.get("ELASTUNE_GPU_SHARE", "1"))


def standalone_checkpoint_dir(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the checkpoint folder of a process without a scheduler (``ELASTUNE_CHECKPOINT_DIR``), if any."""
    folder = environ.get("ELASTUNE_CHECKPOINT_DIR")
    return Path(folder) if folder else None


def standalone_members(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes of a replica where no scheduler says so: ``ELASTUNE_MEMBERS``, or 1."""
    text = environ.get("ELASTUNE_MEMBERS", "1")
    if not text.isdigit() or int(text) < 1:
        raise InvalidTraining(f"ELASTUNE_MEMBERS is {text!r}; it must be a whole number of at least 1")
    return int(text)


_RANKS = (
    ("RANK", "WORLD_SIZE"),
    # mpirun: Open MPI's, then those of MPICH, Intel MPI and what else speaks PMI.
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def standalone_world(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(rank, world size) of a process without a scheduler: torchrun's variables, or mpirun's, or (0, 1)."""
    for rank, size in _ranks_in(environ):
        if size in environ:
            return int(environ.get(rank, "0")), int(environ[size])
    return int(environ.get("RANK", "0")), 1


def started_by_mpirun(environ: Mapping[str, str] = os.environ) -> bool:
    return "WORLD_SIZE" not in environ and any(size in environ for _, size in _ranks_in(environ))


def _ranks_in(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for rank, size in _RANKS:
        # srun speaks PMI to tasks that have nothing to do with each other.
        if not (size.startswith("PMI") and "SLURM_JOB_ID" in environ):
            yield rank, size
