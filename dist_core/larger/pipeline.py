"""ElasticPipeline: a model cut into stages over the processes of a replica, data parallel between replicas.

Microbatches go through the stages by one of torch's schedules (GPipe, Huang et al., NeurIPS'19; one forward, one
backward: PipeDream, Narayanan et al., SOSP'19; interleaved: Narayanan et al., SC'21). Each process sums the gradients
of its stages with those that have the same ones in other replicas. The stages of a replica stay where they are, so
replicas come and go as whole pipelines.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dist_core.device import device_of, limit_memory
from dist_core.errors import InvalidTraining
from dist_core.generations.model_parallel import is_of_a_connection, losing_the_replica
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.checks import refuse_what_cannot_be_trained
from dist_core.gradients.learning_rate import ScalingRule
from dist_core.gradients.step_place import StepPlace
from dist_core.larger.alike import refuse_what_computes_otherwise
from dist_core.larger.choice import settle_layout
from dist_core.larger.divided_state import DividedState, gathered, held_whole, names_of_shared
from dist_core.larger.part_passes import PartPasses
from dist_core.larger.part_sums import PartSums
from dist_core.larger.predicted import in_memory, model_costs, slot_memory, state_factor
from dist_core.larger.schedules import Division, ScheduleKind, divided, largest_microbatch, schedule_kind
from dist_core.larger.stages import arguments_of, blocks_of, cut, recompute_in, stage_modules, train_in_place_of
from dist_core.layout import STAGES
from dist_core.link.environment import gpu_share
from dist_core.partition.balance import Partition, PipelineTerms
from dist_core.partition.blocks import BlockCosts
from dist_core.partition.explain import explain
from dist_core.torch_private import as_default_group
from dist_core.training.wrapped_model import MeasuredModel, WrappedModel, as_list, measurements_of, schedules_in
from dist_core.trial.current import get_core

MOST_SCHEDULES = 8
"""Kept for the shapes of batches that came last; one has the memory that microbatches are received into."""


class ElasticPipeline(MeasuredModel, nn.Module):
    """Cut a model into as many stages as its replicas have slots, for elastic training.

    ::

        model = ElasticPipeline(model, optimizer, loss_function, example=torch.zeros(1, 128, dtype=torch.long))
        for x, y in loader:
            optimizer.zero_grad()
            loss = model.step(x, y)  # forwards, backwards, the mean loss of these examples
            model.clip_grad_norm_(1.0)
            optimizer.step()

    Stages are copies of the model without the others' blocks, between which each block's first argument is sent. In
    evaluation, outputs come from calling the model, on every process of a replica. A trial whose replicas are one slot
    each trains without stages.

    Args:
        model: The model.
        optimizer: Its optimizer, or a list where it has several.
        loss: Gives the mean loss over the examples of a microbatch, from its output and targets.
        lr_scheduler: As for AdaptiveDataParallel.
        blocks: Names of the modules between which the model may be cut, in the order in which it calls them. Default:
            its direct parts, and of lists of modules the entries.
        example: A microbatch of inputs, from which the costs of the blocks are estimated.
        cuts: Names of the blocks that stages begin with, in place of an ``example``.
        schedule: ``"1f1b"``, ``"simple"`` (all forward passes, then all backward passes) or ``"interleaved"``.
        chunks: Stages of each process in an interleaved schedule.
        microbatches: Most microbatches that a replica's examples are divided into. Default: four a stage, so that
            stages wait for a fifth of the time at most, and more where memory has no room for so large ones.
        memory_bytes: Memory of a stage's device in bytes; default: what a slot is known to have.
        memory_weight: From 0, to cut for the smallest slowest stage, to 1, for the smallest fullest one.
        recompute: Have blocks compute their activations again for the backward pass.
        scaling_rule: As for AdaptiveDataParallel.
        name: As for AdaptiveDataParallel.
        noise_every: As for AdaptiveDataParallel.
        preconditioned: As for AdaptiveDataParallel.

    Raises:
        InvalidTraining: The model cannot be cut, or a name does not exist.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss: Callable[[Any, Any], torch.Tensor],
        lr_scheduler: Any = None,
        *,
        blocks: Sequence[str] | None = None,
        example: Any = None,
        cuts: Sequence[str] | None = None,
        schedule: str = "1f1b",
        chunks: int = 2,
        microbatches: int | None = None,
        memory_bytes: float | None = None,
        memory_weight: float = 0.0,
        recompute: bool = False,
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
        core, device = get_core(), device_of(place)
        self._core = core
        self._loss = loss
        self._place = place
        self._kind: ScheduleKind = schedule_kind(schedule, chunks)
        names = list(blocks) if blocks is not None else blocks_of(model)
        settle_layout(
            core,
            model,
            optimizers,
            place,
            (STAGES,),
            (recompute,),
            blocks=names,
            example=example,
            microbatches=microbatches,
            schedule=self._kind.terms,
            chunks=self._kind.chunks,
        )
        self._model_group: ReplicaGroup = core.model_parallel.group(device)
        members = self._model_group.world_size
        self._num_stages = members * self._kind.chunks if members > 1 else 1
        self._microbatches = _checked(microbatches, self._num_stages)
        self._shared = names_of_shared(model)
        self._indices = self._kind.stages_of(self._model_group.rank, members) if members > 1 else [0]
        self.partition: Partition | None = None
        self._largest: int | None = None
        """Examples of a microbatch, as far as memory goes; None where nothing is known of it."""
        if members > 1:
            self._terms = PipelineTerms(
                microbatches=self._microbatches,
                schedule=self._kind.terms,
                chunks=self._kind.chunks,
                state_factor=state_factor(optimizers),
                memory_weight=memory_weight,
            )
            known = slot_memory(place, gpu_share()) if memory_bytes is None else memory_bytes
            room = math.inf if known is None else known / self._kind.chunks
            costs = None if example is None else model_costs(model, names, optimizers, example)
            blocks_costs: Sequence[BlockCosts] | None = None if costs is None else costs.blocks
            if costs is not None and not math.isinf(room):
                # What has to fit is a microbatch of one example; how many more do is seen then.
                blocks_costs = in_memory(costs, recomputes=recompute)
            self.partition = cut(
                model, names, self._num_stages, self._terms, costs=blocks_costs, cuts=cuts, memory_bytes=room
            )
            if microbatches is None and not math.isinf(room) and cuts is None:
                self._largest = largest_microbatch(self.partition, self._terms, room)
            if example is not None:
                refuse_what_computes_otherwise(model, names, self.partition, example)
            self.stages = nn.ModuleList(stage_modules(model, names, self.partition, self._indices))
            own = {id(each) for each in self.stages.parameters()}
            train_in_place_of(optimizers, {id(each): None for each in model.parameters() if id(each) not in own})
        else:
            self.stages = nn.ModuleList([model])
        if recompute:
            for stage in self.stages:
                recompute_in(stage, names)
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self._seen: list[tuple[torch.Tensor, int]] = []
        self._examples = 1
        parameters = [each for each in self.stages.parameters() if each.requires_grad]
        self._held = dict(self._held_of_stages())
        step_place = StepPlace()
        measured = measurements_of(core, self.stages, optimizers, device, preconditioned)
        over = PartSums(core, parameters, measured, self._model_group, slots_per_share=members)
        self._passes = PartPasses(core, parameters, step_place, over, measured, weighs=False, shares_data=True)
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

    def _held_of_stages(self) -> Iterator[tuple[str, Any]]:
        for stage in self.stages:
            kept = stage.state_dict()
            for name, each in [*stage.named_parameters(), *stage.named_buffers()]:
                if name in kept:
                    yield name, held_whole(each)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model's weights and buffers on the CPU; nothing on processes but a replica's first.

        All processes of a replica have to call it. Raises PeerLost.
        """
        return gathered(self._held, self._shared, self._model_group)

    def explain(self) -> str:
        return "one stage" if self.partition is None else explain(self.partition, self._terms)

    # ------------------------------------------------------------------ training

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Run forward and backward through all stages; return the mean loss on each of a replica's processes.

        ``inputs``: a tensor, or a tuple of the model's arguments, whose first dimension counts examples.
        """
        if self.part.step_place.step is not None:
            self._core.steps.note_forward(inputs)
        arguments = arguments_of(inputs)
        if not isinstance(targets, torch.Tensor):
            raise InvalidTraining(
                f"a pipeline's targets are a {type(targets).__name__}; they must be one tensor, which is split into "
                "microbatches"
            )
        self._examples = len(arguments[0])
        self._seen.clear()
        if self._num_stages == 1:
            self._compute_loss(self.stages[0](*arguments), targets).backward()  # type: ignore[no-untyped-call]  # not annotated in torch
        else:
            multiple, stages = self._kind.multiple_of(self._model_group.world_size), self._num_stages
            for part in divided(self._examples, self._microbatches, stages, multiple, self._largest):
                self._run(part, arguments, targets)
        self._passes.end_pass()
        return self._mean_loss()

    def _run(self, part: Division, arguments: tuple[Any, ...], targets: Any) -> None:
        mine = tuple(each[part.first : part.stop] for each in arguments)
        key = part.count, part.size, *(tuple(each.shape[1:]) for each in arguments)
        schedule = self._schedule(key, part, trains=True)
        inputs = mine if 0 in self._indices else ()
        target = targets[part.first : part.stop] if self._has_last else None
        before = list(self._seen)
        with self._in_replica():
            schedule.step(*inputs, target=target, losses=[] if self._has_last else None, return_outputs=False)
        # A schedule's first step has looked at one microbatch more, for the shapes that stages send each other.
        self._seen = [*before, *self._seen[len(before) :][-part.count :]]

    def _schedule(self, key: Any, part: Division, *, trains: bool) -> Any:
        if key not in self._schedules:
            while len(self._schedules) >= MOST_SCHEDULES:
                self._schedules.popitem(last=False)
            with as_default_group(self._model_group.data):
                stages = self._kind.stages(
                    list(self.stages), self._indices, self._num_stages, self._place, self._model_group.data
                )
                made = self._kind.make(stages, part, self._num_stages, self._compute_loss if trains else None)
            self._schedules[key] = made
        self._schedules.move_to_end(key)
        return self._schedules[key]

    @property
    def _has_last(self) -> bool:
        return self._num_stages - 1 in self._indices

    @property
    def _process_with_last(self) -> int:
        return self._kind.process_of(self._num_stages - 1, self._model_group.world_size)

    def _compute_loss(self, output: Any, target: Any) -> torch.Tensor:
        loss = self._loss(output, target)
        count = len(target)
        self._seen.append((loss.detach(), count))
        return loss * (self._passes.weight * count / self._examples)

    def _mean_loss(self) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        if self._has_last:
            loss += sum(float(value) * count for value, count in self._seen) / self._examples
        with self._in_replica():
            self._model_group.broadcast_tensors([loss], source=self._process_with_last)
        return loss.float()

    def _in_replica(self) -> Any:
        return _InReplica(self)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm of the whole model's gradient, like torch's function; return that norm."""
        gradients = [each.grad for each in self.stages.parameters() if each.grad is not None]
        squares = sum(float(each.double().square().sum()) for each in gradients)
        total = torch.tensor([squares], dtype=torch.float64)
        with self._in_replica():
            if self._model_group.world_size > 1:
                self._model_group.sum(total, what="norms")
        norm = total.sqrt_().squeeze()
        factor = min(1.0, max_norm / (float(norm) + 1e-6))
        for each in gradients:
            each.mul_(factor)
        return norm.float()

    # ------------------------------------------------------------------ evaluation

    def forward(self, *inputs: Any) -> Any:
        """Return the whole model's output, on every process of the replica; for evaluations."""
        if torch.is_grad_enabled() and self.training and not self.part.evaluates:
            raise InvalidTraining(
                "a pipeline was called like a model in training mode, but its stages alternate forward and backward "
                "passes. Call model.step(inputs, targets) instead of the forward pass, the loss and backward()"
            )
        if self._num_stages == 1:
            return self.stages[0](*inputs)
        part = Division(first=0, count=1, size=len(inputs[0]))
        key = "evaluation", part.size, *(tuple(each.shape[1:]) for each in inputs)
        schedule = self._schedule(key, part, trains=False)
        with self._in_replica(), torch.no_grad():
            output = schedule.eval(*(inputs if 0 in self._indices else ()))
            return self._for_all(output if self._has_last else None)

    def _for_all(self, output: torch.Tensor | None) -> torch.Tensor:
        source = self._process_with_last
        words = json.dumps([list(output.shape), str(output.dtype)[6:]]).encode() if output is not None else b""
        shape, kind = json.loads(self._model_group.broadcast_bytes(words, source=source))
        sent = torch.empty(shape, dtype=getattr(torch, kind)) if output is None else output.detach().cpu().contiguous()
        self._model_group.broadcast_tensors([sent], source=source)
        return sent.to(self._place)


class _InReplica:
    """Within, torch finds the replica's processes where it takes a default group for granted; a loss is named."""

    def __init__(self, pipeline: ElasticPipeline) -> None:
        self._core = pipeline._core
        self._group = as_default_group(pipeline._model_group.data)

    def __enter__(self) -> None:
        self._group.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._group.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and is_of_a_connection(error):
            raise losing_the_replica(self._core.generation.mark_broken, error) from error


def _checked(microbatches: int | None, num_stages: int) -> int:
    if microbatches is None:
        return 4 * num_stages
    if microbatches < num_stages:
        raise InvalidTraining(
            f"microbatches is {microbatches} for {num_stages} stages; with fewer microbatches than stages, some "
            "stages would always be idle. Use more microbatches, or fewer slots per replica"
        )
    return microbatches
