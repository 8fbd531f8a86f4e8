"""Looks at what a training loop does with a batch, and warns where that depends on how batches are divided."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dist_core.data.order import StepPlan
from dist_core.errors import UNDIVIDED
from dist_core.gradients.loss_means import Graph, graph_of, other_than_mean
from dist_core.gradients.mixed_samples import mixes_samples
from dist_core.gradients.step_place import StepPlace
from dist_core.link.environment import standalone_checkpoint_dir
from dist_core.torch_private import StorageWeakRef, storages_of, tensors_in
from dist_core.trial.models import is_batch_norm
from dist_core.trial.replica import Replica

logger = logging.getLogger(__name__)

MOST_LOOKS = 8
"""Passes that are looked at, once the trial divides batches."""
_MIXED = (
    "not made of each sample's own: it compares samples with each other, as in contrastive learning, or takes a root "
    "or a quotient of what it has summed over them, and each replica and pass has its own samples only. Apply that to "
    "each sample's own, or keep the trial at one size (min_replicas=max_replicas), without gradient_accumulation"
)


class BatchLooks:
    """Looks at the first passes of one model, and warns of a habit once."""

    def __init__(self, core: Replica, place: StepPlace, module: torch.nn.Module) -> None:
        self._core = core
        self._place = place
        self._model = type(module).__name__
        self._norms = [each for each in module.modules() if is_batch_norm(each)]
        """Layers that normalise over the samples of a pass; none once that has been told of."""
        self._buffers = [
            (layer, name)
            for layer in module.modules()
            if not is_batch_norm(layer)
            for name, each in layer.named_buffers(recurse=False)
            if each.is_floating_point()
        ]
        """Buffers that no batch norm has; none once their changes have been looked at."""
        self._held: list[str] = []
        """Sum of each of them when the present forward pass began."""
        self._weights = [each for each in module.parameters() if each.requires_grad]
        self._sums = self._sums_of_pass = ""
        """Sums of all weights at the beginning of the present step, and of its pass."""
        self._looks_at_hooks = True
        self._losses_left = self._inputs_left = self._weights_left = MOST_LOOKS
        self._outputs: list[torch.Tensor] = []
        """Outputs of the present pass."""
        self._carried: set[StorageWeakRef] = set()
        """Memory of the outputs of the pass before."""
        self._pass = (-1, -1)
        """Step and index of the pass that the outputs are of."""
        self._graphs: list[Graph] = []
        """Shapes of the losses of the present pass."""
        self._first_graphs: list[Graph] | None = None
        """Shapes of the present step's first pass; None while it is the first."""
        self._compares = True
        self._is_saved = core.environment is not None or standalone_checkpoint_dir() is not None
        self._others: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """First step that each optimizer of no wrapped model has stepped in."""

    def forward_begins(self, inputs: Any) -> None:
        """Warn of a state that the script carries from batch to batch where batches may be divided otherwise."""
        present = self._core.position.steps, self._place.index
        if present != self._pass:
            self._look_at_hooks()
            self._look_at_weights(begins_step=present[0] != self._pass[0])
            self._compare_passes(begins_step=present[0] != self._pass[0])
            self._pass, self._carried, self._outputs = present, storages_of(self._outputs), []
        else:
            self._look_within_pass()
        self._held = self._summed_buffers() if self._place.has_several_passes else []
        if not self._inputs_left or not (self._divides or self._core.environment is not None):
            return
        self._inputs_left -= 1
        if self._carried and self._carried & storages_of(tensors_in(inputs)):
            self._inputs_left = 0
            self._warn(
                f"{self._model} is given what it returned for the batch before, as states of a recurrent network are "
                "carried on, but rescales and passes change which samples a replica has. Keep the trial at one size "
                "(min_replicas=max_replicas), without gradient_accumulation"
            )

    def _look_at_hooks(self) -> None:
        """Warn of hooks that see each part's gradient, once the trial divides batches."""
        if not self._looks_at_hooks or not self._divides:
            return
        self._looks_at_hooks = False
        hooks = [hook for each in self._weights for hook in (each._backward_hooks or {}).values()]
        if not all(str(getattr(hook, "__module__", "")).startswith("dist_core.") for hook in hooks):
            self._warn(
                f"weights of {self._model} have hooks on their gradients, which get those of a replica's and a pass's "
                "own samples, as with DDP: one that clamps or normalises does other things than with the whole batch's "
                "gradient. Do that between backward() and optimizer.step()"
            )

    def _look_at_weights(self, *, begins_step: bool) -> None:
        """Refuse weights that move between two passes of a step."""
        self._sums_of_pass = ""
        if not self._weights_left:
            return
        self._weights_left -= 1
        self._sums_of_pass = self._summed_weights()
        if begins_step:
            self._sums = self._sums_of_pass
        elif self._place.has_several_passes and self._sums and self._sums_of_pass != self._sums:
            self._core.pacing.train_in_turns(
                f"the training loop changes weights of {self._model} by itself, as to clamp or to decay them, but "
                "this step takes several passes, and the body runs in each of them. Do that in "
                "optimizer.register_step_post_hook(...), or train each batch",
                is_divided=True,
            )

    def _look_at_first_pass(self) -> None:
        """Take weights that the first forward pass of all has set for what the step begins with."""
        before, self._sums = self._sums_of_pass, self._summed_weights()
        self._sums_of_pass = self._sums
        if self._sums != before and self._place.has_several_passes:
            self._warn(
                f"the first forward pass of {self._model} sets its weights, but the step's batch comes in several "
                "passes: if they are set by the samples, these are the first pass's"
            )

    def _look_within_pass(self) -> None:
        """Make steps of one pass where weights have moved since the pass's first output, as SAM moves them."""
        if self._sums_of_pass and torch.is_grad_enabled() and self._summed_weights() != self._sums_of_pass:
            self._sums_of_pass, self._weights_left = "", 0
            self._core.pacing.train_in_turns(
                f"the training loop moves weights of {self._model} between two outputs of one batch, as in "
                "sharpness-aware or adversarial training, but this step takes several passes, and each would move them "
                "by its own part's gradient. Train each batch",
                is_divided=self._place.has_several_passes,
            )

    def _summed_weights(self) -> str:
        return str([_summed(each) for each in self._weights])

    def forward_ended(self, output: Any) -> None:
        if self._place.step is None:
            return
        if self._weights_left == MOST_LOOKS - 1:
            self._look_at_first_pass()
        if self._losses_left or self._inputs_left:
            self._outputs += tensors_in(output)
        if self._norms and self._divides:
            self._look_at_norms(self._place.step)
        if self._held:
            self._look_at_buffers()

    def _look_at_buffers(self) -> None:
        """Warn of a buffer that each forward pass writes, in the first pass of the first step that has several."""
        changed = [
            name
            for (_, name), before, now in zip(self._buffers, self._held, self._summed_buffers(), strict=True)
            if now != before
        ]
        self._buffers, self._held = [], []
        if changed:
            self._warn(
                f"each forward pass of {self._model} in training changes its buffer {changed[0]!r}, as spectral norms "
                "and moving averages do, and a step's batch comes in several passes here: it changes more often than "
                f"with the script's batches. Where that matters, train each batch {UNDIVIDED}"
            )

    def _summed_buffers(self) -> list[str]:
        # By name: a codebook may be another tensor in each pass, or be written through ``.data``.
        return [_summed(layer._buffers.get(name)) for layer, name in self._buffers]

    def _look_at_norms(self, step: StepPlan) -> None:
        """Warn of batch norms that see fewer samples at a time than the script gives them."""
        rows, adaptation = len(step.micro_batches[self._place.index]), self._core.adaptation
        script_batch = step.global_batch if adaptation is None else min(step.global_batch, adaptation.bounds.init_batch)
        if rows >= script_batch or not any(each.training for each in self._norms):
            return
        self._norms = []
        self._warn(
            f"{self._model} has batch norms, which normalise over the {rows} samples of a replica's pass instead of "
            f"the script's {script_batch}, as with DDP. To avoid it, use SyncBatchNorm (on GPUs) or norms without "
            "a batch (GroupNorm), or keep the trial at one replica (max_replicas=1) and a fixed batch"
        )

    def backward_begins(self, loss: torch.Tensor) -> None:
        """Warn of a loss that is no mean over its samples where replicas or passes average gradients of it."""
        place = self._place
        if self._compares and place.has_several_passes:
            self._graphs.append(graph_of(loss))
        rows = 0 if place.step is None else len(place.step.micro_batches[place.index])
        # A replica without samples in this step computes on one that counts for nothing.
        if place.step is None or not rows or not self._divides or not place.computed:
            return
        if not self._losses_left:
            return
        self._losses_left -= 1
        try:
            # Below one model's outputs another one may lie, whose hooks and norms are none of this loss's.
            if len(self._core.models) == 1 and mixes_samples(loss, rows, self._outputs):
                other: str | None = _MIXED
            elif place.amounts or place.has_other_samples:
                # The script, or its trainer, has said what the loss is a mean over; or it has other parts besides.
                other = None
            else:
                other = other_than_mean(
                    loss, rows, self._outputs, batch=place.step.global_batch, denominator=place.denominator
                )
        except Exception as error:
            # A node of somebody's own, say, or a tensor that was changed in place, of which backward() itself tells.
            # Whatever it is: a look must not end a training.
            logger.info("the loss of %s was not looked at: %s: %s", self._model, type(error).__name__, error)
            other = None
        if other is not None:
            self._losses_left = 0
            self._warn(
                f"replicas and passes average their gradients of {self._model}, but the loss is {other}; else its "
                "gradient depends on the number of replicas"
            )

    def other_optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of weights that the script trains from step to step, and that no wrapped model has."""
        position = self._core.position
        if not position.in_training_loop or not (self._divides or self._is_saved):
            return
        if self._others.setdefault(optimizer, position.steps) in (position.steps, -1):
            return
        self._others[optimizer] = -1
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        self._warn(
            f"{type(optimizer).__name__} trains {count} parameters of no wrapped model: replicas do not average their "
            "gradients, each pass of a step steps them, and no checkpoint has them. Put them into a module, and wrap "
            "it with this optimizer: AdaptiveDataParallel(module, optimizer)"
        )

    def _compare_passes(self, *, begins_step: bool) -> None:
        """Warn of passes of one step that compute different things, as a count of batches would have them do."""
        if self._first_graphs is None:
            self._first_graphs = self._graphs or None
        elif self._graphs and self._graphs != self._first_graphs and self._compares:
            self._compares = False
            self._warn(
                f"two passes of one step computed {self._model}'s loss in different ways. A step's batch may come in "
                "several passes, so where a count of batches (enumerate) decides what is computed, count with "
                "dist_core.progress_step(batch_size), or use a fixed batch. Where the data or chance decide, nothing "
                "is wrong"
            )
        self._graphs = []
        if begins_step:
            self._first_graphs = None

    @property
    def _divides(self) -> bool:
        return self._core.generation.group.num_replicas > 1 or self._place.has_several_passes

    def _warn(self, message: str) -> None:
        if self._core.generation.group.rank == 0:
            self._core.warn(message)


def _summed(tensor: torch.Tensor | None) -> str:
    """Return the sum of what a tensor holds, as text: no number equals NaN."""
    return "" if tensor is None else str(tensor.detach().sum(dtype=torch.float64).item())
