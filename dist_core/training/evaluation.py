"""Evaluation: loops over a loader in which nothing is trained, and those of which only their body tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dist_core.data.order import evaluation_share
from dist_core.training.looped import Looped
from dist_core.training.training_loop import TrainingLoop
from dist_core.trial.core import TrainingCore


class Evaluation:
    """``training``: the same loader's loop that trains. ``shared``: whether each replica has its share."""

    def __init__(self, loader: Looped, training: TrainingLoop, *, shared: bool = True) -> None:
        self._loader = loader
        self._training = training
        self._shared = shared

    def evaluate(self, core: TrainingCore, seen: tuple[int, int] | None = None) -> Iterator[Any]:
        core.loops.go_on_behind()
        run = core.position.runs
        core.loops.evaluations += 1
        core.position.has_evaluated |= not core.position.in_training_loop
        try:
            for batch in self._share(core, seen):
                core.saving.leave_evaluation_if_asked()
                yield batch
        finally:
            core.loops.evaluations -= core.position.runs == run

    def _share(self, core: TrainingCore, seen: tuple[int, int] | None) -> Iterator[Any]:
        """One pass without training: this replica's share of the samples, nothing shared with the others.

        ``seen``: first and number of those, in the order of training, that the replicas have had already.
        """
        rank, world_size, batch = self._division(core)
        workers = core.habits.stream_workers or 1
        share: Iterator[Any] = self._loader.source.evaluation(
            rank=rank, world_size=world_size, batch=batch, workers=workers, seen=seen
        )
        return share

    def _division(self, core: TrainingCore) -> tuple[int, int, int]:
        """Which share of how many, in batches of which size: of a smaller one where there are not enough for all."""
        # Processes of one replica compute together: they evaluate the same samples.
        rank, world_size = (
            (core.generation.group.replica, core.generation.group.num_replicas) if self._shared else (0, 1)
        )
        samples, batch = self._loader.source.num_samples, self._loader.batch_size
        if samples is not None and -(-samples // batch) < world_size:
            batch = -(-batch // world_size)
        return rank, world_size, batch

    def batches(self, core: TrainingCore) -> int:
        """Of this replica, in one pass over a dataset with a length."""
        rank, world_size, batch = self._division(core)
        samples = self._loader.source.num_samples
        assert samples is not None
        return -(-len(evaluation_share(samples, rank=rank, world_size=world_size, batch=batch)) // batch)

    def train_unless_it_evaluates(self, core: TrainingCore) -> Iterator[Any]:
        """As below, over a loader that is known to train: a trainer may put its model into training mode in the body.

        If nobody trained on the first batch, it was the first of an evaluation, which goes on with the other samples.
        """
        if not core.position.in_epoch_loop and core.environment is not None:
            yield from self.evaluate_unless_it_trains(core)
            return
        steps = self._training.train(core)
        try:
            first = next(steps, None)
            seen = self._training.seen
            if first is None:
                return
            yield first
            if any(model.training or model.step_place.stepped for model in core.models):
                yield from steps
                return
        finally:
            steps.close()  # type: ignore[attr-defined]  # a generator
        self._loader.cursor.left = False
        yield from self.evaluate_unless_it_trains(core, seen)

    def evaluate_unless_it_trains(self, core: TrainingCore, seen: tuple[int, int] | None = None) -> Iterator[Any]:
        """All models are in evaluation mode and gradients on: somebody evaluates, or trains with frozen statistics.

        What tells is an optimizer that steps. What ran until then is undone, and the loop begins as one that trains.
        """
        undo = core.way_back.remember()
        trained = False
        for model in core.models:
            model.passes.begin_probe()
        try:
            for batch in self.evaluate(core, seen):
                yield batch
                trained = any(model.step_place.stepped for model in core.models)
                if trained:
                    break
        finally:
            for model in core.models:
                model.passes.end_probe(trained=trained)
        if trained:
            undo()
            yield from self._training.train(core)
