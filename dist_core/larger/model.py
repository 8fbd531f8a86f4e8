"""ElasticModel: a model that is held as its trial's layout says: whole, sharded, or as a pipeline's stages.

Which one that is the scheduler chooses, from how fast each is and what fits into a slot's memory, and may choose anew
while the trial goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dist_core.errors import InvalidTraining
from dist_core.gradients.learning_rate import ScalingRule
from dist_core.larger.choice import kinds_that_train, settle_layout
from dist_core.larger.pipeline import ElasticPipeline
from dist_core.larger.schedules import schedule_kind
from dist_core.larger.sharded import ElasticFullyShard
from dist_core.larger.stages import arguments_of
from dist_core.layout import SHARDED, STAGES, Layout
from dist_core.training.wrapped_model import MeasuredModel, WrappedModel, as_list
from dist_core.trial.current import get_core


class ElasticModel(MeasuredModel, nn.Module):
    """Wrap a model and its optimizer for elastic training with replicas of one slot or of several.

    ::

        model = ElasticModel(model, optimizer, loss_function, example=inputs[:2])
        for x, y in loader:
            optimizer.zero_grad()
            loss = model.step(x, y)  # forwards, backwards, the mean loss of these examples
            model.clip_grad_norm_(1.0)
            optimizer.step()

    Args:
        model: The model.
        optimizer: Its optimizer, or a list where it has several.
        loss: Gives the mean loss over the examples, from outputs and targets.
        lr_scheduler: As for AdaptiveDataParallel.
        example: A few inputs, from which the memory and time of each layout are estimated.
        layouts: Ways to hold the model on several slots: ``"sharded"``, ``"stages"``, or both.
        recompute: Compute activations again for the backward pass; None: where that is the better layout.
        blocks: As for ElasticPipeline.
        schedule: As for ElasticPipeline.
        chunks: As for ElasticPipeline.
        microbatches: As for ElasticPipeline.
        mixed_precision: As for ElasticFullyShard.
        scaling_rule: As for AdaptiveDataParallel.
        name: As for AdaptiveDataParallel.
        noise_every: As for AdaptiveDataParallel.
        preconditioned: As for AdaptiveDataParallel.

    Raises:
        InvalidTraining: The model cannot be trained so, or fits into a slot's memory with no layout.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss: Callable[[Any, Any], torch.Tensor],
        lr_scheduler: Any = None,
        *,
        example: Any,
        layouts: Sequence[str] = (SHARDED, STAGES),
        recompute: bool | None = None,
        blocks: Sequence[str] | None = None,
        schedule: str = "1f1b",
        chunks: int = 2,
        microbatches: int | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        scaling_rule: str | ScalingRule | None = None,
        name: str | None = None,
        noise_every: int | None = None,
        preconditioned: bool | None = None,
    ) -> None:
        super().__init__()
        unknown = sorted(set(layouts) - {SHARDED, STAGES})
        if unknown or not layouts:
            raise InvalidTraining(f"layouts is {list(layouts)!r}; it must contain {SHARDED!r}, {STAGES!r} or both")
        place = next((each.device for each in model.parameters() if each.requires_grad), torch.device("cpu"))
        kind = schedule_kind(schedule, chunks)
        core = get_core()
        self.layout: Layout = settle_layout(
            core,
            model,
            as_list(optimizer),
            place,
            kinds_that_train(core.layout, model, layouts, blocks, example),
            (False, True) if recompute is None else (recompute,),
            blocks=blocks,
            example=example,
            microbatches=microbatches,
            schedule=kind.terms,
            chunks=kind.chunks,
        )
        self._loss = loss
        shared: dict[str, Any] = {
            "recompute": self.layout.recomputes,
            "blocks": blocks,
            "scaling_rule": scaling_rule,
            "name": name,
            "noise_every": noise_every,
            "preconditioned": preconditioned,
        }
        self.inner: ElasticFullyShard | ElasticPipeline
        if self.layout.kind == STAGES:
            self.inner = ElasticPipeline(
                model,
                optimizer,
                loss,
                lr_scheduler,
                example=example,
                schedule=schedule,
                chunks=chunks,
                microbatches=microbatches,
                **shared,
            )
        else:
            self.inner = ElasticFullyShard(model, optimizer, lr_scheduler, mixed_precision=mixed_precision, **shared)

    @property
    def part(self) -> WrappedModel:  # type: ignore[override]  # of whichever it is
        return self.inner.part

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model's weights and buffers on the CPU; nothing on processes but a replica's first.

        It does not matter how the model is held. All processes of a replica have to call it. Raises PeerLost.
        """
        return self.inner.full_state_dict()

    def explain(self) -> str:
        """Return the model's layout and, of a pipeline, each stage's estimated time and memory, as text."""
        if isinstance(self.inner, ElasticPipeline):
            return self.inner.explain()
        return self.layout.words

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Run forward and backward; return the mean loss of these examples.

        ``inputs``: a tensor, or a tuple of the model's arguments, whose first dimension counts examples.
        """
        if isinstance(self.inner, ElasticPipeline):
            return self.inner.step(inputs, targets)
        loss = self._loss(self.inner(*arguments_of(inputs)), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # not annotated in torch
        return loss.detach()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm of the whole model's gradient, like torch's function; return that norm."""
        if isinstance(self.inner, ElasticPipeline):
            return self.inner.clip_grad_norm_(max_norm)
        norm = nn.utils.clip_grad_norm_(self.inner.parameters(), max_norm)
        whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def forward(self, *inputs: Any) -> Any:
        """Return the whole model's output, on every process of the replica; for evaluations."""
        return self.inner(*inputs)
