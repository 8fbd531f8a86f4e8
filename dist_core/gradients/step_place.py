"""StepPlace: where in a step the training loop stands, as the loader announces it to one model."""

from __future__ import annotations

from dist_core.data.order import StepPlan


class StepPlace:
    def __init__(self) -> None:
        self.step: StepPlan | None = None
        """None outside of the loader's steps."""
        self.index = 0
        """Index of the present microbatch."""
        self.amounts: list[float] = []
        """Numbers that the losses of the present step's passes are means over, as far as the user's code says so."""
        self.denominator: float | None = None
        """Number that a trainer divides the present pass's loss by, where that is a sum, so that passes add up."""
        self.last_batch = 0
        """Examples of the present step, or the last one; 0 before the first."""
        self.measures = False
        self.is_dry = False
        """A pass that changes nothing that lasts: a joiner's on its own, or of a loop that runs once more."""
        self.probing = False
        """An evaluation loop runs with gradients on; nothing lasts if it turns out to train."""
        self.computed = False
        """True once the model has computed something in the present microbatch."""
        self.has_gradients = False
        """True once a backward pass has reached the model in the present microbatch."""
        self.stepped = False
        """True once the optimizer has stepped since the present batch was handed out."""
        self.has_other_samples = False
        """True once the loop's body has drawn samples that are none of the loader's: losses may be means over them."""
        self.is_asked_for = False
        """True once a trainer or a script has asked which of a step's passes is the last one."""
        self.passed_step = False
        """True once the present microbatch has reached the step of one of the optimizers."""

    @property
    def is_last_micro_batch(self) -> bool:
        return self.step is None or self.index == len(self.step.micro_batches) - 1

    @property
    def passes_alone(self) -> bool:
        """Tell whether what is computed now is this replica's own, and does not last."""
        return self.is_dry or self.probing

    @property
    def has_several_passes(self) -> bool:
        return self.step is not None and len(self.step.micro_batches) > 1

    @property
    def share(self) -> float:
        """Return the present microbatch's share of the batch's examples."""
        assert self.step is not None
        return len(self.step.micro_batches[self.index]) / self.step.global_batch

    @property
    def weight_of_earlier(self) -> float:
        """Return the weight of the present microbatch's mean gradient, where the last one's is 1.

        Where the code says what its losses are means over, it is that number: the last one's is not known yet.
        """
        assert self.step is not None
        if len(self.amounts) > self.index:
            return self.amounts[self.index]
        return len(self.step.micro_batches[self.index]) / len(self.step.micro_batches[-1])

    def begin_micro_batch(self, step: StepPlan, index: int, *, measures: bool) -> None:
        self.is_dry = self.stepped = self.passed_step = self.computed = self.has_gradients = False
        self.step, self.index, self.measures, self.denominator = step, index, measures, None
        if index == 0:
            self.amounts = []
        self.last_batch = step.global_batch

    def begin_dry_step(self) -> None:
        self.is_dry, self.stepped = True, False
        self.step = None

    def begin_probe(self) -> None:
        self.probing, self.stepped = True, False

    def end_probe(self) -> None:
        self.probing = self.stepped = False

    def leave(self) -> None:
        self.step = None
