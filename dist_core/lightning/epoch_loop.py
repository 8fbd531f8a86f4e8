"""ElasticEpochLoop: Lightning's loop over the batches of an epoch, over the steps of a trial; its metrics.

Lightning's loop stays: its hooks, counts, schedules, validations and logging. What it counts is what one process would
count, however many replicas compute a step; and what follows an epoch's last step comes once that step has counted.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from dist_core.lightning.carried import CarriedProgress, set_counts
from dist_core.lightning.data import Exhausted, StepFetcher, TrainingBatches
from dist_core.lightning.package import _ResultCollection, _TrainingEpochLoop, call
from dist_core.training.accumulator import Accumulator
from dist_core.training.model import AdaptiveDataParallel
from dist_core.training.others_loop import UserSteps
from dist_core.trial.replica import Replica


class SummedResults(_ResultCollection):
    """Lightning's collection for training. ``logs_step``: whether the values of the step that runs will be logged.

    Means and sums add up over replicas; a minimum, a maximum and torchmetrics' own objects are left to who logs them.
    """

    def __init__(self, core: Replica, *, counts: Callable[[], bool], logs_step: Callable[[], bool]) -> None:
        super().__init__(training=True)
        self._core = core
        self._counts = counts
        self._logs_step = logs_step
        self._of_epoch = Accumulator()
        self._of_step = Accumulator()

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        super().update_metrics(key, value, batch_size)
        meta = self[key].meta
        if not (self[key].is_tensor and (meta.is_mean_reduction or meta.is_sum_reduction) and self._counts()):
            return
        weight = batch_size if meta.is_mean_reduction else 1
        if meta.on_epoch:
            self._add(self._of_epoch, key, float(value), weight)
        if meta.on_step and self._logs_step():
            self._add(self._of_step, key, float(value), weight)

    @staticmethod
    def _add(sums: Accumulator, key: str, value: float, weight: int) -> None:
        sums[f"{key} value"] += value * weight
        sums[f"{key} weight"] += weight

    def share_step(self) -> None:
        """Make the values that this step logs those of all replicas; collective."""
        for key, value, weight in self._taken(self._of_step):
            metric = self[key]
            mean = value / weight if metric.meta.is_mean_reduction else value
            metric._forward_cache = torch.as_tensor(mean, dtype=metric.value.dtype, device=metric.value.device)
            if not metric.meta.on_epoch:
                metric.value = metric._forward_cache

    def share_epoch(self) -> None:
        """Make the sums over the epoch those of all replicas, of those that have left as well; collective."""
        for key, value, weight in self._taken(self._of_epoch):
            metric = self[key]
            metric.value = torch.as_tensor(value, dtype=metric.value.dtype, device=metric.value.device)
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = torch.as_tensor(int(weight), device=metric.value.device)
            metric._computed, metric._update_count, metric.has_reset = None, max(1, metric._update_count), False

        self._share_objects()

    def _share_objects(self) -> None:
        """Have all replicas compute a metric that adds up by itself, if any of them has logged it in this epoch."""
        if self._core.generation.stands_alone:
            return
        mine = [key for key, each in self.items() if not each.is_tensor and each.meta.on_epoch and not each.has_reset]
        logged = self._core.together(lambda group: group.gather_json(mine), otherwise=lambda: [mine])
        for key in {key for keys in logged for key in keys} & self.keys():
            self[key].has_reset = False

    def _taken(self, sums: Accumulator) -> list[tuple[str, float, float]]:
        with sums.synchronized() as totals:
            keys = [key.removesuffix(" weight") for key in totals if key.endswith(" weight")]
            taken = [(key, totals[f"{key} value"], totals[f"{key} weight"]) for key in keys]
            for name in list(totals):
                totals[name] = 0.0
        return [(key, value, weight) for key, value, weight in taken if weight and key in self]


STATE = "lightning-trainer"
"""Among the states of the trial."""


class _StepLost(Exception):
    """A replica was lost in the step that runs: what follows it in the loop's body is left out."""


