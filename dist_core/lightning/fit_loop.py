"""ElasticFitLoop: Lightning's loop over epochs, over those of a trial; with what it asks for data and logs through."""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Iterator
from typing import Any, cast

from dist_core.lightning.carried import set_counts
from dist_core.lightning.data import StepFetcher
from dist_core.lightning.epoch_loop import ElasticEpochLoop
from dist_core.lightning.package import _EvaluationLoop, _FitLoop, _LoggerConnector
from dist_core.lightning.refusals import refuse_another, refuse_several
from dist_core.training.api import remaining_epochs_until


class ElasticFitLoop(_FitLoop):
    epoch_loop: ElasticEpochLoop
    _epochs: Generator[int, None, None] | Iterator[int] = iter(())
    _first_loader: Any = None
    """First loader of those that the trainer makes anew."""

    def setup_data(self) -> None:
        with self.trainer.strategy.without_meeting():  # type: ignore[attr-defined]  # ours
            super().setup_data()
        if self._combined_loader is not None:
            refuse_several(len(self._combined_loader.flattened))
            loader = self._combined_loader.flattened[0].loader
            if self._first_loader is not None:
                refuse_another(loader, self._first_loader)
            self._first_loader = loader
            if not isinstance(self._data_fetcher, StepFetcher):
                self._data_fetcher = StepFetcher()
                self._data_fetcher.setup(self._combined_loader)

    def reset(self) -> None:
        loops = (self, self.epoch_loop, self.epoch_loop.val_loop)
        epochs: Any = self.epoch_progress.current
        goes_on = self._loaded_from_state_dict or epochs.processed
        if goes_on and not self.epoch_loop.core.position.steps:
            self._stand_where_it_was()
        for loop in loops:
            # Where to go on is the trial's to say.
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
        super().reset()

    def _stand_where_it_was(self) -> None:
        """Begin the trial where the trainer goes on from a file of its own or an earlier fit."""
        loop, epochs = self.epoch_loop, cast("Any", self.epoch_progress.current)
        assert self._combined_loader is not None
        batches = self._combined_loader.flattened[0]
        epoch, trained = int(epochs.processed), int(loop.batch_progress.current.ready)
        if not self._loaded_from_state_dict or epochs.processed == epochs.ready:
            trained = 0
        elif trained >= self.max_batches:
            epoch, trained = epoch + 1, 0
        position, samples = loop.core.position, trained * batches.batch_size
        progress = float(epoch * (batches.loader.epoch_size or 0) + samples)
        position.stand_at(epoch=epoch, steps=loop.global_step, progress=progress)
        batches.loader.cursor.passes, batches.loader.cursor.position = epoch, samples
        set_counts(loop.batch_progress.current, trained)
        loop.carried.loaded = epoch

    def on_run_start(self) -> None:
        self.trainer.accumulate_grad_batches = 1
        # Lightning would end the trainer where the trial saves its state and leaves.
        self.trainer._signal_connector.teardown()
        self.epoch_loop.core.epochs.refuse_extension("max_epochs")
        self._epochs = remaining_epochs_until(self._limit)
        self._go_to_next_epoch()
        super().on_run_start()

    @property
    def _limit(self) -> int:
        """Number of epochs to train."""
        loop, by_epochs = self.epoch_loop, sys.maxsize if self.max_epochs in (None, -1) else int(self.max_epochs)
        per_epoch = min(loop.steps.per_epoch or math.inf, -(-self.max_batches // loop.passes))
        if self.max_steps == -1 or per_epoch == math.inf:
            return by_epochs
        return min(by_epochs, math.ceil(self.max_steps / per_epoch))

    def _go_to_next_epoch(self) -> None:
        epoch = next(self._epochs, None)
        reached = self._limit if epoch is None else epoch
        for tracker in (self.epoch_progress.total, self.epoch_progress.current):
            set_counts(tracker, reached)

    def on_advance_end(self) -> None:
        loop = self.epoch_loop
        if self._data_fetcher is not None and not loop.exhausted:
            assert isinstance(self._data_fetcher, StepFetcher)
            stops = loop.is_stopped
            self._data_fetcher.close()
        else:
            stops = False
        loop.results.share_epoch()
        super().on_advance_end()
        if not stops:
            self._go_to_next_epoch()

    def on_run_end(self) -> None:
        if isinstance(self._epochs, Generator):
            self._epochs.close()
        super().on_run_end()

    def teardown(self) -> None:
        self._first_loader = None
        if self.epoch_loop.passes:
            self.trainer.accumulate_grad_batches = self.epoch_loop.passes
        super().teardown()


class ElasticValidationLoop(_EvaluationLoop):
    def setup_data(self) -> None:
        # Who has joined since the others did this does it alone.
        with self.trainer.strategy.without_meeting():  # type: ignore[attr-defined]  # ours
            super().setup_data()


class ElasticLoggerConnector(_LoggerConnector):
    @property
    def should_update_logs(self) -> bool:
        """Tell whether this step is logged: it is, or one step of a large batch goes past the one that is."""
        trainer: Any = self.trainer
        loop = trainer._active_loop
        if not isinstance(loop, ElasticFitLoop) or trainer.log_every_n_steps == 0:
            return super().should_update_logs
        return loop.epoch_loop.passes_step(trainer.log_every_n_steps) or bool(trainer.should_stop)
