"""SharedEvaluationMixin: the evaluations of a trainer of Hugging Face's, of which each replica computes its share."""

from __future__ import annotations

import math
from typing import Any, cast

from dist_core.errors import InvalidTraining
from dist_core.huggingface.data import loader_like
from dist_core.huggingface.evaluation import EvaluationPass, GatheredRows
from dist_core.trial.core import TrainingCore


class SharedEvaluationMixin:
    """Before a trainer in the bases of a class."""

    _core: TrainingCore
    _processes: int
    _losses: list[tuple[float, int]] | None = None
    """Mean loss and size of each batch of the evaluation that runs."""

    @property
    def _me(self) -> Any:
        """This object as what it also is."""
        return self

    def get_eval_dataloader(self, *arguments: Any, **options: Any) -> Any:
        return self._shared(cast("Any", super()).get_eval_dataloader(*arguments, **options))

    def get_test_dataloader(self, *arguments: Any, **options: Any) -> Any:
        return self._shared(cast("Any", super()).get_test_dataloader(*arguments, **options))

    def _shared(self, theirs: Any) -> EvaluationPass:
        loader = loader_like(theirs, self._me.args, self._me.args.eval_batch_size * self._processes, shuffle=False)
        return EvaluationPass(loader, self._core)

    def evaluation_loop(self, dataloader: Any, description: str, *arguments: Any, **options: Any) -> Any:
        me = self._me
        run = cast("Any", super()).evaluation_loop
        if not (isinstance(dataloader, EvaluationPass) and dataloader.is_shared):
            return run(dataloader, description, *arguments, **options)
        if not me.args.eval_do_concat_batches or me.args.batch_eval_metrics:
            raise InvalidTraining(
                "TrainingArguments has batch_eval_metrics=True or eval_do_concat_batches=False; replicas share an "
                "evaluation, whose metrics are computed once all predictions are there. Leave them out"
            )
        gathered = GatheredRows(self._core)
        whole = me.compute_metrics
        if whole is not None:
            me.compute_metrics = lambda prediction: whole(_gathered_prediction(prediction, gathered))
        self._losses = []
        try:
            output = run(dataloader, description, *arguments, **options)
        finally:
            me.compute_metrics, losses, self._losses = whole, self._losses, None
        prefix = options.get("metric_key_prefix", arguments[2] if len(arguments) > 2 else "eval")
        assert losses is not None
        kept = [(loss, size) for loss, size in losses if math.isfinite(loss) or not me.args.logging_nan_inf_filter]
        mean = gathered.mean(sum(loss * size for loss, size in kept), sum(size for _, size in kept))
        if f"{prefix}_loss" in output.metrics and mean is not None:
            output.metrics[f"{prefix}_loss"] = mean
        if description == "Prediction":
            predictions, labels = gathered.rows((output.predictions, output.label_ids))
            output = output._replace(predictions=predictions, label_ids=labels)
        return output

    def prediction_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        found = cast("Any", super()).prediction_step(model, inputs, *arguments, **options)
        if self._losses is not None and found[0] is not None:
            self._losses.append((float(found[0].mean()), _size_of(inputs)))
        return found


def _gathered_prediction(prediction: Any, gathered: GatheredRows) -> Any:
    from transformers import EvalPrediction

    parts = gathered.rows((prediction.predictions, prediction.label_ids, prediction.inputs, prediction.losses))
    return EvalPrediction(predictions=parts[0], label_ids=parts[1], inputs=parts[2], losses=parts[3])


def _size_of(inputs: Any) -> int:
    from transformers.trainer_pt_utils import find_batch_size

    return int(find_batch_size(inputs) or 1)  # type: ignore[no-untyped-call]  # not annotated there
