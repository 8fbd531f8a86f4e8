"""State of Lightning's trainer, as a part of the trial's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dist_core.lightning.package import Timer

_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
"""Fields of the logger connector with the latest value of each metric."""


class CarriedProgress:
    """State of Lightning's trainer that the trial saves, restores and hands to joiners.

    ``trainer``: whose loops and callbacks it reads and sets. ``steps``: how many have counted in the trial.

    ``is_new``: whether this process has made none of them yet.
    """

    def __init__(self, trainer: Any, steps: Callable[[], int], is_new: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._steps = steps
        self._is_new = is_new
        self._before: dict[str, Any] | None = None
        self._steps_before = 0
        self.epoch = 0
        """Whose batches the loop's present counts are of."""
        self.steps_behind = 0
        """The trial's steps once the one that runs has counted."""
        self.loaded: int | None = None
        """The epoch that counts which were taken over are of."""

    # ------------------------------------------------------------------ a step that may not count

    def begin_step(self) -> None:
        self._before, self._steps_before = self.present(), self._steps()

    def end_step(self) -> None:
        """End the step.

        One that a replica was lost in did not count, and what the trainer noted of it is taken back.
        """
        if self._is_ahead:
            assert self._before is not None
            self.take(self._before, of_clocks=False)
        self._before = None

    def give_up_step(self) -> None:
        """Give up a step: the loop was left before it was trained."""
        self._before = None

    @property
    def _is_ahead(self) -> bool:
        return self._before is not None and self._steps() == self._steps_before

    # ------------------------------------------------------------------ the trial's part

    def state_dict(self) -> dict[str, Any]:
        known = self._before if self._is_ahead else None
        return {**(self.present() if known is None else known), "epoch": self.epoch, "metrics": self._metrics()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = None
        self.take(state, of_clocks=self._is_new())
        self.epoch = self.loaded = int(state["epoch"])
        connector = self._trainer._logger_connector
        for name, values in state["metrics"].items():
            getattr(connector, name).update(
                {key: torch.tensor(value) if name != _SHOWN[-1] else value for key, value in values.items()}
            )

    def _metrics(self) -> dict[str, dict[str, float]]:
        connector = self._trainer._logger_connector
        return {name: {key: float(value) for key, value in getattr(connector, name).items()} for name in _SHOWN}

    # ------------------------------------------------------------------ counts and callbacks

    def present(self) -> dict[str, Any]:
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        return {
            "counts": [vars(tracker).copy() for tracker in _trackers(loop)],
            "stepped": loop._batches_that_stepped,
            "deferred": loop.deferred,
            "is_last_batch": loop.batch_progress.is_last_batch,
            "should_stop": trainer.should_stop,
            "steps_behind": self.steps_behind,
            "before": [loop.batches_before, loop.total_before],
            "callbacks": {each.state_key: _copied(each.state_dict()) for each in trainer.callbacks},
        }

    def take(self, content: Mapping[str, Any], *, of_clocks: bool = True) -> None:
        """Load the trainer's progress; with ``of_clocks`` also the state of callbacks that measure time."""
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        for tracker, counts in zip(_trackers(loop), content["counts"], strict=True):
            vars(tracker).update(counts)
        loop._batches_that_stepped, loop.deferred = content["stepped"], content["deferred"]
        loop.batch_progress.is_last_batch = content["is_last_batch"]
        loop.batches_before, loop.total_before = content["before"]
        self.steps_behind = content["steps_behind"]
        trainer.should_stop = content["should_stop"]
        for callback in trainer.callbacks:
            state = content["callbacks"].get(callback.state_key)
            if state and (of_clocks or not isinstance(callback, Timer)):
                if "dirpath" in state:
                    # Each process may have chosen a folder by what it found there.
                    callback.dirpath = state["dirpath"]
                callback.load_state_dict(_copied(state))


def _trackers(loop: Any) -> list[Any]:
    optimizer = loop.automatic_optimization.optim_progress.optimizer
    progress = (
        loop.batch_progress,
        loop.scheduler_progress,
        optimizer.step,
        optimizer.zero_grad,
        loop.manual_optimization.optim_step_progress,
    )
    return [tracker for each in progress for tracker in (each.total, each.current)]


def _copied(state: Any) -> Any:
    """Containers anew; what is in them is replaced by their owners, not changed."""
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(each) for each in state] if isinstance(state, list) else state


def set_counts(tracker: Any, number: int) -> None:
    """Set Lightning's counts of ready, started, processed and completed to ``number``."""
    vars(tracker).update(ready=number, started=number, processed=number, completed=number)
