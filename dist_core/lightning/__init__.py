"""Lightning's Trainer as an elastic trial: ``Trainer(strategy="elastune")``, or ``ElasticStrategy(...)`` for options.

Importing this package loads nothing of Lightning's; the name is registered once Lightning's strategies are imported.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dist_core.lightning.package import PACKAGES, register
from dist_core.when_imported import when_imported

if TYPE_CHECKING:
    from dist_core.lightning.environment import ElasticEnvironment
    from dist_core.lightning.strategy import ElasticStrategy

__all__ = ["ElasticEnvironment", "ElasticStrategy"]

_HOME = {"ElasticEnvironment": "environment", "ElasticStrategy": "strategy"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dist_core.lightning' has no attribute {name!r}")
    return getattr(import_module(f"dist_core.lightning.{_HOME[name]}"), name)


for _package in PACKAGES:
    if f"{_package}.strategies" in sys.modules:
        register(_package)
    else:
        when_imported(f"{_package}.strategies", partial(register, _package))
