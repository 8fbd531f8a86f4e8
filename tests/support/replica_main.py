"""The main function of a replica's code in tests: trains, and tells the scheduler how that ended."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_core.errors import PeerLost, ReplicaExit
from dist_core.trial.current import get_core
from dist_core.trial.plain_replica import run_training


def run_as_replica(train: Callable[[], Any], *, told: type[Exception], alone: str = "result.json") -> int:
    """Exit status of the replica. ``told``: errors that are the trial's end; ``alone``: file of one without a trial."""
    core = get_core()
    try:
        value = run_training(core, train)
        if core.environment is None:
            (Path(os.environ["TRACE_DIR"]) / alone).write_text(json.dumps(value))
        elif core.generation.group.rank == 0:
            assert core.channel is not None
            core.channel.request("POST", "/outcome", {"kind": "value", "value": value})
        return 0
    except ReplicaExit as leaving:
        return leaving.status
    except PeerLost:
        return 75
    except told as error:
        assert core.channel is not None
        outcome = {"kind": "error", "error_type": type(error).__name__, "message": str(error)}
        core.channel.request("POST", "/outcome", outcome)
        return 1
    finally:
        core.close()
