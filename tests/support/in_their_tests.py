"""Plugin of pytest's: a library's own tests of its trainer run with ours in its place.

In a checkout of Lightning's or of transformers', with this project and its ``tests`` on the path::

    ELASTUNE_IN=lightning python -m pytest -p tests.support.in_their_tests -c /dev/null tests/tests_pytorch/loops
    ELASTUNE_IN=transformers python -m pytest -p tests.support.in_their_tests -c /dev/null tests/trainer/test_trainer.py

Without the variable they run with the library's own, which tells what fails on this machine anyway.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest

LIBRARY = os.environ.get("ELASTUNE_IN")


@pytest.fixture(autouse=True)
def _another_trial() -> Iterator[None]:
    yield
    if LIBRARY is not None:
        from dist_core.trial.current import reset_core

        reset_core()


def _in_lightning() -> None:
    from lightning.pytorch import Trainer

    import dist_core.lightning  # noqa: F401  # it registers the strategy

    theirs = Trainer.__init__

    @functools.wraps(theirs)
    def init(self: Any, **options: Any) -> None:
        names_none = options.get("strategy", "auto") == "auto" and not options.get("barebones")
        if names_none and options.get("devices", 1) in (1, "auto") and options.get("num_nodes", 1) == 1:
            options |= {"strategy": "elastune", "devices": 1}
        theirs(self, **options)

    Trainer.__init__ = init  # type: ignore[method-assign]  # on purpose


def _in_transformers() -> None:
    import transformers.trainer

    from dist_core.huggingface import ElasticTrainer

    setattr(transformers.trainer, "Trainer", ElasticTrainer)  # noqa: B010  # not what it is annotated as
    setattr(transformers, "Trainer", ElasticTrainer)  # noqa: B010  # as above


if LIBRARY is not None:
    {"lightning": _in_lightning, "transformers": _in_transformers}[LIBRARY]()
