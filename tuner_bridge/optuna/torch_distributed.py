"""``TorchDistributedTrial`` by the name that optuna-integration gives it, for scripts that are being ported."""

from __future__ import annotations

from typing import Any

from optuna.trial import BaseTrial

from tuner_bridge.optuna.current import current_trial
from tuner_bridge.optuna.trial import ElasticTrial


def TorchDistributedTrial(trial: BaseTrial | None = None, group: Any = None, device: Any = None) -> BaseTrial:  # noqa: N802
    """The trial that every replica has already; ``group`` and ``device`` are not needed.

    Numbers arrive as the sampler drew them, in 64 bits, and an exception reaches all replicas. The loop in which the
    ranks above 0 call the objective with None goes away: every replica runs the objective.
    """
    return trial if isinstance(trial, ElasticTrial) else current_trial()
