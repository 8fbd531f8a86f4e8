"""SharedEvaluationMixin: the evaluations of a trainer of Hugging Face's, of which each replica computes its share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from dist_core.errors import InvalidTraining
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.huggingface.data import loader_like
from dist_core.training.loader import AdaptiveDataLoader
from dist_core.trial.replica import Replica


class SharedEvaluationMixin:
    """Before a trainer in the bases of a class."""

    _core: Replica
    _processes: int
    _losses: list[tuple[float, int]] | None = None
    """Mean loss and size of each batch of the evaluation that runs."""

    @property
    def _me(self) -> Any:
        return self

    def get_eval_dataloader(self, *arguments: Any, **options: Any) -> Any:
        return self._shared(cast("Any", super()).get_eval_dataloader(*arguments, **options))

    def get_test_dataloader(self, *arguments: Any, **options: Any) -> Any:
        return self._shared(cast("Any", super()).get_test_dataloader(*arguments, **options))

    def _shared(self, theirs: Any) -> Any:
        """Return what each replica computes its share of; each goes through a loader of another kind by itself."""
        if not isinstance(theirs, DataLoader):
            return theirs
        loader = loader_like(theirs, self._me.args, self._me.args.eval_batch_size * self._processes, shuffles=False)
        return EvaluationPass(loader, self._core)

    def evaluation_loop(self, dataloader: Any, description: str, *arguments: Any, **options: Any) -> Any:
        me = self._me
        if not isinstance(dataloader, EvaluationPass):
            return cast("Any", super()).evaluation_loop(dataloader, description, *arguments, **options)
        gathered = GatheredRows(self._core)
        prefix = options.get("metric_key_prefix", arguments[2] if len(arguments) > 2 else "eval")
        if not dataloader.is_shared:
            output, total, count = self._with_losses(dataloader, description, *arguments, **options)
            if count and f"{prefix}_loss" in output.metrics:
                output.metrics[f"{prefix}_loss"] = total / count
            return output
        if not me.args.eval_do_concat_batches or me.args.batch_eval_metrics:
            raise InvalidTraining(
                "TrainingArguments has batch_eval_metrics=True or eval_do_concat_batches=False; replicas share an "
                "evaluation, whose metrics are computed once all predictions are there. Leave them out"
            )
        compute_metrics = me.compute_metrics
        if compute_metrics is not None:
            me.compute_metrics = lambda prediction: compute_metrics(_gathered_prediction(prediction, gathered))
        try:
            output, total, count = self._with_losses(dataloader, description, *arguments, **options)
        finally:
            me.compute_metrics = compute_metrics
        mean = gathered.mean(total, count)
        if f"{prefix}_loss" in output.metrics and mean is not None:
            output.metrics[f"{prefix}_loss"] = mean
        if description == "Prediction":
            predictions, labels = gathered.rows((output.predictions, output.label_ids))
            output = output._replace(predictions=predictions, label_ids=labels)
        return output

    def _with_losses(self, *arguments: Any, **options: Any) -> tuple[Any, float, int]:
        """Run the trainer's own loop; return what it returns, the samples' losses in sum, and how many there were.

        The trainer weighs a last, smaller batch as if it were a full one.
        """
        self._losses = []
        try:
            output = cast("Any", super()).evaluation_loop(*arguments, **options)
        finally:
            losses, self._losses = self._losses, None
        filters = self._me.args.logging_nan_inf_filter
        counted = [(loss, size) for loss, size in losses if math.isfinite(loss) or not filters]
        return output, sum(loss * size for loss, size in counted), sum(size for _, size in counted)

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


PADDING = -100
"""Filler that Hugging Face's trainers put behind predictions that are shorter than others."""


