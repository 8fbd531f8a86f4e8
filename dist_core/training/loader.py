"""AdaptiveDataLoader: batches whose size follows the trial's allocation and statistics, every sample once a pass.

The first loader that trains sets the pace: between its batches generations switch and batch sizes change. Further
loaders may train in the same epoch, one after another, with a fixed batch size. A loop trains when gradients are on and
a wrapped model is in training mode; any other loop evaluates.

Within ``remaining_epochs_until`` an epoch of the first training loader is an epoch's worth of progress at the initial
batch size. With a fixed batch size that is exactly one pass over the data; with an adaptive one, larger batches make
less progress per example, so an epoch takes somewhat more than a pass, and epoch numbers mean the same in all trials.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any, cast

import torch
import torch.optim.swa_utils
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from dist_core.data.parted_source import PartedSource
from dist_core.data.source import StreamSource, batch_source
from dist_core.errors import InvalidTraining
from dist_core.generations.decision import fingerprint
from dist_core.goodput import BatchBounds, fixed_choice
from dist_core.state.seeds import FIRST_SEED, seed_of_script
from dist_core.training.batch_scale import write_scalars
from dist_core.training.evaluation import Evaluation
from dist_core.training.loop_code import divides_by_len
from dist_core.training.training_loop import MOST_DRY_BATCHES, LoopMarks, TrainingLoop
from dist_core.trial.current import get_core
from dist_core.trial.replica import Replica


class AdaptiveDataLoader:
    """Load the batches of all replicas, as ``torch.utils.data.DataLoader`` does for one process.

    An iterable dataset is read as a whole by every replica, which keeps its part; with ``num_workers`` of 2 or more it
    is divided among the workers of all replicas, each of which learns its part from
    ``torch.utils.data.get_worker_info()``.

    Args:
        dataset: Samples, by index or as a stream.
        batch_size: Samples of a step over all replicas together, the size that the learning rate was chosen for.
        shuffle: Draw the samples in another order in each epoch.
        sampler: Draws single indices; it is drawn from once an epoch, with the same seed on every replica.
        seed: Seed of the order. None takes that of the ``generator`` given, or the one that the script has seeded torch
            with, as rank 0 has it, or 0.
        epoch_size: Number of samples that count as an epoch, where the dataset does not know its length.
        max_local_bsz: Most samples that a replica computes in one pass; a larger batch takes several passes.
        **options: Further arguments of torch's DataLoader, such as ``num_workers`` and ``drop_last``.

    Raises:
        InvalidTraining: Arguments contradict each other, or a ``batch_sampler`` is given: batches are cut here.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        *,
        seed: int | None = None,
        epoch_size: int | None = None,
        max_local_bsz: int | None = None,
        **options: Any,
    ) -> None:
        if options.pop("batch_sampler", None) is not None:
            raise InvalidTraining(
                "AdaptiveDataLoader was given a batch_sampler, but it forms batches itself, because their size "
                "follows the allocation. Give a sampler that yields single indices"
            )
        if epoch_size is not None and epoch_size < 1:
            raise InvalidTraining(f"epoch_size is {epoch_size}; it must be at least 1 sample, or None")
        self.drop_last = bool(options.pop("drop_last", False))
        try:
            size = operator.index(batch_size)
            self.bounds = BatchBounds(init_batch=size, max_batch=size, max_atomic=max_local_bsz)
        except ValueError as error:
            raise InvalidTraining(str(error)) from error
        except TypeError as error:
            raise InvalidTraining(
                f"batch_size is {batch_size!r}; it must be a whole number of samples, because the trial forms the "
                "batches that its replicas share"
            ) from error
        self.dataset = dataset
        self._shuffle, self._sampler = shuffle, sampler
        self.generator = options.get("generator")
        self.collate_fn = options.get("collate_fn") or default_collate
        self.num_workers = options.get("num_workers", 0)
        self._follows_others = seed is None and not _is_seeded(self.generator)
        order = _seed_of_order(dataset, self.generator, sampler) if seed is None else seed
        self.source = batch_source(dataset, shuffle=shuffle, seed=order, sampler=sampler, options=options)
        get_core().pacing.awaits_loader = True
        self._note_workers(get_core())
        self._epoch_size = epoch_size
        self.autoscaled = False
        self.shares_evaluation: bool | None = None
        """True if an evaluation loop gives each replica a share of the samples, False if all of them. None: a share
        where the script puts together what its replicas have computed."""
        self.name: str | None = None
        self._marks = LoopMarks()

    def _note_workers(self, core: Replica) -> None:
        """Note a stream's workers before replicas meet, if possible: they have to divide streams alike."""
        if isinstance(self.source, PartedSource):
            core.habits.note_stream_workers(self.source.workers)

    @property
    def batch_size(self) -> int:
        return self.bounds.init_batch

    @functools.cached_property
    def sampler(self) -> Any:
        """Sampler as torch's loader has it, for code that looks at it; the order is this loader's own."""
        if self._sampler is not None or isinstance(self.dataset, IterableDataset):
            return self._sampler
        dataset = cast("Sized", self.dataset)
        return RandomSampler(dataset, generator=self.generator) if self._shuffle else SequentialSampler(dataset)

    @property
    def batch_sampler(self) -> BatchSampler | None:
        """Batches of the present size, as torch's loader would cut them; None for a stream."""
        if self.sampler is None:
            return None
        return BatchSampler(self.sampler, self.current_batch_size, self.drop_last)

    @property
    def cursor(self) -> Any:
        return self.source.cursor

    @property
    def order_fingerprint(self) -> int:
        """16 bits of where this loader stands, and of the order it goes through."""
        cursor = self.cursor
        return fingerprint([self.source.order_fingerprint, cursor.passes, cursor.position, get_core().position.epoch])

    @property
    def reads_a_stream(self) -> bool:
        return isinstance(self.source, StreamSource)

    @property
    def epoch_size(self) -> int | None:
        """Samples that make an epoch; None when nobody knows."""
        return self._epoch_size or self.source.num_samples

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Let the batch size follow goodput, up to ``max_batch_size`` in total and within the bounds per replica.

        Without this call the batch size stays as it is. ``gradient_accumulation``: also let a step take several passes.

        Raises InvalidTraining for bounds that contradict each other or the batch size.
        """
        lower, upper = local_bsz_bounds if local_bsz_bounds is not None else (None, None)
        too_large = upper is not None and upper < self.batch_size and not gradient_accumulation
        if (lower is not None and lower > self.batch_size) or too_large:
            raise InvalidTraining(
                f"batch_size is {self.batch_size} but local_bsz_bounds are {local_bsz_bounds}; the bounds must "
                "contain batch_size, because a single replica starts with it. With gradient_accumulation=True, the "
                "upper bound may be lower than batch_size"
            )
        if self.epoch_size is None:
            raise InvalidTraining(
                f"{type(self.dataset).__name__} has no length, but with an adaptive batch size an epoch is a number "
                "of samples; say how many: AdaptiveDataLoader(..., epoch_size=...)"
            )
        try:
            self.bounds = BatchBounds(
                init_batch=self.batch_size,
                max_batch=int(max_batch_size),
                min_atomic=1 if lower is None else int(lower),
                max_atomic=None if upper is None else int(upper),
                accumulation=gradient_accumulation,
            )
        except (ValueError, TypeError) as error:
            raise InvalidTraining(str(error)) from error
        self.autoscaled = True

    def __len__(self) -> int:
        """Batches a pass takes at the present batch size. Raises TypeError, as torch does, when nobody knows.

        For a joiner, more than it will be given, so that code which counts batches does not leave before the others.
        Where code behind a training loop divides by it, the number of batches that the loop's body was given.
        """
        if self._marks.seen and divides_by_len():
            return self._marks.seen
        self._marks.may_be_counted = True
        return self.batches_of_pass()

    def batches_of_pass(self) -> int:
        if self.epoch_size is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length; give AdaptiveDataLoader an epoch_size")
        whole, rest = divmod(self.epoch_size, self.current_batch_size)
        core = get_core()
        dry = MOST_DRY_BATCHES if core.generation.is_outside else 0
        return whole + (rest > 0 and not self.drop_last) + dry

    @property
    def _paces(self) -> bool:
        """Tell whether this is the loader whose batch size adapts."""
        return get_core().loader is self

    @property
    def current_batch_size(self) -> int:
        core = get_core()
        if self._paces and core.adaptation is not None:
            return core.adaptation.global_batch(core.generation.group.num_shares)
        return self.batch_size

    @property
    def current_local_bsz(self) -> int:
        """Examples of one forward and backward pass on a replica."""
        core = get_core()
        if self._paces and core.adaptation is not None and core.adaptation.bounds.adaptive:
            return core.adaptation.atomic_batch
        return fixed_choice(self.bounds, core.generation.group.num_shares)[0]

    @property
    def accumulation_steps(self) -> int:
        """Passes of a step before the one that reduces gradients."""
        core = get_core()
        return core.adaptation.accumulation if self._paces and core.adaptation is not None else 0

    @property
    def batches_of_step(self) -> list[Any]:
        """Return this replica's batches of the present step, one a pass; empty outside the trial's steps."""
        return [] if self._marks.loaded is None else self._marks.loaded.batches

    def weigh(self, amount: float) -> None:
        """Say what the loss of the present batch is a mean over, where that is not the number of its samples.

        ``amount``: the tokens that count, say, or the sum of the samples' class weights. Call it for each batch before
        the backward pass. The step's gradient is then that of the mean over the whole global batch, however many
        replicas and passes that is divided among; their amounts are summed. Outside of training loops it does nothing.

        Raises InvalidTraining for a number that is not finite or below 0, and for models of several slots.
        """
        amount = float(amount)
        if not 0.0 <= amount < math.inf:
            raise InvalidTraining(f"loader.weigh() was given {amount}; it must be finite and at least 0")
        core, loaded = get_core(), self._marks.loaded
        if loaded is None or not core.models:
            return
        place = core.models[0].step_place
        # A replica without samples of its own computes others', which count for nothing.
        counts = loaded.plan.weight and len(loaded.plan.micro_batches[place.index])
        amount = amount if counts else 0.0
        total = None
        if place.is_last_micro_batch:
            here = sum(place.amounts) + amount
            what = "what losses are means over"
            total = core.together(lambda group: group.sum_of(here, what=what)[0], otherwise=lambda: here)
        for model in core.models:
            model.passes.weigh(amount, total)

    def leave_out_first(self, samples: int) -> None:
        """Begin the next training loop behind so many samples, which an earlier run of the script has trained.

        A trial that is resumed within that epoch stands behind them already. Raises InvalidTraining for a stream.
        """
        if isinstance(self.dataset, IterableDataset):
            raise InvalidTraining(
                f"the script skips the first {samples} samples of a stream ({type(self.dataset).__name__}), but a "
                "trial resumes at its position in the stream by itself. Do not skip samples"
            )
        self._marks.left_out = samples

    def to_tensorboard(self, writer: Any, global_step: int, tag_prefix: str = "") -> None:
        """Write batch sizes and accumulation steps as scalars under ``tag_prefix``."""
        values = {
            "Total_Batch_Size": self.current_batch_size,
            "Local_Batch_Size": self.current_local_bsz,
            "Accumulation_Steps": self.accumulation_steps,
        }
        write_scalars(writer, global_step, tag_prefix, values)

    def commit(self, taken: int) -> None:
        """Count a step over ``taken`` samples."""
        assert self._marks.division is not None
        self.source.commit(taken, self._marks.division)

    def complete_step(self) -> None:
        """Count the last step of an epoch that ends while an iterator over this loader is still held."""
        TrainingLoop(self, self._marks).complete_step(get_core())

    def settle_order(self) -> None:
        """Take the seed of the loader that trained first, which is rank 0's on all replicas, unless one was given."""
        first = get_core().pacing.loader
        if self._follows_others and first is not None and first is not self:
            seed = getattr(first.cursor, "seed", None)
            if seed is not None and hasattr(self.cursor, "seed"):
                self.cursor.seed = seed

    def take_over(self, before: AdaptiveDataLoader) -> None:
        """Go on where another loader over the same data stands; the script makes a new one each epoch."""
        core = get_core()
        self.cursor.load_state_dict(before.cursor.state_dict())
        assert before.name is not None
        self.name = before.name
        core.registry.replace(self.name, self.cursor)
        if core.adaptation is not None:
            core.adaptation.use_bounds(self.bounds)

    def evaluate(self) -> Iterator[Any]:
        """Evaluate one pass, whatever mode the models are in: nothing is trained."""
        core = get_core()
        self._note_workers(core)
        return self._evaluation(TrainingLoop(self, self._marks)).evaluate(core)

    def batches_of_evaluation(self) -> int:
        """Batches that this replica evaluates. Raises TypeError, as torch does, when nobody knows."""
        if self.source.num_samples is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length")
        return self._evaluation(TrainingLoop(self, self._marks)).batches(get_core())

    def _evaluation(self, training: TrainingLoop) -> Evaluation:
        return Evaluation(self, training, shared=self.shares_evaluation)

    def __iter__(self) -> Iterator[Any]:
        core = get_core()
        self._note_workers(core)
        training = TrainingLoop(self, self._marks)
        if sys._getframe(1).f_code is _UPDATE_BN:
            # What goes through the model's batch norms stays there, on each replica: all of them see all samples.
            return Evaluation(self, training, shared=False).evaluate(core)
        evaluation = self._evaluation(training)
        if not torch.is_grad_enabled() or not (self.autoscaled or core.models):
            return evaluation.evaluate(core)
        if not core.models or any(model.training for model in core.models):
            return training.train(core)
        if self.autoscaled or self.name is not None:
            return evaluation.train_unless_it_evaluates(core)
        return evaluation.evaluate_unless_it_trains(core)


def _seed_of_order(dataset: Dataset[Any], generator: torch.Generator | None, sampler: Iterable[int] | None) -> int:
    """Return the seed of the order that the script asks for by seeding torch, or a generator of its own."""
    if isinstance(dataset, IterableDataset):
        # Scripts seed each replica differently, and a stream is read by each of them.
        return 0
    generator = generator or getattr(sampler, "generator", None)
    seed = generator.initial_seed() if generator is not None and _is_seeded(generator) else seed_of_script()
    return (seed or 0) % 2**63


def _is_seeded(generator: Any) -> bool:
    return isinstance(generator, torch.Generator) and generator.initial_seed() != FIRST_SEED


_UPDATE_BN = inspect.unwrap(torch.optim.swa_utils.update_bn).__code__
"""Takes the statistics of batch norms from all batches of a loader."""


def current_dataloader() -> AdaptiveDataLoader | None:
    """Return the AdaptiveDataLoader of the training loop; None before the first one begins, and where there is none."""
    loader = get_core().loader
    assert loader is None or isinstance(loader, AdaptiveDataLoader)
    return loader
