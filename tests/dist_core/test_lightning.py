"""Lightning's trainer, plain and with the elastic strategy: the same script, the same numbers, the same log."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.support.habits import GROWN, PAIR, RESCALED, Kit, as_trial, examples, in_plain_pytorch, with_a_loss
from tests.support.project import ROOT

pytest.importorskip("lightning")

from tests.support import lightning as written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
"""Importing it takes longer than most tests, and it warns of what is meant."""

HABITS = pytest.mark.parametrize(
    "habit",
    [
        written.supervised,
        written.by_steps,
        written.by_hand,
        written.of_a_stream,
        written.with_a_data_module,
        written.of_few_batches,
    ],
)


def equal(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], abs=2e-4)


def equally_logged(found: Any, expected: Any) -> None:
    assert [row[:2] for row in found[1]] == [row[:2] for row in expected[1]]
    assert [row[2] for row in found[1]] == pytest.approx([row[2] for row in expected[1]], abs=2e-4)


@HABITS
@pytest.mark.parametrize("replicas", [1, 2, PAIR, RESCALED])
def test_the_elastic_strategy_ends_as_the_plain_trainer(habit: Any, replicas: int) -> None:
    expected = in_plain_pytorch(habit)
    results = [each for each in as_trial(habit, replicas) if each is not None]
    assert len(results) == (1 if replicas == 1 else 2)
    for found in results:
        equal(found, expected)
    equally_logged(results[0], expected)


@HABITS
def test_a_replica_lost_at_a_loops_end_changes_no_number(habit: Any) -> None:
    expected = in_plain_pytorch(habit)
    survivors = with_a_loss(habit, "at the end of a loop")
    for found in (survivors[0], survivors[2]):
        equal(found, expected)
    equally_logged(survivors[0], expected)


@pytest.mark.parametrize("kind", [written.InTurns, written.Thawed, written.Weighed])
@pytest.mark.parametrize("replicas", [1, RESCALED])
def test_weights_of_two_optimizers_frozen_for_a_while_or_of_a_weighed_loss_train(kind: Any, replicas: int) -> None:
    habit = functools.partial(written.of_a_kind, kind)
    expected = in_plain_pytorch(habit)
    for found in as_trial(habit, replicas):
        if found is not None:
            equal(found, expected)


@pytest.mark.parametrize("replicas", [PAIR, GROWN])
def test_a_metric_object_over_training_adds_up_over_replicas(replicas: int) -> None:
    """Also of those that join behind an epoch's last step, and have seen nothing of it."""
    expected = in_plain_pytorch(written.with_a_metric_object)
    results = as_trial(written.with_a_metric_object, replicas)
    for found in results:
        equal(found, expected)
    equally_logged(results[0], expected)


@pytest.mark.parametrize(("precision", "tolerance"), [("64-true", 1e-6), ("bf16-mixed", 2e-2)])
@pytest.mark.parametrize("replicas", [1, PAIR])
def test_precision_is_lightnings(precision: str, tolerance: float, replicas: int) -> None:
    habit = functools.partial(written.at_precision, precision)
    expected = in_plain_pytorch(habit)
    for found in as_trial(habit, replicas):
        assert found[0] == pytest.approx(expected[0], abs=tolerance)


@pytest.mark.parametrize("replicas", [1, PAIR])
def test_it_goes_on_from_a_checkpoint_of_lightnings(tmp_path: Path, replicas: int) -> None:
    """In the middle of an epoch, as if nothing had been: Lightning itself would begin that epoch's data again."""
    written.half_trained(str(tmp_path))
    habit = functools.partial(written.gone_on, str(tmp_path))
    expected, steps = in_plain_pytorch(habit)
    for found, made in as_trial(habit, replicas):
        assert found == pytest.approx(expected, abs=2e-4)
        assert made == steps


def test_outside_of_a_trial_one_trainer_fits_twice() -> None:
    expected, passes = in_plain_pytorch(written.twice)
    [(found, made)] = as_trial(written.twice, 1)
    assert found == pytest.approx(expected, abs=2e-4)
    assert made == passes == 2


