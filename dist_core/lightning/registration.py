"""The name of the strategy among Lightning's own; the strategy itself is imported when a trainer asks for it."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from dist_core.lightning.package import STRATEGY, settle


def register(package: str) -> None:
    """``package``: whose trainers may ask for it, one of ``PACKAGES``."""
    registry = import_module(f"{package}.strategies").StrategyRegistry
    if STRATEGY not in registry:
        made = partial(_make, package)
        registry.register(STRATEGY, made, description="replicas that come and go while the trainer runs")


def _make(package: str, **options: Any) -> Any:
    settle(package)
    from dist_core.lightning.strategy import ElasticStrategy

    return ElasticStrategy(**options)
