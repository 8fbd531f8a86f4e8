"""ElasticFullyShard: torch's fully_shard over the processes of a replica, data parallel between replicas.

Each process has its own examples and a part of every weight; whole ones are gathered for as long as they are used, and
gradients are summed to the part that they belong to (ZeRO, Rajbhandari et al., SC'20; FSDP, Zhao et al., VLDB'23). The
processes of a replica stay the same, so its mesh does: survivors keep their shards while replicas come and go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dist_core.device import device_of, limit_memory
from dist_core.errors import InvalidTraining
from dist_core.generations.model_parallel import losing_the_replica
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.checks import refuse_what_cannot_be_trained
from dist_core.gradients.learning_rate import ScalingRule
from dist_core.gradients.step_place import StepPlace
from dist_core.larger.choice import settle_layout
from dist_core.larger.divided_state import DividedState, Held, gathered, held_shard, held_whole, names_of_shared
from dist_core.larger.part_passes import PartPasses
from dist_core.larger.part_sums import PartSums
from dist_core.larger.stages import blocks_of, recompute_in, train_in_place_of
from dist_core.layout import SHARDED
from dist_core.link.environment import gpu_share
from dist_core.torch_private import all_gather_single, mesh_of, reduce_scatter_single, sums_its_own_parameters
from dist_core.training.wrapped_model import MeasuredModel, WrappedModel, as_list, measurements_of, schedules_in
from dist_core.trial.current import get_core
from dist_core.trial.replica import Replica


class ElasticFullyShard(MeasuredModel, nn.Module):
    """Wrap a model and its optimizer for elastic training with weights sharded over the slots of a replica.

    The training loop is an ordinary one. All processes of a replica have to come by the model equally often, also in
    evaluations: these give each of them the same samples. A trial whose replicas are one slot each trains as data
    parallel.

    Args:
        model: The model.
        optimizer: Its optimizer, or a list where it has several.
        lr_scheduler: As for AdaptiveDataParallel.
        units: Names of modules whose weights are gathered together, and given up again when they have been used.
            Default: the entries of the model's lists of modules. Weights outside of them are gathered with the model.
        mixed_precision: fully_shard's policy.
        reshard_after_forward: fully_shard's option.
        recompute: Compute the activations of the ``blocks`` again for the backward pass.
        blocks: Names of modules; default: the model's direct parts, and of lists of modules the entries.
        example: A few inputs, from which a trial that may choose its layout estimates how many slots it needs; without
            them, the estimate is from its weights alone.
        scaling_rule: As for AdaptiveDataParallel.
        name: As for AdaptiveDataParallel.
        noise_every: As for AdaptiveDataParallel.
        preconditioned: As for AdaptiveDataParallel.

    Raises:
        InvalidTraining: The model has no trainable parameters, or not the units that are named.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        lr_scheduler: Any = None,
        *,
        units: Sequence[str] | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        reshard_after_forward: bool = True,
        recompute: bool = False,
        blocks: Sequence[str] | None = None,
        example: Any = None,
        scaling_rule: str | ScalingRule | None = None,
        name: str | None = None,
        noise_every: int | None = None,
        preconditioned: bool | None = None,
    ) -> None:
        super().__init__()
        optimizers = as_list(optimizer)
        refuse_what_cannot_be_trained(model, optimizers, {})
        place = next(each.device for each in model.parameters() if each.requires_grad)
        limit_memory(place, gpu_share())
        core = get_core()
        device = device_of(place)
        self._core = core
        settle_layout(core, model, optimizers, place, (SHARDED,), (recompute,), blocks=blocks, example=example)
        if recompute:
            recompute_in(model, blocks_of(model) if blocks is None else blocks)
        self._model_group: ReplicaGroup = core.model_parallel.group(device)
        self._shared = names_of_shared(model)
        self._shares = _Shares(core)
        if self._model_group.world_size > 1:
            before = dict(model.named_parameters())
            self._shard(model, place, units, mixed_precision, reshard_after_forward)
            after = dict(model.named_parameters())
            train_in_place_of(optimizers, {id(before[key]): after[key] for key in before})
        self.module = model
        self._held = _held(model, self._model_group)
        parameters = [each for each in model.parameters() if each.requires_grad]
        step_place = StepPlace()
        measured = measurements_of(core, model, optimizers, device, preconditioned)
        over = PartSums(core, parameters, measured, self._model_group, slots_per_share=1)
        alone = self._model_group.world_size == 1
        self._passes = PartPasses(core, parameters, step_place, over, measured, weighs=alone, shares_data=False)
        self.part = WrappedModel(
            core,
            self,
            optimizers,
            self._passes,
            DividedState(self._held, optimizers, schedules_in(lr_scheduler)),
            scaling_rule=scaling_rule,
            noise_every=noise_every,
        )
        self.part.take_part(name)

    def _shard(
        self,
        model: nn.Module,
        place: torch.device,
        units: Sequence[str] | None,
        mixed_precision: MixedPrecisionPolicy | None,
        reshard: bool,
    ) -> None:
        mesh = mesh_of(self._model_group.data, place.type)
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
        if mixed_precision is not None:
            options["mp_policy"] = mixed_precision
        for unit in _units(model, units):
            fully_shard(unit, **options)
        fully_shard(model, **options)
        each: Any
        for each in model.modules():
            if hasattr(each, "set_custom_reduce_scatter") and any(True for _ in each.parameters()):
                # What it sums has been weighted.
                each.set_gradient_divide_factor(1.0)
                each.set_force_sum_reduction_for_comms(True)
                if sums_its_own_parameters(each):
                    each.set_custom_reduce_scatter(self._shares)
                    each.set_custom_all_gather(_Gathers(self._core))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        part = self.part
        if not torch.is_grad_enabled() or part.evaluates:
            return self.module(*inputs, **kwargs)
        if part.step_place.step is not None:
            self._core.steps.note_forward((inputs, kwargs))
        self._shares.weight = self._passes.weight
        output = self.module(*inputs, **kwargs)
        self._passes.watch(output)
        return output

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model's weights and buffers on the CPU; nothing on processes but a replica's first.

        All processes of a replica have to call it. Raises PeerLost.
        """
        return gathered(self._held, self._shared, self._model_group)


class _Between:
    """The processes of a replica, as fully_shard asks them."""

    def __init__(self, core: Replica) -> None:
        self._core = core

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @contextmanager
    def _naming_a_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise losing_the_replica(self._core.generation.mark_broken, error) from error


class _Shares(_Between):
    """Weighted sum of gradients, on the process that keeps them."""

    def __init__(self, core: Replica) -> None:
        super().__init__(core)
        self.weight = 1.0

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.weight != 1.0:
            input_tensor.mul_(self.weight)
        with self._naming_a_loss():
            work: dist.Work | None = reduce_scatter_single(
                output_tensor, input_tensor, group=group, op=op, async_op=async_op
            )
        return work


class _Gathers(_Between):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._naming_a_loss():
            work: dist.Work | None = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


def _units(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules to shard, innermost first."""
    if names is None:
        lists = [each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
        found = [unit for each in reversed(lists) for unit in each.children() if any(True for _ in unit.parameters())]
        return list(dict.fromkeys(found))
    try:
        return [model.get_submodule(name) for name in sorted(names, key=lambda name: -name.count("."))]
    except AttributeError as error:
        raise InvalidTraining(f"units names a module that {type(model).__name__} does not have: {error}") from error


def _held(model: nn.Module, whole: ReplicaGroup) -> dict[str, Held]:
    shards = {
        name: held_whole(each) if whole.world_size == 1 else held_shard(each, whole.rank, whole.world_size)
        for name, each in model.named_parameters()
    }
    kept = model.state_dict().keys()
    return shards | {name: held_whole(each) for name, each in model.named_buffers() if name in kept}
