"""Lightning's classes, of whichever of its two packages the process trains with: the same code under two names.

``lightning.pytorch`` and ``pytorch_lightning`` share no class, and the strategy's own classes derive from those of one
of them: the one whose trainer first asks for the strategy.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dist_core.errors import InvalidTraining

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment as ClusterEnvironment
    from lightning.fabric.utilities import rank_zero as rank_zero
    from lightning.pytorch import Callback as Callback
    from lightning.pytorch import callbacks as callbacks
    from lightning.pytorch.callbacks import Timer as Timer
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as _EvaluationLoop
    from lightning.pytorch.loops.fetchers import _DataFetcher as _DataFetcher
    from lightning.pytorch.loops.fit_loop import _FitLoop as _FitLoop
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as _TrainingEpochLoop
    from lightning.pytorch.strategies import SingleDeviceStrategy as SingleDeviceStrategy
    from lightning.pytorch.trainer import call as call
    from lightning.pytorch.trainer.connectors.data_connector import _DataConnector as _DataConnector
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import (
        _LoggerConnector as _LoggerConnector,
    )
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as _ResultCollection
    from lightning.pytorch.trainer.states import TrainerFn as TrainerFn
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature as is_param_in_hook_signature

STRATEGY = "elastune"
"""Name of our strategy among Lightning's own."""
PACKAGES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""Base package (Fabric) of each package of trainers."""

_OF_FABRIC = {
    "ClusterEnvironment": "plugins.environments.cluster_environment",
    "rank_zero": "utilities",
}
_OF_PYTORCH = {
    "Callback": "callbacks",
    "SingleDeviceStrategy": "strategies",
    "Timer": "callbacks",
    "TrainerFn": "trainer.states",
    "_DataConnector": "trainer.connectors.data_connector",
    "_DataFetcher": "loops.fetchers",
    "_EvaluationLoop": "loops.evaluation_loop",
    "_FitLoop": "loops.fit_loop",
    "_LoggerConnector": "trainer.connectors.logger_connector.logger_connector",
    "_ResultCollection": "trainer.connectors.logger_connector.result",
    "_TrainingEpochLoop": "loops.training_epoch_loop",
    "call": "trainer",
    "callbacks": "",
    "is_param_in_hook_signature": "utilities.signature_utils",
}
_settled: str | None = None


def settle(package: str) -> None:
    """Settle on this package; raise InvalidTraining if the process has trained with the other one."""
    global _settled
    if _settled not in (None, package):
        raise InvalidTraining(
            f"a trainer of {package} uses the elastic strategy, but a trainer of {_settled} has already used it in "
            "this process; import one of the two everywhere"
        )
    _settled = package


def settled() -> str:
    if _settled is None:
        imported = [package for package in PACKAGES if package in sys.modules]
        installed = [package for package in PACKAGES if find_spec(package.partition(".")[0]) is not None]
        settle((imported or installed or list(PACKAGES))[0])
    assert _settled is not None
    return _settled


def register(package: str) -> None:
    """Give the strategy its name among Lightning's own; it is imported when a trainer asks for it.

    ``package``: whose trainers may ask for it, one of ``PACKAGES``.
    """
    registry = import_module(f"{package}.strategies").StrategyRegistry
    if STRATEGY not in registry:
        made = partial(_make, package)
        registry.register(STRATEGY, made, description="replicas that come and go while the trainer runs")


def _make(package: str, **options: Any) -> Any:
    settle(package)
    from dist_core.lightning.strategy import ElasticStrategy

    return ElasticStrategy(**options)


def __getattr__(name: str) -> Any:
    if name in _OF_PYTORCH:
        package, place = settled(), _OF_PYTORCH[name]
    elif name in _OF_FABRIC:
        package, place = PACKAGES[settled()], _OF_FABRIC[name]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{package}.{place}" if place else package)
    try:
        return getattr(module, name)
    except AttributeError:
        return import_module(f"{module.__name__}.{name}")
