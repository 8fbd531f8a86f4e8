"""ElasticStrategy: Lightning's trainer in a trial whose replicas come and go.

For Lightning each replica is a process on its own device; which one writes for all it hears from the trial. Gradients
are summed where Lightning makes its backward passes, data and loops are the trial's from the moment that fit begins.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from dist_core.errors import InvalidTraining
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.noise.estimator import SPARSE_EVERY
from dist_core.gradients.optimizers import parameters_of
from dist_core.hooks import tell_metrics
from dist_core.lightning.data import TrainingBatches
from dist_core.lightning.epoch_loop import STATE, ElasticEpochLoop, metrics_of_all_samples
from dist_core.lightning.fit_loop import ElasticFitLoop, ElasticLoggerConnector, ElasticValidationLoop
from dist_core.lightning.package import (
    STRATEGY,
    Callback,
    ClusterEnvironment,
    SingleDeviceStrategy,
    TrainerFn,
    _DataConnector,
    rank_zero,
)
from dist_core.lightning.refusals import refuse_old_lightning, refuse_trainer
from dist_core.link.environment import standalone_world
from dist_core.preparation.claims import Claims
from dist_core.training.loader import AdaptiveDataLoader
from dist_core.training.model import AdaptiveDataParallel
from dist_core.training.others_loop import BatchWord, check_batch_word, elastic_like, use_batch_word
from dist_core.trial.current import get_core, reset_core
from dist_core.trial.replica import Replica

T = TypeVar("T")


class ElasticStrategy(SingleDeviceStrategy):
    """Strategy that trains a LightningModule as an elastic trial.

    ``batch``: "fixed" keeps the script's batch size at any number of replicas; "adaptive" lets it follow goodput, up to
    32 times that; a number is the largest batch size. Further options go to ``AdaptiveDataParallel``.

    Raises InvalidTraining for what cannot be trained so.
    """

    strategy_name = STRATEGY

    def __init__(
        self,
        *,
        batch: BatchWord = "fixed",
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        check_batch_word(batch)
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.cluster_environment = ElasticEnvironment()
        self.parallel_devices: list[torch.device] | None = None
        self._layer_sync: Any = None
        self._batch = batch
        self._options = options
        self._wrapped: list[AdaptiveDataParallel] = []
        self._meets = True

    # ------------------------------------------------------------------ which process this is

    def set_world_ranks(self) -> None:
        """Set what Lightning's helpers ask that do something on the first process only."""
        self._show_rank()
        get_core().life.on_entering(self._show_rank)

    def _show_rank(self) -> None:
        setattr(rank_zero.rank_zero_only, "rank", self.global_rank)  # noqa: B010  # a function's

    @property
    def global_rank(self) -> int:
        return get_core().shown_rank

    @global_rank.setter
    def global_rank(self, rank: int) -> None:
        """Do nothing: the trial sets the rank."""

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        if not self.parallel_devices:
            return self._root_device
        return self.parallel_devices[int(os.environ.get("LOCAL_RANK", "0")) % len(self.parallel_devices)]

    # ------------------------------------------------------------------ before training

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        self.lightning_module.trainer._data_connector.__class__ = ElasticDataConnector

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if self._layer_sync is None:
            return model
        if self.root_device.type == "cpu":
            raise InvalidTraining("sync_batchnorm=True needs GPUs, as torch's SyncBatchNorm does; leave it out on CPUs")
        synchronized: torch.nn.Module = self._layer_sync.apply(model)
        return synchronized

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        core = _core_of_fit()
        refuse_old_lightning(trainer.fit_loop.epoch_loop)
        refuse_trainer(trainer, in_trial=core.environment is not None)
        super().setup(trainer)
        assert self.lightning_module is not None
        automatic = self.lightning_module.automatic_optimization
        if not any(isinstance(each, Reporting) for each in trainer.callbacks):
            trainer.callbacks.append(Reporting())
        trainer.fit_loop.__class__ = ElasticFitLoop
        trainer.fit_loop.epoch_loop.__class__ = ElasticEpochLoop
        trainer.fit_loop.epoch_loop.val_loop.__class__ = ElasticValidationLoop
        trainer._logger_connector.__class__ = ElasticLoggerConnector
        schedules = [each.scheduler for each in self.lr_scheduler_configs]
        options: dict[str, Any] = {"noise_every": SPARSE_EVERY} if self._batch == "fixed" else {}
        options.update(self._options)
        self._wrapped = [
            AdaptiveDataParallel(
                part,
                optimizers,
                [each for each in schedules if getattr(each, "optimizer", optimizers[0]) in optimizers] or None,
                getattr(self.precision_plugin, "scaler", None),
                **options,
            )
            for part, optimizers in trained_parts(self.lightning_module, self.optimizers)
        ]
        trainer.fit_loop.setup_data()
        if trainer.fit_loop._combined_loader is not None:
            batches = trainer.fit_loop._combined_loader.flattened[0]
            passes = trainer.accumulate_grad_batches if automatic else 1
            trainer.fit_loop.epoch_loop.begin(core, self._wrapped[0], batches, passes)

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return dataloader
        processes = standalone_world()[1] if get_core().environment is None else 1
        passes = trainer.accumulate_grad_batches if self.lightning_module.automatic_optimization else 1
        if isinstance(dataloader, AdaptiveDataLoader):
            return TrainingBatches(dataloader, dataloader.batch_size)
        if not isinstance(dataloader, DataLoader):
            raise InvalidTraining(
                f"fit was given a {type(dataloader).__name__} to train on; it needs a torch.utils.data.DataLoader, "
                "whose samples the replicas share"
            )
        loader = elastic_like(dataloader, AdaptiveDataLoader, whom="fit", processes=processes, passes=passes)
        use_batch_word(loader, self._batch)
        return TrainingBatches(loader, loader.batch_size // passes)

    # ------------------------------------------------------------------ training

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        expected = None if len(self._wrapped) == 1 else reached(closure_loss)
        for wrapped in self._wrapped:
            weights = [] if expected is None else [each for each in wrapped.parameters() if each.requires_grad]
            met = expected is None or sum(id(each) in expected for each in weights)
            if not met:
                continue
            if expected is not None and met < len(weights) and not wrapped.find_unused_parameters:
                raise InvalidTraining(
                    f"a backward pass computes gradients for {met} of the {len(weights)} weights that one optimizer "
                    "trains, and replicas would wait for the others. Set "
                    "strategy=ElasticStrategy(find_unused_parameters=True)"
                )
            closure_loss = wrapped(closure_loss)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def on_validation_start(self) -> None:
        self._restore_metrics = metrics_of_all_samples(self.lightning_module)

    def on_validation_end(self) -> None:
        self._restore_metrics()

    on_test_start = on_validation_start
    on_test_end = on_validation_end

    # ------------------------------------------------------------------ what replicas do together

    @contextmanager
    def without_meeting(self) -> Iterator[None]:
        """Let this process do for itself what Lightning has all processes do together."""
        before, self._meets = self._meets, False
        try:
            yield
        finally:
            self._meets = before

    def _together(self, action: Callable[[ReplicaGroup], T], alone: T) -> T:
        """Run a collective; return ``alone`` for one replica, and for a step that does not count."""
        core = get_core()
        if not self._meets or not core.joined or core.generation.stands_alone or core.passes_do_not_count:
            return alone
        return core.together(action, otherwise=lambda: alone)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(getattr(reduce_op, "name", reduce_op) or "sum").lower()
        if name not in ("mean", "avg", "sum"):
            raise InvalidTraining(f"reduce_op is {reduce_op!r}; it must be 'mean', 'avg' or 'sum'")

        def act(group: ReplicaGroup) -> torch.Tensor:
            total = tensor.detach().to("cpu", torch.float64).flatten()
            group.sum(total, what="a tensor of the training code")
            scale = 1.0 if name == "sum" else 1.0 / group.world_size
            return (total * scale).reshape(tensor.shape).to(tensor.device, tensor.dtype)

        return self._together(act, tensor)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Gather a tensor from all replicas in a new first dimension; outside a trial, return it as it is."""
        if sync_grads:
            raise InvalidTraining(
                "all_gather was called with sync_grads=True; gradients do not flow from one replica to another, "
                "because their number changes. Leave it out, or compute the loss from each replica's own samples"
            )

        def act(group: ReplicaGroup) -> torch.Tensor:
            shapes = group.gather_json(list(tensor.shape))
            if any(shape != shapes[0] for shape in shapes):
                raise InvalidTraining(
                    f"all_gather was given tensors of different shapes on the replicas ({shapes}), because replicas "
                    "get different numbers of samples. Sum the value instead, with a dist_core.Accumulator or "
                    "self.log"
                )
            rows = torch.zeros((group.world_size, tensor.numel()), dtype=torch.float64)
            rows[group.rank] = tensor.detach().to("cpu", torch.float64).flatten()
            group.sum(rows.view(-1), what="a tensor of the training code")
            return rows.reshape(group.world_size, *tensor.shape).to(tensor.device, tensor.dtype)

        return self._together(act, tensor if get_core().environment is None else tensor[None])

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Broadcast an object that JSON can hold: paths, flags and numbers."""
        return self._together(lambda group: group.broadcast_json(obj, source=src), obj)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        named = args[0] if args else kwargs.get("name")
        # Lightning's own are for processes that start together, but for the one behind a checkpoint.
        if named in (None, "Trainer.save_checkpoint"):
            self._together(lambda group: group.sum(torch.zeros(1), what="a barrier"), None)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # Lightning's name
        def act(group: ReplicaGroup) -> bool:
            [votes] = group.sum_of(float(decision), what="a decision")
            return round(votes) == group.world_size if all else bool(votes)

        return self._together(act, bool(decision))


def _core_of_fit() -> Replica:
    """Outside of a trial one fit may follow another, each in a core of its own."""
    core = get_core()
    if core.registry.has(STATE):
        if core.environment is not None or core.generation.group.world_size > 1:
            raise InvalidTraining(
                "fit was called a second time in one trial; a trial trains its epochs once, because replicas that "
                "join must find the place in the code where the others are. Run each fit in a trial of its own"
            )
        reset_core()
    return get_core()


class Reporting(Callback):
    """Tells the trial's search how each validation went. Raises what ends the trial, when it is pruned."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking or not get_core().position.in_epoch_loop:
            return
        loop = trainer.fit_loop.epoch_loop
        names = {each.meta.name for each in loop.val_loop._results.values() if each.meta.on_epoch}
        numbers = {name: float(value) for name, value in trainer.callback_metrics.items() if name in names}
        step = trainer.current_epoch + 1 if loop.exhausted else trainer.global_step * loop.samples_of_step
        tell_metrics(numbers, step=step, chosen=_monitored(trainer, names))


def _monitored(trainer: Any, names: set[str]) -> str | None:
    """Return the one metric that the user's callbacks look at."""
    looked_at = {getattr(each, "monitor", None) for each in trainer.callbacks} & names
    return looked_at.pop() if len(looked_at) == 1 else None


class Trained(nn.Module):
    """The whole module, or, where optimizers train parts of it, one part, with tensors by their names."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__()
        self.module = module

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def _get_name(self) -> str:
        return type(self if self.module is None else self.module).__name__


def trained_parts(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> list[tuple[Trained, list[torch.optim.Optimizer]]]:
    """Return the parts of the module and what trains each; optimizers with a weight in common train one part.

    All that no optimizer trains is in the first part.
    """
    groups = _with_common_weights(optimizers)
    if len(groups) == 1:
        return [(Trained(module), groups[0])]
    owner = {weight: index for index, group in enumerate(groups) for each in group for weight in _weights_of(each)}
    parts = [Trained() for _ in groups]
    for name, parameter in module.named_parameters():
        parts[owner.get(id(parameter), 0)].register_parameter(name.replace(".", "-"), parameter)
    kept = set(module.state_dict())
    for name, buffer in module.named_buffers():
        parts[0].register_buffer(name.replace(".", "-"), buffer, persistent=name in kept)
    return list(zip(parts, groups, strict=True))


def _with_common_weights(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[torch.optim.Optimizer]]:
    groups: list[list[torch.optim.Optimizer]] = []
    for optimizer in optimizers:
        shared = [group for group in groups if any(_weights_of(each) & _weights_of(optimizer) for each in group)]
        groups = [group for group in groups if group not in shared] + [[*chain(*shared), optimizer]]
    return sorted(groups, key=lambda group: optimizers.index(group[0]))


def _weights_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for parameter in parameters_of(optimizer)}


def reached(loss: torch.Tensor) -> set[int]:
    """Identities of the parameters that a backward pass from here gives gradients to."""
    seen, variables = set(), set()
    waiting: list[object] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            variables.add(id(variable))
        following: Iterable[tuple[object, int]] = getattr(node, "next_functions", ())
        waiting.extend(each for each, _ in following)
    return variables


LOOK_SECONDS = 0.1


class ElasticDataConnector(_DataConnector):
    def prepare_data(self) -> None:
        environment = get_core().environment
        if environment is None:
            super().prepare_data()
            return
        folder = environment.checkpoint_dir
        folder.mkdir(parents=True, exist_ok=True)
        name = f"lightning-data-{socket.gethostname()}"
        done, claims = folder / f"{name}.done", Claims(folder)
        while not done.exists():
            with claims.holding(name) as mine:
                if mine and not done.exists():
                    self._prepare(done)
                    return
            time.sleep(LOOK_SECONDS)

    def _prepare(self, done: Path) -> None:
        trainer: Any = self.trainer
        # Lightning would make a process group to wait in, of replicas that have not met.
        for each in (trainer.datamodule, trainer.lightning_module):
            if each is not None:
                each.prepare_data()
        done.touch()


class ElasticEnvironment(ClusterEnvironment):
    """Lightning's view of its cluster: others start the replicas, and Lightning connects none of them."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return get_core().environment is not None

    def world_size(self) -> int:
        """1: what replicas do together is the trial's."""
        return 1

    def set_world_size(self, size: int) -> None:
        """Do nothing: the scheduler sets the world size."""

    def global_rank(self) -> int:
        return get_core().shown_rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the trial sets the rank."""

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return 0
