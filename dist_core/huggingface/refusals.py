"""What an elastic trainer of Hugging Face's cannot do, told before it begins."""

from __future__ import annotations

from typing import Any

from dist_core.errors import InvalidTraining

_NEEDED = ("_init_training_state", "_prepare_for_training", "_run_epoch", "_finalize_training")
OLDEST_TRANSFORMERS = "5.3"


def refuse_old_trainer(trainer: type) -> None:
    missing = [name for name in _NEEDED if not hasattr(trainer, name)]
    if missing:
        import transformers

        raise InvalidTraining(
            f"transformers {transformers.__version__} is too old for an elastic {trainer.__name__}, which needs its "
            f"{missing[0]}(); install transformers>={OLDEST_TRANSFORMERS}"
        )


def refuse_arguments(arguments: Any) -> None:
    """``arguments``: transformers' TrainingArguments."""
    for asked, what in ((arguments.deepspeed, "deepspeed"), (arguments.fsdp, "fsdp")):
        if asked:
            raise InvalidTraining(
                f"TrainingArguments has {what}={asked!r}; an elastic trainer divides the work among replicas itself. "
                "Leave it out; a model that does not fit on one slot is trained with dist_core.ElasticModel"
            )
    if arguments.auto_find_batch_size:
        raise InvalidTraining(
            "TrainingArguments has auto_find_batch_size=True; a trial that runs out of memory finds the batch that "
            "fits by itself, and keeps it. Leave it out"
        )


def refuse_placement(trainer: Any) -> None:
    """``trainer``: one that has been made, with its model."""
    if trainer.is_model_parallel:
        raise InvalidTraining(
            f"the model lies on several devices or on another one than {trainer.args.device} (its hf_device_map is "
            f"{trainer.model.hf_device_map}); an elastic trainer's replica trains on its own device. Load it without "
            "device_map"
        )
