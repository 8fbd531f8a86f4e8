"""``adaptdl.env``: what a script asks about its job, answered from the trial or from AdaptDL's variables."""

from __future__ import annotations

import os

from dist_core.trial.current import get_core
from dist_core.trial.replica import Replica


def adopt_variables() -> None:
    """Let a process that was started with AdaptDL's variables alone find its checkpoints and its peers."""
    names = {"ELASTUNE_CHECKPOINT_DIR": "ADAPTDL_CHECKPOINT_PATH"}
    if int(os.environ.get("ADAPTDL_NUM_REPLICAS", "1")) > 1:
        names |= {
            "RANK": "ADAPTDL_REPLICA_RANK",
            "WORLD_SIZE": "ADAPTDL_NUM_REPLICAS",
            "MASTER_ADDR": "ADAPTDL_MASTER_ADDR",
            "MASTER_PORT": "ADAPTDL_MASTER_PORT",
        }
    for ours, theirs in names.items():
        if theirs in os.environ:
            os.environ.setdefault(ours, os.environ[theirs])
    if "RANK" in os.environ:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")


def _core() -> Replica:
    adopt_variables()
    return get_core()


def core_of_job() -> Replica:
    """Return this process's Replica with its checkpoint loaded: states are restored as soon as they are registered."""
    core = _core()
    core.resumption.restore_early()
    return core


def replica_rank() -> int:
    """Return this replica's rank; before the first training step, the one that it was started with."""
    return _core().rank


def num_replicas() -> int:
    return _core().world_size


def num_nodes() -> int:
    core = _core()
    return core.generation.group.num_nodes if core.joined else int(os.environ.get("ADAPTDL_NUM_NODES", "1"))


def num_restarts() -> int:
    """Return how often the set of replicas has changed, or ``ADAPTDL_NUM_RESTARTS`` where nobody changes it."""
    core = _core()
    if core.environment is None:
        return int(os.environ.get("ADAPTDL_NUM_RESTARTS", "0"))
    return max(0, core.generation.number - 1)


def job_id() -> str:
    environment = _core().environment
    return environment.trial_id if environment is not None else os.environ.get("ADAPTDL_JOB_ID", "local")


def share_path() -> str:
    """Return a folder for datasets: ``ADAPTDL_SHARE_PATH``, else the working folder."""
    return os.environ.get("ADAPTDL_SHARE_PATH", os.getcwd())


def checkpoint_path() -> str | None:
    folder = _core().states.checkpoints.folder
    return None if folder is None else str(folder)


def master_addr() -> str:
    return os.environ.get("MASTER_ADDR", os.environ.get("ADAPTDL_MASTER_ADDR", "127.0.0.1"))


def master_port() -> int:
    return int(os.environ.get("MASTER_PORT", os.environ.get("ADAPTDL_MASTER_PORT", "0")))