def test_lightning_goes_on_from_a_checkpoint_of_a_trials(tmp_path: Path) -> None:
    for kind in ("plain", "elastic"):
        (tmp_path / kind).mkdir()
    in_plain_pytorch(functools.partial(written.saved, str(tmp_path / "plain")))
    as_trial(functools.partial(written.saved, str(tmp_path / "elastic")), PAIR)
    expected, steps = written.gone_on_plainly(str(tmp_path / "plain"))
    found, made = written.gone_on_plainly(str(tmp_path / "elastic"))
    assert found == pytest.approx(expected, abs=2e-4)
    assert made == steps


def test_a_batch_that_adapts_makes_fewer_steps_that_count_as_the_same_number() -> None:
    plain_steps, plain_validated, plain_logged, _, plain_loss = in_plain_pytorch(written.adaptive)
    [(steps, validated, logged, own_steps, loss)] = as_trial(written.adaptive, 1)
    assert steps == plain_steps == 600
    assert own_steps < 600
    assert len(validated) == len(plain_validated)
    assert len(logged) <= len(plain_logged)
    assert all(mine - theirs < 25 for mine, theirs in zip(validated, plain_validated, strict=True))
    assert loss < 1.5 * plain_loss + 0.2


OTHERWISE = """
import sys

import pytest

from tests.support.habits import GROWN, as_trial, in_plain_pytorch
import written_otherwise as written
from dist_core.errors import InvalidTraining
import dist_core.lightning

for habit in (written.supervised, written.by_hand, written.with_a_data_module):
    expected = in_plain_pytorch(habit)
    results = [each for each in as_trial(habit, GROWN) if each is not None]
    for found in results:
        assert found[0] == pytest.approx(expected[0], abs=2e-4)
    assert [row[:2] for row in results[0][1]] == [row[:2] for row in expected[1]]

plainly = {"strategy": "elastune", "logger": False, "enable_checkpointing": False}
written.pl.Trainer(**plainly)
assert "lightning.pytorch" not in sys.modules
import lightning.pytorch
with pytest.raises(InvalidTraining, match="import one of the two everywhere"):
    lightning.pytorch.Trainer(**plainly)
"""


def test_trainers_of_its_other_package_are_served_as_well(tmp_path: Path) -> None:
    """``import pytorch_lightning``: nothing but the imports differs."""
    code = Path(written.__file__).read_text().replace("lightning.pytorch", "pytorch_lightning")
    (tmp_path / "written_otherwise.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OTHERWISE], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class ReversedLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def test_what_cannot_be_trained_is_refused_in_one_sentence(tmp_path: Path) -> None:
    from lightning.pytorch import callbacks
    from torch.utils.data import BatchSampler, SequentialSampler

    from dist_core.errors import InvalidTraining
    from dist_core.lightning import ElasticStrategy
    from dist_core.trial.current import get_core

    class Finetuning(callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None: ...

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None: ...

    with pytest.raises(InvalidTraining, match="choose 'fixed', 'adaptive'"):
        ElasticStrategy(batch="large")  # type: ignore[arg-type]  # on purpose
    data: Any = examples()
    batches = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 8, drop_last=False))
    one = DataLoader(data, 8)
    for loader, options, sentence in (
        (batches, {}, "the trial forms the batches itself"),
        ([one, one], {}, "an elastic trial trains on one"),
        (list(data), {}, "it needs a torch.utils.data.DataLoader"),
        (ReversedLoader(data, 8), {}, "whose own __iter__ would be ignored"),
        (one, {"callbacks": [callbacks.GradientAccumulationScheduler({0: 2})]}, "let the batch size grow"),
        (one, {"callbacks": [Finetuning()]}, r"another group of weights.*on_train_epoch_start"),
        (one, {"callbacks": [callbacks.EMAWeightAveraging()]}, "is not sent to replicas that join"),
        (one, {"callbacks": [callbacks.StochasticWeightAveraging(0.1)]}, "its average is not sent"),
        (one, {"callbacks": [callbacks.LearningRateFinder()]}, "runs several fits before it trains"),
        (one, {"sync_batchnorm": True}, "needs GPUs"),
    ):
        trainer, _ = written.trainer_of(Kit(elastic=True), str(tmp_path), enable_checkpointing=False, **options)
        with pytest.raises(InvalidTraining, match=sentence):
            trainer.fit(written.Regression(), loader)
    trainer, _ = written.trainer_of(Kit(elastic=True), str(tmp_path), enable_checkpointing=False)
    get_core().epochs.more_epochs = 2
    with pytest.raises(InvalidTraining, match=r"2 epochs more than .* and a larger max_epochs instead"):
        trainer.fit(written.Regression(), one)
