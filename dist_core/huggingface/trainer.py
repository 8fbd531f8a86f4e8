"""ElasticTrainerMixin: a trainer of Hugging Face's whose replicas come and go.

The trainer's own loop stays where it can: its set-up, its callbacks, its losses, its checkpoints. What is replaced is
what counts by the number of processes: batches come from an ``AdaptiveDataLoader``, gradients are summed by an
``AdaptiveDataParallel``, an epoch is the trial's, and ``global_step`` follows from the samples that were trained. One
step is as many samples as ``per_device_train_batch_size * gradient_accumulation_steps`` of one process, however many
replicas compute it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, cast

import torch
from transformers import TrainerCallback

from dist_core.errors import InvalidTraining
from dist_core.gradients.noise.estimator import SPARSE_EVERY
from dist_core.hooks import tell_metrics
from dist_core.huggingface.alone import appear_alone, processes_started, reducer_options
from dist_core.huggingface.carried import CarriedState
from dist_core.huggingface.data import TrainingPass, loader_like, refuse_another_loader
from dist_core.huggingface.shared_evaluation import SharedEvaluationMixin
from dist_core.training.accumulator import Accumulator
from dist_core.training.api import remaining_epochs_until
from dist_core.training.loader import AdaptiveDataLoader
from dist_core.training.model import AdaptiveDataParallel
from dist_core.training.others_loop import BatchWord, UserSteps, check_batch_word, use_batch_word
from dist_core.trial.current import get_core, reset_core

_STATE = "hugging-face-trainer"
"""Among the states of the trial."""


class ElasticTrainerMixin(SharedEvaluationMixin):
    """Before a trainer in the bases of a class; ``elastic`` makes one.

    ``batch``: ``"fixed"`` keeps the batch that the arguments give, whatever the number of replicas; ``"adaptive"`` lets
    it follow goodput, up to 32 times that, and a number up to so many examples. ``frozen="rebuild"`` leaves weights
    that need no gradient out of checkpoints and hand-overs, because every replica loads the same ones; None does so for
    adapters (PEFT) beside a model that was loaded by name.

    Raises InvalidTraining for arguments that ask for another way to train on several devices, and for a version of
    transformers that is too old.
    """

    is_elastic = True

    def __init__(
        self,
        *arguments: Any,
        batch: BatchWord = "fixed",
        frozen: Literal["keep", "rebuild"] | None = None,
        **options: Any,
    ) -> None:
        check_batch_word(batch)
        refuse_old_trainer(type(self))
        refuse_own_batches(type(self))
        self._core = get_core()
        self._batch = batch
        self._frozen = frozen
        self._elastic: Any = None
        self._unheard: Any = None
        """Inputs of the pass whose loss is not in the sums yet."""
        self._updated: tuple[Any, Any] | None = None
        """The gradient's norm and the learning rate of the step that runs, once its update is made."""
        self._collected: float | None = None
        """The loss that was logged in the step that runs."""
        self._epochs: Iterator[int] = iter(())
        self._epoch: int | None = None
        self._processes = 1
        cast("Any", super()).__init__(*arguments, **options)
        me = self._me
        refuse_arguments(me.args)
        refuse_placement(me)
        me.args._n_gpu = min(1, me.args.n_gpu)
        me.add_callback(Reporting)

    def create_accelerator_and_postprocess(self) -> None:
        # What Accelerate knows is made as the arguments say, which settle their device with it.
        _ = self._me.args.device
        self._processes = processes_started()
        appear_alone()
        cast("Any", super()).create_accelerator_and_postprocess()

    def _show_rank(self) -> None:
        state = self._me.state
        state.is_world_process_zero = state.is_local_process_zero = self._me.is_world_process_zero()

    # ------------------------------------------------------------------ data

    @property
    def _total_batch(self) -> int:
        args = self._me.args
        return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * self._processes)

    def get_train_dataloader(self) -> Any:
        return self._shared_batches(cast("Any", super()).get_train_dataloader())

    def _shared_batches(self, theirs: Any) -> TrainingPass:
        """Return the elastic pass over a loader's samples; raise InvalidTraining for what replicas cannot share."""
        args, most = self._me.args, self._me.args.per_device_train_batch_size
        refuse_another_loader(theirs, args)
        accumulates = args.gradient_accumulation_steps > 1
        loader = loader_like(
            theirs,
            args,
            self._total_batch,
            shuffles=True,
            drop_last=args.dataloader_drop_last,
            most=most if accumulates else None,
        )
        use_batch_word(loader, self._batch)
        samples = loader.source.num_samples
        batches = None
        if samples is not None:
            whole, rest = divmod(samples, most * self._processes)
            batches = max(1, whole + (rest > 0 and not args.dataloader_drop_last))
        return TrainingPass(loader, batches)

    # ------------------------------------------------------------------ before the first epoch

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not training:
            return cast("Any", super())._wrap_model(model, training=False)
        me = self._me
        # That of a training that failed.
        vars(me).pop("create_scheduler", None)
        # On the optimizer itself: what Accelerate puts around it takes no part in the trial.
        me.create_scheduler(num_training_steps=self._steps, optimizer=me.optimizer)
        me.create_scheduler = self._schedule_that_is_there
        inside = me.accelerator.prepare_model(me.model, device_placement=False, evaluation_mode=True)
        self._elastic = AdaptiveDataParallel(
            inside,
            me.optimizer,
            me.lr_scheduler,
            me.accelerator.scaler,
            frozen=self._what_of_frozen(),
            # Nothing is decided by the noise scale of a batch that stays as it is.
            noise_every=SPARSE_EVERY if self._batch == "fixed" else None,
            **reducer_options(me.accelerator),
        )
        return self._elastic

    def _schedule_that_is_there(self, *args: Any, **kwargs: Any) -> Any:
        """Stand for the next ``create_scheduler``: a subclass's own would make another one, in no checkpoint."""
        del self._me.create_scheduler
        return self._me.lr_scheduler

    def _what_of_frozen(self) -> Literal["keep", "rebuild"]:
        if self._frozen is not None:
            return self._frozen
        model = self._me.accelerator.unwrap_model(self._me.model)
        named = bool(getattr(getattr(model, "config", None), "_name_or_path", None))
        return "rebuild" if named and hasattr(model, "peft_config") else "keep"

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: Any, trial: Any
    ) -> tuple[int, int]:
        me = self._me
        self._begin_training()
        self._steps = max_steps
        self._steps_per_epoch = num_update_steps_per_epoch
        cast("Any", super())._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial
        )
        self._show_rank()
        # Where the trial stands is read by the states that preparing makes.
        self._prepared = cast("Any", super())._prepare_for_training(max_steps, self._training, resume)
        self._user_steps = UserSteps(self._core, self._training.loader, self._total_batch, self._steps_per_epoch)
        self._sums = Accumulator()
        self._carried = CarriedState(self, lambda: self._core.position.steps)
        me._tr_loss = torch.tensor(0.0, device=me.args.device)
        me._total_loss_scalar, me._globalstep_last_logged = 0.0, me.state.global_step
        me._initial_global_step = me.state.global_step
        if me.state.global_step and not self._core.position.steps:
            self._stand_at(me.state.global_step, resume)
        self._core.registry.register(_STATE, self._carried)
        self._core.epochs.refuse_extension("num_train_epochs")
        self._epochs = remaining_epochs_until(num_train_epochs)
        self._epoch = next(self._epochs, None)
        # The trainer sets these when it begins; of a trial that has trained they are known.
        self._begun_with: dict[str, Any] | None = self._carried.small()
        return (num_train_epochs if self._epoch is None else self._epoch), 0

    def _begin_training(self) -> None:
        """Begin a training; outside of a trial one may follow another, each in a core of its own."""
        if self._elastic is not None:
            raise InvalidTraining(
                "train() was called twice on one elastic trainer; give it all epochs at once, with num_train_epochs or "
                "max_steps, or make a new trainer"
            )
        core = self._core = get_core()
        if core.registry.has(_STATE):
            if core.environment is not None or core.generation.group.world_size > 1:
                raise InvalidTraining(
                    "a second trainer was started in one trial; a trial trains its epochs once, because replicas "
                    "that join must find the place in the code where the others are. Run each training in a trial "
                    "of its own"
                )
            reset_core()
            self._core = get_core()

    def _prepare_for_training(self, *_: Any, **__: Any) -> Any:
        return self._prepared

    def set_initial_training_values(self, args: Any, dataloader: Any, *others: Any) -> Any:
        # A class derived from this one may make its own.
        self._training = dataloader if isinstance(dataloader, TrainingPass) else self._shared_batches(dataloader)
        return cast("Any", super()).set_initial_training_values(args, self._training, *others)

    def _stand_at(self, step: int, resume: Any) -> None:
        """Begin the trial where the trainer goes on from a checkpoint of its own; the trial has none."""
        loader: AdaptiveDataLoader = self._training.loader
        epoch, within = divmod(step, self._steps_per_epoch)
        progress = float(epoch * (loader.epoch_size or 0) + within * self._total_batch)
        self._core.position.stand_at(epoch=epoch, steps=step, progress=progress)
        loader.cursor.passes, loader.cursor.position = epoch, within * self._total_batch
        self._me._load_rng_state(resume)

    # ------------------------------------------------------------------ an epoch

    def _run_epoch(
        self,
        model: Any,
        epoch: int,
        train_dataloader: Any,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
        start_time: float = 0.0,
        **_: Any,
    ) -> None:
        me = self._me
        if self._epoch is not None and epoch > self._epoch:
            self._epoch = next(self._epochs)
        self._go_on_as_begun()
        grad_norm = rate = None
        me.current_gradient_accumulation_steps = 1
        for inputs in train_dataloader:
            if self._core.passes_do_not_count:
                self._dry_pass(model, inputs)
                continue
            if self._is_first_pass:
                self._begin_step()
                me.control = me.callback_handler.on_step_begin(me.args, me.state, me.control)
            self._pass(model, inputs)
            if not self._elastic.is_last_micro_batch:
                me.control = me.callback_handler.on_substep_end(me.args, me.state, me.control)
                continue
            grad_norm = me._clip_grad_norm(model) if me.args.max_grad_norm > 0 else None
            grad_norm = me._get_grad_norm(model, grad_norm=grad_norm)
            me.control = me.callback_handler.on_pre_optimizer_step(me.args, me.state, me.control)
            me.optimizer.step()
            me.control = me.callback_handler.on_optimizer_step(me.args, me.state, me.control)
            rate = me._get_learning_rate()
            if self._updated is None and self._core.broken is None:
                self._updated = grad_norm, rate
            elif self._updated is not None:
                # A replica was lost behind this step's update: the body runs again, and the update is not made twice.
                grad_norm, rate = self._updated
            self._step_schedule()
            model.zero_grad()
            self._end_step(epoch)
            me._maybe_log_save_evaluate(
                me._tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=rate
            )
            if self._stops_within_epoch(epoch):
                break
        self._leave_step()
        me.control = me.callback_handler.on_epoch_end(me.args, me.state, me.control)
        me._maybe_log_save_evaluate(
            me._tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=rate
        )

    def _go_on_as_begun(self) -> None:
        """Restore the counts of a trial that has trained: the trainer has begun them anew."""
        if self._begun_with is not None:
            self._carried.take(self._begun_with)
            self._begun_with = None

    @property
    def _is_first_pass(self) -> bool:
        return bool(self._elastic.part.step_place.index == 0)

    def _dry_pass(self, model: Any, inputs: Any) -> None:
        """Run one uncounted pass, which makes what a joiner receives into."""
        me = self._me
        me.training_step(model, inputs, me._get_num_items_in_batch([inputs], me.args.device))
        if me.args.max_grad_norm > 0:
            me._clip_grad_norm(model)
        me.optimizer.step()
        model.zero_grad()

    def _begin_step(self) -> None:
        self._show_rank()
        self._leave_step()
        self._carried.begin_step()
        self._items: Any = None

    def _leave_step(self) -> None:
        if self._carried.end_step():
            self._updated = self._collected = None

    def _items_of_step(self) -> Any:
        """Return what this pass divides a loss that is a sum over tokens by, so that passes and replicas add up.

        The gradient of a pass counts with its share of the step's samples, so its sum over all tokens of the step is
        multiplied with the inverse of that.
        """
        me, place = self._me, self._elastic.part.step_place
        if self._is_first_pass:
            mine = me._get_num_items_in_batch(self._training.loader.batches_of_step, me.args.device)
            self._items = None if mine is None else self._sum_of_step(float(mine) * (place.step.weight > 0))
        if self._items is None:
            return None
        place.denominator = self._items * (place.share if place.step.weight else 1.0)
        return torch.tensor(place.denominator, dtype=torch.float32, device=me.args.device)

    def _sum_of_step(self, amount: float) -> float:
        if self._core.generation.group.world_size == 1:
            return amount

        def act(group: Any) -> float:
            [total] = group.sum_of(amount, what="items of a step")
            return float(total)

        return self._core.together(act, otherwise=lambda: max(amount, 1.0))

    def _pass(self, model: Any, inputs: Any) -> None:
        self._unheard = inputs
        loss = self._me.training_step(model, inputs, self._items_of_step())
        if self._unheard is not None:
            self._hear(loss)

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        unheard = self._unheard
        result = cast("Any", super()).compute_loss(model, inputs, *arguments, **options)
        loss = result[0] if isinstance(result, tuple) else result
        if unheard is not None and loss.device.type == "cpu":
            # What is added before the backward pass rides in the step's own round, and is lost with no replica. A GPU
            # would have to be waited for.
            self._hear(loss)
        return result

    def _hear(self, loss: torch.Tensor) -> None:
        """Add the pass to the sums over replicas that the trainer logs."""
        me, place, inputs = self._me, self._elastic.part.step_place, self._unheard
        self._unheard = None
        if not place.step.weight:
            return
        value = float(loss.detach())
        if not me.args.logging_nan_inf_filter or math.isfinite(value):
            self._sums["loss"] += value * place.share * self._step_growth()
            self._sums["weight"] += place.share * self._step_growth()
        self._sums["flos"] += float(me.floating_point_ops(inputs))
        before = me.state.num_input_tokens_seen
        me._track_num_input_tokens(inputs)
        self._sums["tokens"] += me.state.num_input_tokens_seen - before
        me.state.num_input_tokens_seen = before

    def _step_growth(self) -> int:
        """Return by how many of the user's steps this one advances ``global_step``: 1 with a fixed batch."""
        return max(1, self._step_after() - int(self._me.state.global_step))

    def _step_after(self) -> int:
        """Return ``global_step`` after the present step, in steps of the user's batch."""
        position = self._core.position
        within = self._user_steps.of_epoch_behind(self._elastic.part.step_place)
        return int(position.steps) + 1 if within is None else position.epoch * self._steps_per_epoch + within

    def _step_schedule(self) -> None:
        me = self._me
        waits = isinstance(me.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if not waits and type(me.lr_scheduler).__name__ != "GreedyLR" and not me.accelerator.optimizer_step_was_skipped:
            me.lr_scheduler.step()

    def _end_step(self, epoch: int) -> None:
        me, before = self._me, int(self._me.state.global_step)
        after = max(before, self._step_after())
        me.state.global_step = after
        me.state.epoch = epoch + self._part_of_epoch(after - epoch * self._steps_per_epoch)
        me.control = me.callback_handler.on_step_end(me.args, me.state, me.control)
        if after == before:
            # What is due at that step has been done.
            me.control.should_log = me.control.should_evaluate = me.control.should_save = False
        elif after - before > 1:
            self._heed_steps_passed(before, after)

    def _part_of_epoch(self, steps: int) -> float:
        """Return the part of an epoch that so many steps are, counted by micro-batches as the trainer does."""
        try:
            batches = len(self._training)
        except TypeError:
            return steps / self._steps_per_epoch
        return min(steps * int(self._me.args.gradient_accumulation_steps), batches) / batches

    def _heed_steps_passed(self, before: int, after: int) -> None:
        """Do what is due every so many steps where a large batch steps past the very step."""
        args, state, control = self._me.args, self._me.state, self._me.control

        def passed(every: int) -> bool:
            return every > 0 and after // every > before // every

        if args.logging_strategy == "steps" and passed(state.logging_steps):
            control.should_log = True
        if args.eval_strategy == "steps" and passed(state.eval_steps) and args.eval_delay <= after:
            control.should_evaluate = True
        if args.save_strategy == "steps" and passed(state.save_steps):
            control.should_save = True

    def _stops_within_epoch(self, epoch: int) -> bool:
        control, state = self._me.control, self._me.state
        if self._core.broken is not None or not (control.should_epoch_stop or control.should_training_stop):
            return False
        # At its end the loop ends by itself.
        return bool(state.global_step < (epoch + 1) * self._steps_per_epoch)

    # ------------------------------------------------------------------ what the trainer writes

    def _maybe_log_save_evaluate(self, tr_loss: Any, *arguments: Any, **options: Any) -> None:
        me = self._me
        if self._core.passes_do_not_count:
            return
        if me.control.should_log and me.state.global_step > me._globalstep_last_logged:
            self._collect()
        cast("Any", super())._maybe_log_save_evaluate(me._tr_loss, *arguments, **options)

    def _collect(self) -> None:
        """Put the sums over replicas where the trainer keeps its own."""
        me = self._me
        with self._sums.synchronized() as sums:
            # Over the passes that were heard of: a lost replica may have taken some with it.
            steps, weight = me.state.global_step - me._globalstep_last_logged, sums.get("weight", 0.0)
            loss = sums.get("loss", 0.0) / weight * steps if weight else 0.0
            if self._collected is None and self._core.broken is None:
                self._collected = loss
            me._tr_loss.fill_(loss if self._collected is None else self._collected)
            me.current_flos = sums.get("flos", 0.0)
            me.state.num_input_tokens_seen += int(sums.get("tokens", 0.0))
            for name in ("loss", "weight", "flos", "tokens"):
                sums[name] = 0.0

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint; the other replicas look at what the first one writes, so they wait for it."""
        save = cast("Any", super())._save_checkpoint
        if self._me.args.should_save:
            save(model, trial)
        if not self._core.generation.stands_alone:
            self._core.together(lambda group: group.sum(torch.zeros(1), what="a checkpoint"), otherwise=lambda: None)
        if not self._me.args.should_save:
            save(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        if self._me.args.should_save:
            cast("Any", super())._save_rng_state(output_dir)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        me = self._me
        if me.control.should_training_stop and hasattr(self._epochs, "close"):
            self._epochs.close()
        else:
            next(self._epochs, None)
        self._go_on_as_begun()
        self._collect()
        return cast("Any", super())._finalize_training(trial, num_train_samples, start_time)


@cache
def elastic(trainer: type) -> Any:
    """Make a trainer class elastic: ``elastic(SFTTrainer)(model=..., args=..., train_dataset=...)``.

    Raises InvalidTraining for what is no trainer of Hugging Face's, and for a version that is too old.
    """
    import transformers

    theirs: Any = transformers.Trainer
    if not (isinstance(trainer, type) and issubclass(trainer, theirs)):
        raise InvalidTraining(f"elastic() was given {trainer!r}; it takes a subclass of transformers.Trainer")
    if issubclass(trainer, ElasticTrainerMixin):
        return trainer
    refuse_old_trainer(trainer)
    refuse_own_batches(trainer)
    return type(f"Elastic{trainer.__name__}", (ElasticTrainerMixin, trainer), {"__doc__": trainer.__doc__})


class Reporting(TrainerCallback):
    """Tells the trial's search how each evaluation went. Raises what ends the trial, when it is pruned."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        numbers = {name: float(value) for name, value in (metrics or {}).items() if isinstance(value, (int, float))}
        by_epochs = str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "epoch"
        step = round(state.epoch) if by_epochs else state.global_step * (state.train_batch_size or 1)
        if get_core().position.in_epoch_loop:
            tell_metrics(numbers, step=step, chosen=args.metric_for_best_model)


_NEEDED = ("_init_training_state", "_prepare_for_training", "_run_epoch", "_finalize_training")
OLDEST_TRANSFORMERS = "5.3"


def refuse_old_trainer(trainer: type) -> None:
    missing = [name for name in _NEEDED if not hasattr(trainer, name)]
    if missing:
        import transformers

        raise InvalidTraining(
            f"transformers {transformers.__version__} is too old for an elastic {trainer.__name__}, which needs its "
            f"{missing[0]}(); install transformers>={OLDEST_TRANSFORMERS}"
        )


def refuse_own_batches(trainer: type) -> None:
    """Refuse trainers of TRL that generate what they train on (GRPO, RLOO, online distillation)."""
    if hasattr(trainer, "_generate_and_score_completions"):
        name = next((each.__name__ for each in trainer.__mro__ if each.__module__.startswith("trl.")), trainer.__name__)
        raise InvalidTraining(
            f"{name} generates its samples in groups and divides them among processes itself; an elastic trainer "
            f"divides each batch among its replicas, which would split these groups. Use TRL's {name} as it is, in "
            "trials of one replica (max_replicas=1)"
        )


def refuse_arguments(arguments: Any) -> None:
    """Refuse arguments (transformers' TrainingArguments) that an elastic trainer cannot follow."""
    for asked, what in ((arguments.deepspeed, "deepspeed"), (arguments.fsdp, "fsdp")):
        if asked:
            raise InvalidTraining(
                f"TrainingArguments has {what}={asked!r}; an elastic trainer divides the work among replicas itself. "
                "Leave it out; for a model that does not fit on one slot, use dist_core.ElasticModel"
            )
    if arguments.auto_find_batch_size:
        raise InvalidTraining(
            "TrainingArguments has auto_find_batch_size=True; a trial that runs out of memory lowers its batch size "
            "itself. Leave it out"
        )


def refuse_placement(trainer: Any) -> None:
    """Refuse a trainer whose model lies on devices that the trial did not give it."""
    if trainer.is_model_parallel:
        raise InvalidTraining(
            f"the model is on several devices, or not on {trainer.args.device} (its hf_device_map is "
            f"{trainer.model.hf_device_map}); each replica of an elastic trainer trains on its own device. Load the "
            "model without device_map"
        )
