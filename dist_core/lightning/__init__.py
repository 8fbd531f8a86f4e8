"""Lightning's Trainer as an elastic trial: ``Trainer(strategy="elastune")``, or ``ElasticStrategy(...)`` for options.

Importing this package loads nothing of Lightning's; the name is registered once Lightning's strategies are imported.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from dist_core.hooks import loaded_on_use, when_imported
from dist_core.lightning.package import PACKAGES, register

if TYPE_CHECKING:
    from dist_core.lightning.strategy import ElasticEnvironment, ElasticStrategy

__all__ = ["ElasticEnvironment", "ElasticStrategy"]

_HOME = {"ElasticEnvironment": ".strategy", "ElasticStrategy": ".strategy"}


__getattr__ = loaded_on_use(__name__, _HOME)


for _package in PACKAGES:
    if f"{_package}.strategies" in sys.modules:
        register(_package)
    else:
        when_imported(f"{_package}.strategies", partial(register, _package))
