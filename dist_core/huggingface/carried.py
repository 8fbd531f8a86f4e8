"""State of a Hugging Face trainer, as a part of the trial's state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from transformers.trainer_callback import ExportableState

_FIELDS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Fields of its TrainerState."""
_COUNTS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
"""Fields of the trainer itself."""


class CarriedState:
    """State of a Hugging Face trainer that the trial saves, restores and hands to joiners.

    ``trainer``: whose attributes it reads and sets. ``steps`` answers how many have counted in the trial.
    """

    def __init__(self, trainer: Any, steps: Callable[[], int]) -> None:
        self._trainer = trainer
        self._steps = steps
        self._before: dict[str, Any] | None = None
        self._logged_before = self._steps_before = 0

    # ------------------------------------------------------------------ a step that may not count

    def begin_step(self) -> None:
        self._before = self.small()
        self._logged_before = len(self._trainer.state.log_history)
        self._steps_before = self._steps()

    def end_step(self) -> bool:
        """Tell whether the step counted. If a replica was lost in it, what the trainer counted was too early."""
        if self._is_ahead:
            assert self._before is not None
            del self._trainer.state.log_history[self._logged_before :]
            self.take(self._before)
        self._before = None
        # Another replica's state may have been taken over meanwhile.
        return self._steps() != self._steps_before

    @property
    def _is_ahead(self) -> bool:
        return self._before is not None and self._steps() == self._steps_before

    # ------------------------------------------------------------------ the trial's part

    def state_dict(self) -> dict[str, Any]:
        content, logged = self.small(), self._trainer.state.log_history
        if self._is_ahead:
            assert self._before is not None
            content, logged = self._before, logged[: self._logged_before]
        # As text, in which log entries may hold whatever the trainer writes to its own files.
        return {"json": json.dumps({**content, "log_history": logged})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        content = json.loads(state["json"])
        self._before = None
        self._trainer.state.log_history[:] = content.pop("log_history")
        self.take(content)

    def small(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            **{name: getattr(trainer.state, name) for name in _FIELDS},
            **{name: getattr(trainer, name, 0) for name in _COUNTS},
            "should_training_stop": trainer.control.should_training_stop,
            "callbacks": [[type(each).__name__, each.state().get("attributes", {})] for each in self._callbacks()],
        }

    def take(self, content: Mapping[str, Any]) -> None:
        trainer = self._trainer
        for name in _FIELDS:
            setattr(trainer.state, name, content[name])
        for name in _COUNTS:
            setattr(trainer, name, content[name])
        trainer.control.should_training_stop = content["should_training_stop"]
        for callback, (kind, attributes) in zip(self._callbacks(), content["callbacks"], strict=False):
            if type(callback).__name__ == kind:
                for name, value in attributes.items():
                    setattr(callback, name, value)

    def _callbacks(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]
