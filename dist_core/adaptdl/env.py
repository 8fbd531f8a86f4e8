"""``adaptdl.env``: what a script asks about the job it runs in, answered from the trial."""

from __future__ import annotations

import os

from dist_core.core import get_core
from dist_core.env import standalone_world


def replica_rank() -> int:
    """This replica's rank. Before the first training step replicas do not know each other: each is its own rank 0."""
    core = get_core()
    return core.group.rank if core.joined or core.environment is not None else standalone_world()[0]


def num_replicas() -> int:
    core = get_core()
    return core.group.world_size if core.joined or core.environment is not None else standalone_world()[1]


def num_nodes() -> int:
    return get_core().group.num_nodes


def num_restarts() -> int:
    """How often the set of replicas has changed."""
    return max(0, get_core().generation - 1)


def job_id() -> str:
    environment = get_core().environment
    return environment.trial_id if environment is not None else os.environ.get("ADAPTDL_JOB_ID", "local")


def share_path() -> str:
    """A folder for datasets: ``ADAPTDL_SHARE_PATH``, else the working folder."""
    return os.environ.get("ADAPTDL_SHARE_PATH", os.getcwd())


def checkpoint_path() -> str | None:
    folder = get_core().checkpoints.folder
    return None if folder is None else str(folder)


def master_addr() -> str:
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def master_port() -> int:
    return int(os.environ.get("MASTER_PORT", "0"))
