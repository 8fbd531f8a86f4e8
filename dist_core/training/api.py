"""Functions by which training code sees its trial; each also works in a plain script without a scheduler."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from dist_core.errors import ControlChannelError, InvalidTraining
from dist_core.present import present_replica, training_core
from dist_core.state.states import Stateful


def init_process_group(backend: str | None = None, *_: Any, **__: Any) -> None:
    """Make this process's replica, for scripts written for AdaptDL; the group forms at the first training step.

    Args:
        backend: Ignored: NCCL is used between GPUs, Gloo between CPUs.
    """
    training_core()


def remaining_epochs_until(num_epochs: int) -> Iterator[int]:
    """Iterate over the epochs still to train: from 0 in a new trial, else from where the trial stands.

    Code before the loop runs again in every replica that starts, so it has to be repeatable.

    Args:
        num_epochs: Epochs in all.
    """
    if num_epochs < 0:
        raise InvalidTraining(f"num_epochs is {num_epochs}; it must be at least 0")
    core = training_core()
    num_epochs = core.epochs.begin(num_epochs)
    run = core.position.runs
    core.variables.begin(sys._getframe(1))
    try:
        while core.position.epoch < num_epochs:
            yield core.position.epoch
            core.variables.look()
            core.epochs.end_epoch()
    finally:
        if core.position.runs == run:
            core.epochs.leave()
    core.variables.end()


def current_epoch() -> int | None:
    """Return the epoch being trained, None outside of ``remaining_epochs_until``."""
    core = training_core()
    return core.position.epoch if core.position.in_epoch_loop else None


def finished_epochs() -> int:
    """Return the number of epochs that the trial has completed."""
    return training_core().position.epoch


def register_state(name: str, state: Stateful) -> None:
    """Have an object checkpointed and handed to joining replicas.

    Args:
        name: Name of the object in checkpoints; one for each.
        state: Anything with ``state_dict`` and ``load_state_dict``.
    """
    training_core().registry.register(f"user-{name}", state)


class SharedValues(SimpleNamespace):
    """Values of a script that belong to its trial, as attributes; see ``keep``."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from dist_core.state.script_variables import placed

        placed(state, vars(self))


def keep(**values: Any) -> SharedValues:
    """Return an object with these attributes, which are checkpointed and handed to joining replicas.

    For what a script counts and remembers from epoch to epoch outside of the function with the loop over epochs, whose
    variables are the trial's anyway::

        kept = dist_core.keep(best=0.0, bad_epochs=0, weights=None)

    A replica that joins has rank 0's values from its first training step on. Call it before the loop over epochs;
    several calls make several objects, in one order on all replicas.

    Args:
        **values: First values: numbers, texts, tensors, and lists and dictionaries of them. Tensors come to the device
            of those that they replace, else to the CPU.
    """
    kept = SharedValues(**values)
    registry = training_core().registry
    registry.register(registry.unique_name("kept"), kept)
    return kept


def report(value: float, step: int) -> None:
    """Tell the scheduler a value of the objective.

    Args:
        value: The value.
        step: Step that means the same in all trials, such as an epoch.
    """
    replica = present_replica()
    replica.raise_postponed()
    if replica.channel is not None and replica.reports and not replica.passes_do_not_count:
        body = {"step": step, "value": value if math.isfinite(value) else None, "progress": replica.progress}
        try:
            replica.channel.request("POST", "/reports", {"reports": [body]})
        except ControlChannelError as error:
            if error.status not in (413, 422):
                raise
            raise InvalidTraining(f"the scheduler refused the report of {value!r} at step {step!r}: {error}") from error


def progress_step(unit: float) -> int:
    """Return the whole units of training progress so far: a step to report at that means the same in all trials.

    A sample of a larger batch counts for less than one, as it teaches less (statistical efficiency; Pollux, OSDI'21,
    section 3). Report whenever the number has grown.

    Args:
        unit: Samples at the initial batch size, so that ``len(dataset)`` counts epochs.
    """
    if not unit > 0:
        raise InvalidTraining(f"the unit of progress is {unit} samples; it must be above 0")
    return int(training_core().position.progress / unit)


def set_checkpoint_interval(seconds: float | None) -> None:
    """Set how often checkpoints are written.

    Args:
        seconds: Time from one checkpoint to the next. None lets their measured cost and the trial's failures decide
            (Young 1974, Daly 2006).
    """
    if seconds is not None and not seconds > 0:
        raise InvalidTraining(f"the checkpoint interval is {seconds} s; it must be above 0, or None")
    training_core().states.checkpoints.interval_seconds = seconds


def rank() -> int:
    """Return this replica's rank; before the first training step, its place among those that were started together."""
    return training_core().rank


def world_size() -> int:
    """Return the number of replicas that train; before the first training step, the number that are going to."""
    return training_core().world_size