class ElasticEpochLoop(_TrainingEpochLoop):
    core: Replica
    model: AdaptiveDataParallel
    carried: CarriedProgress
    steps: UserSteps
    results: SummedResults
    passes = 0
    """Batches of one process that make a step; 0 before the loop was given its trial."""
    samples_of_step: int
    batches_before = total_before = 0
    """Counted before the step that runs, of the epoch and in all."""
    exhausted = False
    """True if the epoch has no step left."""
    deferred = 0
    """Steps that the work behind the epoch's last step counts as; 0 if there is none."""

    def begin(self, core: Replica, model: AdaptiveDataParallel, batches: TrainingBatches, passes: int) -> None:
        self.core, self.model, self.passes = core, model, passes
        self.samples_of_step = batches.loader.batch_size
        try:
            self._batches_of_pass: int | None = len(batches)
        except TypeError:
            self._batches_of_pass = None
        per_epoch = -(-(self._batches_of_pass or 0) // passes)
        if batches.loader.drop_last and self._batches_of_pass is not None:
            per_epoch = self._batches_of_pass // passes
        self.steps = UserSteps(core, batches.loader, self.samples_of_step, per_epoch)
        self.carried = CarriedProgress(
            self.trainer, lambda: core.position.steps, is_new=lambda: not core.position.own_steps
        )
        self._must_repeat = self._ends = self._trains = self._is_known_last = False
        self._grows = 1
        self._global_before = self._optimized_before = self._batches_behind = 0
        self._results = self.results = SummedResults(
            core,
            counts=lambda: (
                not core.passes_do_not_count and self._place.step is not None and self._place.step.weight > 0
            ),
            logs_step=lambda: bool(self.trainer._logger_connector.should_update_logs),
        )
        core.registry.register(STATE, self.carried)

    @property
    def _place(self) -> Any:
        place = self.model.part.step_place
        place.is_asked_for = True
        return place

    # ------------------------------------------------------------------ an epoch

    def reset(self) -> None:
        present, self.exhausted, self._must_repeat = self.trainer.current_epoch, False, False
        state = self.carried.present() if self.carried.loaded == present else None
        self.deferred = 0
        self.carried.give_up_step()
        super().reset()
        if state is not None:
            # The trial was resumed within this epoch.
            self.carried.take(state)
        self.carried.loaded, self.carried.epoch = None, present

    @property
    def is_stopped(self) -> bool:
        """Tell whether the trainer is to end within the epoch."""
        trainer: Any = self.trainer
        by_steps = self.max_steps != -1 and self.global_step >= self.max_steps
        return by_steps or bool(trainer.should_stop and trainer.fit_loop._can_stop_early)

    @property
    def done(self) -> bool:
        if self.exhausted:
            return True
        ended = bool(super().done)
        # The last step's validation is still to come, or the step that a replica was lost in.
        waits = self.deferred or self._must_repeat or self.core.broken is not None
        return ended and not waits

    def _num_ready_batches_reached(self) -> bool:
        # Where a hook has the rest of the epoch left out, the batch is its last one all at once.
        return self.exhausted or (self._trains and self.batch_progress.is_last_batch and not self._is_known_last)

    def _accumulated_batches_reached(self) -> bool:
        return bool(self._place.is_last_micro_batch)

    def _should_accumulate(self) -> bool:
        return not self._place.is_last_micro_batch

    def advance(self, data_fetcher: Any) -> None:
        assert isinstance(data_fetcher, StepFetcher)
        try:
            self._fetch(data_fetcher)
        except Exhausted:
            self._end_of_data(data_fetcher)
            raise
        if self._place.index == 0:
            self._begin_step(data_fetcher)
        self._is_known_last = data_fetcher.done = self._count_pass()
        self._trains = True
        try:
            super().advance(data_fetcher)
        except _StepLost:
            self._must_repeat = True
        finally:
            self._trains = False

    def _fetch(self, fetcher: StepFetcher) -> None:
        fetcher.fetch(leaves=self._has_enough)
        while self.core.passes_do_not_count:
            self._dry_pass(fetcher)
            fetcher.fetch(leaves=self._has_enough)

    def _has_enough(self) -> bool:
        """Tell whether the last batch that the user wants of an epoch has counted, though there are more."""
        behind = self.core.position.steps >= self.carried.steps_behind
        return bool(self.deferred) and self._is_limited and behind and not self.core.passes_do_not_count

    @property
    def _is_limited(self) -> bool:
        """Tell whether the user wants fewer batches an epoch than there are."""
        most = self.trainer.fit_loop.max_batches
        return bool(most < (math.inf if self._batches_of_pass is None else self._batches_of_pass))

    def _dry_pass(self, fetcher: StepFetcher) -> None:
        """Run one uncounted pass, so that a joiner has gradients and buckets to receive into."""
        trainer: Any = self.trainer
        state, connector = self.carried.present(), trainer._logger_connector
        batch, _, _ = next(fetcher)
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        connector.on_batch_start(batch)
        arguments = self._build_kwargs(OrderedDict(), batch, 0)
        if trainer.lightning_module.automatic_optimization:
            optimizer = trainer.optimizers[0]
            self.automatic_optimization._make_closure(arguments, optimizer, 0)()
            optimizer.step()
        else:
            self.manual_optimization.run(arguments)
        for each in trainer.optimizers:
            each.zero_grad()
        connector.reset_results()
        reset_metrics(trainer.lightning_module)
        self.carried.take(state)

    # ------------------------------------------------------------------ a step

    def _begin_step(self, fetcher: StepFetcher) -> None:
        self._must_repeat = False
        self.carried.end_step()
        if self.deferred:
            # More came behind what seemed to be the last one.
            self._do_what_follows(fetcher)
        self.carried.begin_step()
        progress = self.batch_progress
        self.batches_before, self._global_before = progress.current.completed, self.global_step
        self.total_before = progress.total.completed
        self._optimized_before = self.manual_optimization.optim_step_progress.total.completed
        self._batches_behind = self._batches_of_epoch_behind()
        self._grows = -(-(self._batches_behind - self.batches_before) // self.passes)

    def _batches_of_epoch_behind(self) -> int:
        """Batches of one process that are trained once the step that runs has counted."""
        steps = self.steps.of_epoch_behind(self._place)
        if steps is None:
            return self.batches_before + self.passes
        most = steps * self.passes if self._batches_of_pass is None else min(steps * self.passes, self._batches_of_pass)
        return max(self.batches_before, most)

    def _count_pass(self) -> bool:
        """Have Lightning's own counts come to where one process would be; whether the epoch's last pass is to run."""
        place = self._place
        part = (place.index + 1) / len(place.step.micro_batches)
        behind = math.ceil(part * (self._batches_behind - self.batches_before) - 1e-9)
        for tracker, before in (
            (self.batch_progress.current, self.batches_before),
            (self.batch_progress.total, self.total_before),
        ):
            set_counts(tracker, before + behind - 1)
        most = self.trainer.fit_loop.max_batches
        is_last = self.steps.ends_epoch(place) or (self._is_limited and self._batches_behind >= most)
        return is_last and bool(place.is_last_micro_batch)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if interval == "step" and not update_plateau_schedulers:
            self._behind_pass()
        if not (self._ends and interval == "step"):
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _behind_pass(self) -> None:
        """Count the pass in which the module has trained on its batch."""
        own = self.manual_optimization.optim_step_progress.total
        if not self._place.is_last_micro_batch:
            own.ready = own.completed = self._optimized_before
            return
        if self.core.broken is not None:
            raise _StepLost
        made = self.automatic_optimization.optim_progress.optimizer.step.total
        if self.trainer.lightning_module.automatic_optimization:
            if made.completed == self._global_before:
                # A hook has left the batch out.
                return
            made.ready = made.completed = self._global_before + self._grows
        else:
            own.ready = own.completed = self._optimized_before + (own.completed - self._optimized_before) * self._grows
        if not self.core.shared_step.reduces and self.core.generation.group.world_size > 1:
            # Its optimization was left out on this replica: the others' sums come before what is logged.
            self.core.shared_step.take_part()
        if self.trainer._logger_connector.should_update_logs:
            self.results.share_step()

    def passes_step(self, every: int) -> bool:
        """Tell whether the running step passes a multiple of ``every`` of the user's steps."""
        before = self._batches_that_stepped
        return (before + max(1, self._grows)) // every > before // every

    def on_advance_end(self, data_fetcher: Any) -> None:
        if self._must_repeat or not self._place.is_last_micro_batch:
            return
        if self.batch_progress.is_last_batch:
            # Its validation belongs behind it, where it has counted.
            self.deferred = max(1, self._grows)
            self.carried.steps_behind = self.core.position.steps + 1
            return
        super().on_advance_end(data_fetcher)
        self._batches_that_stepped += self._grows - 1

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        trainer: Any = self.trainer
        if not self._should_check_val_epoch():
            return False
        if trainer._val_check_time_interval is not None:
            return bool(trainer.strategy.broadcast(super()._should_check_val_fx(data_fetcher)))
        every = trainer.val_check_batch
        if self.exhausted and every == math.inf:
            return True
        if every == math.inf or (trainer.should_stop and trainer.fit_loop._can_stop_early):
            return bool(super()._should_check_val_fx(data_fetcher))
        whole = trainer.check_val_every_n_epoch is None
        before = self.total_before if whole else self.batches_before
        behind = self.batch_progress.total.ready if whole else self.batch_progress.current.ready
        return bool(behind // every > before // every)

    # ------------------------------------------------------------------ behind the last step

    def _end_of_data(self, fetcher: StepFetcher) -> None:
        """Do what Lightning does with an epoch's last batch, and could not do before that step had counted.

        A replica that comes in at this very place has trained nothing of the epoch, and does what the others do.
        """
        self.carried.end_step()
        self.exhausted = self.batch_progress.is_last_batch = True
        self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._ends = not self.deferred
        try:
            if self._ends:
                # Nobody knew that the step was the last one.
                self._batches_that_stepped -= 1
                super().on_advance_end(fetcher)
            else:
                self._do_what_follows(fetcher)
        finally:
            self._ends = False

    def _do_what_follows(self, fetcher: StepFetcher) -> None:
        steps, self.deferred = self.deferred, 0
        super().on_advance_end(fetcher)
        self._batches_that_stepped += steps - 1


def metrics_of_all_samples(module: Any) -> Callable[[], None]:
    """Have the module's metrics ask no other replica, which has seen the same; returns what undoes it."""
    from torchmetrics import Metric

    before = [(each, each.distributed_available_fn) for each in module.modules() if isinstance(each, Metric)]
    for metric, _ in before:
        metric.distributed_available_fn = lambda: False

    def undo() -> None:
        for metric, available in before:
            metric.distributed_available_fn = available

    return undo


def reset_metrics(module: Any) -> None:
    from torchmetrics import Metric

    for each in module.modules():
        if isinstance(each, Metric):
            each.reset()
