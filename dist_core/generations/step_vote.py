"""The small reduction that every optimizer step makes: flags, decisions and measurements, summed over the replicas.

It is launched when a step's first gradients are reduced, or at the step's end, and looked at when the step is over.
Where replicas train asynchronously it is looked at some steps later, at the same step by each of them: nobody is
further ahead of the slowest than that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dist_core.generations.process_groups import ReplicaGroup
from dist_core.generations.watch import Prepared


@dataclass(slots=True)
class Round:
    vector: torch.Tensor
    prepared: Prepared | None
    """The generation this replica had prepared when it composed the vector."""
    work: dist.Work | None
    wait_for: Callable[[dist.Work], None]

    def wait(self) -> None:
        """Until all replicas have taken part. Raises RuntimeError when one is gone."""
        work, self.work = self.work, None
        if work is not None:
            self.wait_for(work)


class ControlRounds:
    """The rounds of one replica; the present step's, and those that are not looked at yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._present: Round | None = None
        self._late: deque[Round] = deque()

    @property
    def steps_ahead(self) -> int:
        """Steps that this replica has made and that it does not know all others to have made."""
        return len(self._late)

    def launch(
        self,
        compose: Callable[[], tuple[torch.Tensor, Prepared | None]],
        group: ReplicaGroup,
    ) -> None:
        """Once a step; the later calls of a step do nothing. Raises RuntimeError when a replica is gone."""
        with self._lock:
            if self._present is None:
                vector, prepared = compose()
                self._present = Round(vector, prepared, None, group.fuse.wait)
                self._present.work = group.sum_later(vector)

    def wait(self) -> None:
        """For the present step's round, if it was launched. Raises RuntimeError when a replica is gone."""
        if self._present is not None:
            self._present.wait()

    def finish(self, lag: int) -> Round | None:
        """The round to act on at the end of this step: its own, or that of ``lag`` steps before; None at the start.

        Raises RuntimeError when a replica is gone.
        """
        present, self._present = self._present, None
        assert present is not None
        if lag == 0:
            present.wait()
            return present
        self._late.append(present)
        if len(self._late) <= lag:
            return None
        due = self._late.popleft()
        due.wait()
        return due

    def drain(self) -> None:
        """Until all replicas have come as far as this one; what they agree on meanwhile is agreed on again.

        Raises RuntimeError when one is gone.
        """
        while self._late:
            self._late.popleft().wait()

    def reset(self) -> None:
        """Forget what is under way: the replicas it was between no longer are."""
        self._present = None
        self._late.clear()
