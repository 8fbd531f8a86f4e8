"""Hugging Face's trainers as elastic trials: ``Trainer``, those of TRL, any other that is made from it, Accelerate.

``from dist_core.huggingface import ElasticTrainer as Trainer`` is the whole change to a script; of another trainer
``elastic(SFTTrainer)`` is the elastic one; a loop over Accelerate's imports ``Accelerator`` from here. Importing this
package loads nothing of theirs; names load on use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dist_core.hooks import loaded_on_use

if TYPE_CHECKING:
    from dist_core.huggingface.accelerator import Accelerator
    from dist_core.huggingface.trainer import ElasticTrainerMixin, elastic

    ElasticTrainer: Any
    ElasticSFTTrainer: Any
    ElasticDPOTrainer: Any

__all__ = ["Accelerator", "ElasticDPOTrainer", "ElasticSFTTrainer", "ElasticTrainer", "ElasticTrainerMixin", "elastic"]

_HOME = {"Accelerator": ".accelerator", "ElasticTrainerMixin": ".trainer", "elastic": ".trainer"}
_MADE_FROM = {
    "ElasticTrainer": ("transformers", "Trainer"),
    "ElasticSFTTrainer": ("trl", "SFTTrainer"),
    "ElasticDPOTrainer": ("trl", "DPOTrainer"),
}
_load = loaded_on_use(__name__, _HOME)


def __getattr__(name: str) -> Any:
    if name in _MADE_FROM:
        package, original = _MADE_FROM[name]
        return _load("elastic")(getattr(import_module(package), original))
    return _load(name)
