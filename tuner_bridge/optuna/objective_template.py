"""What the trials of an Optuna sweep will run, from its objective and options."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trials.spec import check_replica_bounds, sizes_from
from tuner_bridge.driving.notebook_code import module_of, written
from tuner_bridge.driving.template import TrialTemplate, own_python_path, sizes_within
from tuner_bridge.errors import BridgeError, InvalidSweep
from tuner_bridge.in_replica.scripts import Script
from tuner_bridge.in_replica.shipping import ShippedFunction, TypedIn, installed_modules_of, ship
from tuner_bridge.optuna.notebook import run_cells
from tuner_bridge.optuna.program import Program
from tuner_bridge.optuna.trainers import TrainerSearch

logger = logging.getLogger(__name__)

ENTRYPOINT = "tuner_bridge.optuna.replica:main"


def _shipped(objective: Callable[[Any], Any]) -> ShippedFunction:
    """How replicas find the objective; one that was written in a notebook is put into a file for them."""
    try:
        return ship(objective)
    except TypedIn:
        cells = run_cells()
        if cells is None:
            raise
    path = written(module_of(cells, objective.__name__), Path.cwd())
    return ShippedFunction(module="__main__", qualname=objective.__name__, main_path=str(path))


def template_of(
    objective: Callable[[Any], Any] | Script | TrainerSearch,
    min_replicas: int,
    max_replicas: int | None,
    promise_metric: tuple[str, str] | None = None,
    fresh_processes: bool = False,
    *,
    slots_per_replica: int | Sequence[int] = 1,
) -> TrialTemplate:
    """What the trials of a sweep will run; raises InvalidSweep and InvalidTrialSpec for what they cannot."""
    if "ELASTUNE_API" in os.environ:
        raise InvalidSweep(
            "optimize() was reached inside a replica, because the script calls it when imported. Put the call under "
            'if __name__ == "__main__":'
        )
    payload: dict[str, Any] = {}
    preload: tuple[str, ...] = ()
    user_code: tuple[str, ...] = ()
    if isinstance(objective, Program):
        if min_replicas > 1 or (max_replicas or 1) > 1:
            raise InvalidSweep(
                f"min_replicas is {min_replicas} and max_replicas {max_replicas}; a program runs on one replica"
            )
        max_replicas = 1
        payload["program"] = objective.to_json()
    elif isinstance(objective, TrainerSearch):
        payload["trainer"] = objective.to_json()
        # Of its library, which loads piece by piece, that one has the most behind it.
        preload = ("torch", "dist_core.huggingface.trainer", "transformers.trainer")
        user_code = tuple(sorted({each.loaded_as for each in (objective.trainer, objective.space)}))
    elif isinstance(objective, Script):
        payload["script"] = objective.to_json()
        # What it imports from other files of its author is not known here.
        imported = (name for name in objective.imports() if name.partition(".")[0] != "tuner_bridge")
        preload = (*imported, "torch")
    else:
        shipped = _shipped(objective)
        payload["objective"] = shipped.to_json()
        preload = installed_modules_of(objective)
        if "torch" in sys.modules:
            # Its module, or what that imports, is what has brought it into this process.
            preload = (*preload, "torch")
        payload["keeps_process"] = not fresh_processes
        user_code = (shipped.loaded_as,)
    if promise_metric is not None:
        check_promise_metric(promise_metric)
        payload["promise_metric"] = promise_metric[0]
    sizes = sizes_from(slots_per_replica)
    check_replica_bounds(min_replicas, min_replicas if max_replicas is None else max_replicas)
    return TrialTemplate(
        entrypoint=ENTRYPOINT,
        payload=payload,
        min_replicas=min_replicas,
        max_replicas=min_replicas if max_replicas is None else max_replicas,
        replica_sizes=sizes,
        working_dir=os.getcwd(),
        python_path=own_python_path(),
        preload=(*preload, ENTRYPOINT.partition(":")[0]),
        user_code=user_code,
    )


def check_promise_metric(given: Any) -> None:
    if not (
        isinstance(given, tuple)
        and len(given) == 2
        and isinstance(given[0], str)
        and given[1] in ("minimize", "maximize")
    ):
        raise InvalidSweep(
            f"promise_metric is {given!r}; it must be a name and a direction, such as ('accuracy', 'maximize')"
        )


def bounded(template: TrialTemplate, slots: int, max_replicas: int | None) -> TrialTemplate:
    """Fill in and check the bounds against the slots there are."""
    try:
        sizes = sizes_within(template.replica_sizes, template.min_replicas, slots)
    except BridgeError as error:
        raise InvalidSweep(f"{error} (slots=, `elastune up --slots`)") from None
    room = slots // sizes[0]
    if max_replicas is not None and max_replicas > room:
        logger.warning(
            "max_replicas is %d but there are %d slots; trials grow to %d at most", max_replicas, slots, room
        )
    most = room if max_replicas is None else min(max_replicas, room)
    return replace(template, max_replicas=most, replica_sizes=sizes)