class EvaluationPass:
    """One pass over a dataset in batches, of which this replica computes its share; stands for a DataLoader."""

    def __init__(self, loader: AdaptiveDataLoader, core: Replica) -> None:
        self._loader = loader
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        samples = loader.source.num_samples
        self.is_shared = samples is not None and samples >= core.generation.group.num_replicas
        """True if each replica gets a part; a stream's length is unknown, so all replicas compute all of it."""
        loader.shares_evaluation = self.is_shared

    def __len__(self) -> int:
        return self._loader.batches_of_evaluation()

    def __iter__(self) -> Iterator[Any]:
        return self._loader.evaluate()


class GatheredRows:
    """Rows of an evaluation from all replicas, in rank order, which is the samples' order."""

    def __init__(self, core: Replica) -> None:
        self._core = core

    def mean(self, total: float, count: int) -> float | None:
        """Return the mean over all replicas of numbers that add up to ``total`` on this one.

        None if there are none anywhere.
        """

        def act(group: ReplicaGroup) -> list[float]:
            return group.sum_of(total, float(count), what="losses of an evaluation")

        all_of_it, number = self._together(act, (total, float(count)))
        return all_of_it / number if number else None

    def rows(self, mine: Any) -> Any:
        """Arrays whose first dimension counts samples, as they are or nested in tuples, lists and dictionaries."""
        leaves: list[NDArray[Any]] = []
        shape = _taken_apart(mine, leaves)

        def act(group: ReplicaGroup) -> list[NDArray[Any]]:
            shapes = group.gather_json([list(leaf.shape) for leaf in leaves])
            if len({len(each) for each in shapes}) != 1:
                raise InvalidTraining(
                    "the evaluation predictions of the replicas have different structures: a replica had no "
                    "samples, or what compute_metrics gets depends on the replica"
                )
            return [_whole(leaf, [each[index] for each in shapes], group) for index, leaf in enumerate(leaves)]

        return _put_together(shape, iter(self._together(act, leaves)))

    def _together(self, action: Callable[[ReplicaGroup], Any], alone: Any) -> Any:
        """Run a collective; return ``alone`` in a step that does not count, because a replica was lost in it."""
        if self._core.generation.stands_alone or self._core.loops.replaying:
            return alone
        return self._core.together(action, otherwise=lambda: alone)


def _whole(own_rows: NDArray[Any], shapes: list[list[int]], group: ReplicaGroup) -> NDArray[Any]:
    """Every replica's rows; shorter ones filled up."""
    widest = [max(sizes) for sizes in zip(*(shape[1:] for shape in shapes), strict=True)]
    first = sum(shape[0] for shape in shapes[: group.rank])
    exact = np.issubdtype(own_rows.dtype, np.integer) or own_rows.dtype == np.bool_
    rows = np.zeros((sum(shape[0] for shape in shapes), *widest), dtype=np.int64 if exact else np.float64)
    here = rows[first : first + len(own_rows)]
    if list(own_rows.shape[1:]) != widest:
        here[...] = PADDING
    here[(slice(None), *(slice(size) for size in own_rows.shape[1:]))] = own_rows
    group.sum(torch.from_numpy(rows).view(-1), what="predictions")
    return rows.astype(own_rows.dtype)


def _taken_apart(tree: Any, leaves: list[NDArray[Any]]) -> Any:
    """Return the tree with numbers in place of its arrays, which go to ``leaves``."""
    if isinstance(tree, (tuple, list)):
        return type(tree)(_taken_apart(each, leaves) for each in tree)
    if isinstance(tree, dict):
        return {name: _taken_apart(each, leaves) for name, each in tree.items()}
    if tree is None:
        return None
    leaves.append(np.atleast_1d(np.asarray(tree)))
    return len(leaves) - 1


def _put_together(shape: Any, leaves: Iterator[NDArray[Any]]) -> Any:
    if isinstance(shape, (tuple, list)):
        return type(shape)(_put_together(each, leaves) for each in shape)
    if isinstance(shape, dict):
        return {name: _put_together(each, leaves) for name, each in shape.items()}
    return None if shape is None else next(leaves)
