"""Persistence: the trial's named states, as they are, as they were, and on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dist_core.errors import InvalidTraining
from dist_core.state.packing import pack_copy, unpack
from dist_core.state.parts import Readers
from dist_core.state.states import StateRegistry
from dist_core.state.trial_checkpoints import TrialCheckpoints

LOOK_SECONDS = 0.01
"""Between two looks for the state of a parent, which the scheduler puts there as soon as the parent has saved it."""


class Persistence:
    """The named states of a trial: captured, restored, saved to disk.

    ``part``: number of this process among those of its replica.

    ``readers``: those that look for a checkpoint together with it. ``replicated``: tensors that only optimizers change,
    the same on all replicas between two steps.
    """

    def __init__(
        self,
        folder: Path | None,
        registry: StateRegistry,
        *,
        part: int = 0,
        readers: Callable[[], Readers] = Readers,
        replicated: Callable[[], Iterator[torch.Tensor]],
        on_error: Callable[[str], None],
        on_written: Callable[[], None] = lambda: None,
        parent: str = "",
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """``parent``: the trial whose state this one begins with, if any.

        ``while_waiting``: called while that state is on its way; raises what ends the wait.
        """
        self.registry = registry
        self.checkpoints = TrialCheckpoints(folder, part, on_error=on_error, on_written=on_written)
        self.parent = parent
        self._while_waiting = while_waiting
        self.has_looked = False
        """True once this process has looked for a checkpoint of its trial."""
        self._readers = readers
        self._replicated = replicated
        self._kept: dict[str, Any] | None = None
        """State that code which runs again goes on from, until it comes to its epochs."""

    @property
    def folder(self) -> Path | None:
        return self.checkpoints.folder

    def capture(self) -> dict[str, Any]:
        """Return all registered states by name, without copying tensors."""
        return self.registry.capture()

    def restore(self, states: dict[str, Any]) -> None:
        self.registry.restore(states)

    def undo_to(self, states: dict[str, Any]) -> Callable[[], None]:
        """Copy these states; return what goes back to them after optimizers have made no step."""
        skeleton, kept = pack_copy(states, self.is_replicated())
        return lambda: self.restore(unpack(skeleton, kept))

    def is_replicated(self) -> Callable[[torch.Tensor], bool]:
        """Return a predicate for tensors that only optimizers change."""
        addresses = {tensor.data_ptr() for tensor in self._replicated()}
        return lambda tensor: tensor.data_ptr() in addresses

    # ------------------------------------------------------------------ for code that runs again

    def keep(self, states: dict[str, Any]) -> None:
        """Copy these states, to go on from when the code has registered them anew."""
        self._kept = unpack(*pack_copy(states))

    @property
    def keeps_some(self) -> bool:
        return self._kept is not None

    def go_on_from_kept(self) -> None:
        assert self._kept is not None
        self.restore(self._kept)
        self._kept = None

    def go_on_early(self) -> None:
        """Restore what stands before the epochs; those find the random streams as they were."""
        assert self._kept is not None
        drawn = {"random": self._kept.pop("random")} if "random" in self._kept else {}
        self.go_on_from_kept()
        self._kept = drawn

    # ------------------------------------------------------------------ on disk

    def restore_newest(self) -> None:
        self.has_looked = True
        while self.parent and not self.checkpoints.has_any:
            self._while_waiting()
            time.sleep(LOOK_SECONDS)
        states = self.checkpoints.load_newest(self._readers())
        if states is not None:
            self.registry.restore(states, inherited=self.checkpoints.came_from_parent)
        elif self.parent:
            raise InvalidTraining(
                f"the state of the parent trial {self.parent} cannot be read in {self.folder}; the log names what is "
                "wrong with it. Start this trial again from another parent, or from none"
            )

    def look_again(self) -> None:
        """Find out anew where the trial stands: the code runs again as a joiner's."""
        self.has_looked = False

    def save(self, summary: dict[str, Any], *, leaving: bool, wait: bool = False) -> None:
        """Write all states; rank 0 only."""
        self.checkpoints.save(self.capture(), summary, leaving=leaving, wait=wait, keeps=self.is_replicated())

    def keep_apart(self, name: str, summary: dict[str, Any]) -> None:
        """Write the present state apart from the trial's checkpoints, for other trials to begin with."""
        self.checkpoints.keep_apart(name, self.capture(), summary)

    def before_update(self) -> None:
        """Wait until a checkpoint has copied the weights, which are about to change."""
        self.checkpoints.settle()
