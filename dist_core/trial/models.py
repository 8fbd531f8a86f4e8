"""Models: the wrapped models of a trial, as one; the first of them decides on the batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dist_core.errors import BatchLeftOut
from dist_core.generations.generation import Generation
from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.step_vote import Voter
from dist_core.goodput import GradientStatistics
from dist_core.goodput.model import LARGEST_NUMBER
from dist_core.gradients.noise.estimator import is_measured
from dist_core.life import Listener
from dist_core.trial.participants import TrainedModel

_NUMBERS = 3
"""Each model's two norms and, from rank 0, the index of the reduction that it proposes, plus 1; 0 is none."""


class Models(Voter, Listener):
    name = "models"

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._models: list[TrainedModel] = []
        self.were_left_out = False
        """The latest step made no update, because a replica left out its part of the batch."""

    def __iter__(self) -> Iterator[TrainedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __getitem__(self, index: int) -> TrainedModel:
        return self._models[index]

    def append(self, model: TrainedModel) -> None:
        self._models.append(model)

    def runs_again(self) -> None:
        self._models.clear()

    # ------------------------------------------------------------------ what is said of all

    @property
    def group_needs(self) -> GroupNeeds:
        """Process groups that the models' reductions want in every generation."""
        needs = GroupNeeds()
        for model in self:
            needs |= model.over.needs
        return needs

    @property
    def statistics(self) -> GradientStatistics | None:
        return self._models[0].statistics if self._models else None

    @property
    def gain(self) -> float:
        """Steps at the initial batch size that the present step is worth."""
        return self._models[0].gain if self._models else 1.0

    @property
    def rates(self) -> list[float]:
        return [rate for model in self for rate in model.rates()]

    @property
    def learning_rate(self) -> float | None:
        """Return the learning rate of the first parameter group in this step; None where there is none to show."""
        rates = self._models[0].rates() if self._models else []
        used = rates[0] * self._models[0].learning_rate_factor if rates else -1.0
        return used if 0.0 <= used <= LARGEST_NUMBER else None

    def measures(self, step: int, *, num_replicas: int) -> bool:
        """Tell whether the step of that number measures the noise scale; the same on all replicas."""
        if not self._models or self._models[0].passes.user_accumulates:
            return False
        return is_measured(step, num_replicas=num_replicas, every=self._models[0].noise_every)

    @property
    def least_samples(self) -> int:
        """Samples that a pass needs: a batch norm takes its statistics from several."""
        return 2 if any(is_batch_norm(each) for model in self for each in model.module.modules()) else 1

    @property
    def compute_after_an_update(self) -> bool:
        """Tell whether a pass that begins now lies behind the step of an optimizer in the same batch."""
        return any(model.step_place.passed_step for model in self)

    @property
    def are_in_a_part(self) -> bool:
        """Tell whether the present step takes several passes."""
        return any(model.step_place.has_several_passes for model in self)

    @property
    def await_an_update(self) -> bool:
        """Tell whether the present step's gradients wait for those of later batches, which the script adds to them."""
        return any(model.passes.awaits_update for model in self)

    @property
    def accumulate_by_script(self) -> bool:
        """Tell whether the script sums gradients over several of the loader's batches by itself."""
        return any(model.passes.user_accumulates for model in self)

    def take_back_gradients(self) -> None:
        """Put gradients that wait for later batches back to what they were before the present step."""
        for model in self:
            model.passes.take_back_gradients()

    @property
    def came_by_all_passes(self) -> bool:
        """Tell whether each of the present step's passes so far has come through its backward pass, or none.

        Of several models each may have steps of its own.
        """
        return len(self) != 1 or self[0].passes.came_by_all

    @property
    def took_gradients(self) -> bool:
        """Tell whether gradients have come to the buckets in the present step; each of several models has its own."""
        return len(self) != 1 or self[0].passes.took_gradients

    # ------------------------------------------------------------------ what they hold

    def trained(self) -> Iterator[torch.nn.Parameter]:
        for model in self:
            yield from (each for each in model.module.parameters() if each.requires_grad)

    def replicated(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that are the same on all replicas between two steps."""
        for model in self:
            yield from model.replicated_tensors()

    def buffers(self) -> list[torch.Tensor]:
        return [buffer for model in self for buffer in model.module.buffers()]

    # ------------------------------------------------------------------ what is done with all

    def began(self) -> None:
        for model in self:
            model.adopt_schedule()

    def entered(self, rank: int, number: int) -> None:
        for model in self:
            model.over.use(self._generation.group)

    def lost(self) -> None:
        for model in self:
            model.over.use(self._generation.group)
            model.passes.drop_gradients()

    def loop_ended(self) -> None:
        for model in self:
            model.passes.leave()

    def lay_out_buckets(self) -> None:
        """Take part where the others' forward pass lays gradient buckets out anew."""
        if len(self) == 1 and self._models[0].step_place.step is not None:
            self._models[0].passes.lay_out_buckets()

    @property
    def unsent_amount(self) -> float | None:
        """Return this replica's part of the sum of what losses are means over, where its body has not sent it."""
        return self[0].passes.unsent_amount if len(self) == 1 else None

    def reduce_nothing(self) -> None:
        """Take part in the others' reductions of a step that this replica leaves out. Raises InvalidTraining."""
        if len(self) != 1:
            raise BatchLeftOut(
                f"with {len(self)} models, because this replica cannot know which of them the others train"
            )
        self[0].passes.reduce_nothing()

    def leave_step_out(self) -> None:
        """Leave the step out: it makes no update, and nothing stays of its gradients and measurements."""
        self.were_left_out = True
        for model in self:
            model.passes.leave_step_out()

    # ------------------------------------------------------------------ a step's round

    def put(self) -> Sequence[float]:
        numbers: list[float] = []
        for model in self:
            proposal = model.over.proposal if self._generation.group.rank == 0 else None
            numbers += (*model.norms_to_sum(), 0.0 if proposal is None else proposal + 1.0)
        return numbers

    def take(self, agreed: Sequence[float], world_size: int) -> None:
        for index, model in enumerate(self):
            first, second, chosen = agreed[_NUMBERS * index : _NUMBERS * (index + 1)]
            model.passes.end_step()
            model.take_norms(first, second)
            model.over.tune(round(chosen) - 1 if chosen else None)


def is_batch_norm(module: torch.nn.Module) -> bool:
    """Tell whether a layer normalises over the samples that one process has in a pass."""
    is_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    return is_norm and not isinstance(module, torch.nn.SyncBatchNorm)
