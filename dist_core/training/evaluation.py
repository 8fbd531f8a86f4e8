"""Evaluation: a loader's batches where nothing is trained, and which of them a replica computes.

A script that puts together what its replicas have computed gives each of them a share of the samples. Any other knows
of one process only: what it adds up would be of a part of the samples, so every replica computes all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dist_core.data.order import evaluation_share
from dist_core.training.loop_code import combines_processes, puts_together
from dist_core.training.training_loop import TrainingLoop
from dist_core.trial.replica import Replica

if TYPE_CHECKING:
    from dist_core.training.loader import AdaptiveDataLoader


class Evaluation:
    """A loader's batches where nothing is trained.

    ``training``: the same loader's loop that trains. ``shared``: whether each replica has its share; None: where the
    script puts shares together.
    """

    def __init__(self, loader: AdaptiveDataLoader, training: TrainingLoop, *, shared: bool | None = None) -> None:
        self._loader = loader
        self._training = training
        self._shared = shared

    def evaluate(self, core: Replica, seen: tuple[int, int] | None = None) -> Iterator[Any]:
        """Yield one pass without training: this replica's share of the samples, or all of them.

        ``seen``: first and number of those, in the order of training, that the replicas have had already, each its
        share.
        """
        core.loops.go_on_behind()
        run = core.position.runs
        core.loops.evaluations += 1
        core.position.evaluation_begins()
        try:
            shared = self._is_shared(core) or (self._shared is None and seen is not None)
            rank, world_size, size = self._division(core, shared=shared)
            added = core.sums.additions
            workers = core.habits.stream_workers or 1
            share = self._loader.source.evaluation(
                rank=rank, world_size=world_size, batch=size, workers=workers, seen=seen
            )
            for batch in share:
                if not core.position.in_training_loop:
                    core.departure.leave_evaluation_if_asked()
                yield batch
            if core.generation.group.num_replicas > 1 and self._shared is None:
                core.loops.evaluated_alone = world_size == 1
                kept = core.sums.additions > added or core.loops.puts_together
                if world_size > 1 and not kept and not combines_processes():
                    core.warn(_SHARE_ALONE.format(world_size))
        finally:
            core.loops.evaluations -= core.position.runs == run

    def _is_shared(self, core: Replica) -> bool:
        if self._shared is not None:
            return self._shared
        return puts_together(core)

    def _division(self, core: Replica, *, shared: bool) -> tuple[int, int, int]:
        """Return the share's index, the number of shares, and the batch size, smaller if there are few samples."""
        # Processes of one replica compute together: they evaluate the same samples.
        rank, world_size = (core.generation.group.replica, core.generation.group.num_replicas) if shared else (0, 1)
        samples, batch = self._loader.source.num_samples, self._loader.batch_size
        if samples is not None and -(-samples // batch) < world_size:
            batch = -(-batch // world_size)
        return rank, world_size, batch

    def batches(self, core: Replica) -> int:
        """Return this replica's number of batches in one pass over a dataset with a length."""
        rank, world_size, batch = self._division(core, shared=self._is_shared(core))
        samples = self._loader.source.num_samples
        assert samples is not None
        return -(-len(evaluation_share(samples, rank=rank, world_size=world_size, batch=batch)) // batch)

    def train_unless_it_evaluates(self, core: Replica) -> Iterator[Any]:
        """Train, unless the body turns out to evaluate: a trainer may put its model into training mode in the body.

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

    def evaluate_unless_it_trains(self, core: Replica, seen: tuple[int, int] | None = None) -> Iterator[Any]:
        """Evaluate, unless an optimizer steps: all models are in evaluation mode, and gradients are on.

        What tells is an optimizer that steps. What ran until then is undone, and the loop begins as one that trains.
        """
        undo = core.rollback.remember()
        trained = False
        for model in core.models:
            model.step_place.begin_probe()
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


_SHARE_ALONE = (
    "an evaluation gave each of the {} replicas its share of the samples, but added nothing to an Accumulator: its "
    "numbers are of one share. Add them up in an Accumulator, or evaluate a plain DataLoader"
)
