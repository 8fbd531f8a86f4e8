"""Training data of Lightning's trainer: an elastic loader that it asks for its length, and steps through one by one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

from torch.utils._pytree import tree_unflatten

from dist_core.lightning.package import _DataFetcher
from dist_core.training.loader import AdaptiveDataLoader
from dist_core.training.others_loop import InPlaceOfLoader


class TrainingBatches(InPlaceOfLoader):
    """Training loader for the trainer: as many batches an epoch as one process would have."""

    def __init__(self, loader: AdaptiveDataLoader, batch: int) -> None:
        super().__init__(loader)
        self.batch_size = batch

    def __len__(self) -> int:
        samples = self.loader.source.num_samples
        if samples is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length")
        whole, rest = divmod(samples, self.batch_size)
        return int(whole + (rest > 0 and not self.loader.drop_last))

    def __iter__(self) -> Iterator[Any]:
        """Yield nothing: a trainer would look ahead, and a batch of a trial counts as trained once it is taken."""
        return iter(())


class Exhausted(StopIteration):
    """The training loop is over: its last step has counted."""


class StepFetcher(_DataFetcher):
    """Hands out a batch at a time, which ``fetch`` has got; the step before has counted then, or is made again."""

    def __init__(self) -> None:
        super().__init__()
        self._batches: Iterator[Any] | None = None
        self._next: Any = None

    def __iter__(self) -> StepFetcher:
        self.close()
        self.reset()
        return self

    def reset(self) -> None:
        self.fetched, self.done = 0, False

    def fetch(self, *, leaves: Callable[[], bool] = lambda: False) -> None:
        """Fetch the next batch; raise Exhausted after the last one.

        ``leaves``: called after each step; True ends the loop early.
        """
        self._start_profiler()
        try:
            if self._batches is None:
                self._batches = iter(self._of_trial.loader)
            self._next = next(self._batches)
        except StopIteration:
            self._batches = iter(())
            raise Exhausted from None
        finally:
            self._stop_profiler()
        if leaves():
            self.close()
            # Also of a replica that has come in just now: the next epoch begins another pass.
            self._of_trial.loader.cursor.left = True
            raise Exhausted

    def __next__(self) -> Any:
        batch, self._next = self._next, None
        return tree_unflatten([batch], self.combined_loader._spec), 0, 0

    @property
    def _of_trial(self) -> TrainingBatches:
        return cast("TrainingBatches", self.combined_loader.flattened[0])

    def close(self) -> None:
        """Leave the training loop, if one runs."""
        batches, self._batches = self._batches, None
        if isinstance(batches, Generator):
            batches.close()

    def teardown(self) -> None:
        self.close()
        super().teardown()
