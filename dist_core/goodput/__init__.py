"""The goodput model that trainer, scheduler and simulator share. Needs numpy only; torch is never imported here."""

from dist_core.goodput.batch_choice import (
    BatchBounds,
    BatchChoice,
    BatchChoices,
    choose_batch,
    choose_batches,
    fixed_choice,
)
from dist_core.goodput.efficiency import GradientStatistics, efficiency, gain
from dist_core.goodput.fit import fit_throughput
from dist_core.goodput.model import GoodputModel, Hints
from dist_core.goodput.observations import Configuration, Observation, StepProfile
from dist_core.goodput.throughput import ThroughputParams, optim_seconds, throughput

__all__ = [
    "BatchBounds",
    "BatchChoice",
    "BatchChoices",
    "Configuration",
    "GoodputModel",
    "GradientStatistics",
    "Hints",
    "Observation",
    "StepProfile",
    "ThroughputParams",
    "choose_batch",
    "choose_batches",
    "efficiency",
    "fit_throughput",
    "fixed_choice",
    "gain",
    "optim_seconds",
    "throughput",
]
