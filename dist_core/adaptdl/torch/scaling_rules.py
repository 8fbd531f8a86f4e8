"""``adaptdl.torch.scaling_rules``."""

from __future__ import annotations

from dist_core.gradients.learning_rate import LEGW, AdamScale, AdaScale, LinearScale, ScalingRule
from dist_core.gradients.learning_rate import SquareRootScale as SqrtScale
from dist_core.trial.current import get_core

__all__ = ["AdaScale", "AdamScale", "LEGWScale", "LinearScale", "ScalingRule", "SqrtScale"]


def LEGWScale(base_warmup_epochs: float, data_size: int) -> LEGW:  # noqa: N802  # AdaptDL's name
    """LEGW with its warm-up in epochs over ``data_size`` samples at the initial batch size."""
    loader = get_core().loader
    init_batch = loader.bounds.init_batch if loader is not None else 1
    return LEGW(base_warmup_steps=base_warmup_epochs * data_size / init_batch)
