"""Lightning's classes, of whichever of its two packages the process trains with: the same code under two names.

``lightning.pytorch`` and ``pytorch_lightning`` share no class, and the strategy's own classes derive from those of one
of them: the one whose trainer first asks for the strategy.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dist_core.errors import InvalidTraining

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning.fabric.utilities import rank_zero
    from lightning.pytorch import Callback, callbacks
    from lightning.pytorch.callbacks import Timer
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
    from lightning.pytorch.loops.fetchers import _DataFetcher
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

__all__ = [
    "PACKAGES",
    "Callback",
    "ClusterEnvironment",
    "SingleDeviceStrategy",
    "Timer",
    "TrainerFn",
    "_DataConnector",
    "_DataFetcher",
    "_EvaluationLoop",
    "_FitLoop",
    "_LoggerConnector",
    "_ResultCollection",
    "_TrainingEpochLoop",
    "call",
    "callbacks",
    "is_param_in_hook_signature",
    "rank_zero",
    "settle",
    "settled",
]

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
    """The process trains with this one. Raises InvalidTraining where it has trained with the other."""
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


def __getattr__(name: str) -> Any:
    if name in _OF_PYTORCH:
        package, place = settled(), _OF_PYTORCH[name]
    elif name in _OF_FABRIC:
        package, place = PACKAGES[settled()], _OF_FABRIC[name]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = import_module(f"{package}.{place}" if place else package)
    try:
        return getattr(found, name)
    except AttributeError:
        return import_module(f"{found.__name__}.{name}")
