"""The name of the strategy among Lightning's own; the strategy itself is imported when a trainer asks for it."""

from __future__ import annotations

from typing import Any

NAME = "elastune"


def register() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    if NAME not in StrategyRegistry:
        StrategyRegistry.register(NAME, _make, description="replicas that come and go while the trainer runs")


def _make(**options: Any) -> Any:
    from dist_core.lightning.strategy import ElasticStrategy

    return ElasticStrategy(**options)
