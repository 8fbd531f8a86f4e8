"""What training code may not ask for, and the names that it may import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

import dist_core
from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.errors import InvalidTraining
from dist_core.trial.current import reset_core
from tests.support.small_trials import Numbered, Stream, classifier

pytestmark = pytest.mark.usefixtures("fresh_core")


def as_anything(value: Any) -> Any:
    """What a script without types may pass."""
    return value


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: AdaptiveDataLoader(Numbered(0), batch_size=1), "has 0 samples"),
        (lambda: AdaptiveDataLoader(Numbered(5), batch_size=0), "batch_size is 0"),
        (
            lambda: AdaptiveDataLoader(Numbered(5), batch_size=cast("int", None)),
            "batch_size is None; it must be a whole number",
        ),
        (lambda: AdaptiveDataLoader(Unsized(), batch_size=1), "Unsized has __getitem__ but no length"),
        (
            lambda: AdaptiveDataLoader(as_anything(7), batch_size=1),
            "int has no __getitem__ and is not an IterableDataset",
        ),
        (lambda: AdaptiveDataLoader(Stream(3), batch_size=1).autoscale_batch_size(2), "Stream has no length"),
        (lambda: AdaptiveDataLoader(Stream(3), batch_size=1, shuffle=True), "Stream is an IterableDataset"),
        (lambda: AdaptiveDataLoader(Numbered(5), batch_size=1, epoch_size=0), "epoch_size is 0"),
        (lambda: AdaptiveDataLoader(Numbered(5), batch_size=1, batch_sampler=[[1]]), "was given a batch_sampler"),
        (lambda: AdaptiveDataLoader(Numbered(5), 1, True, [1]), "shuffle=True and a sampler"),
        (lambda: AdaptiveDataLoader(Numbered(5), 1, sampler=iter([1])), "has no length"),
        (
            lambda: AdaptiveDataLoader(Numbered(5), 1, sampler=DistributedSampler(Numbered(5), 2, 0)),
            "was given a DistributedSampler",
        ),
        (
            lambda: list(AdaptiveDataLoader(Numbered(5), 1, sampler=as_anything([[1], [2]]))),
            "does not yield single indices",
        ),
        (lambda: AdaptiveDataLoader(Numbered(5), batch_size=8).autoscale_batch_size(4), "max_batch_size is 4"),
        (
            lambda: AdaptiveDataLoader(Numbered(5), batch_size=8).autoscale_batch_size(16, (9, 12)),
            "the bounds must contain batch_size",
        ),
        (lambda: AdaptiveDataParallel(nn.ReLU(), torch.optim.SGD([torch.zeros(1)], lr=1.0)), "no parameter"),
        (lambda: next(iter(remaining_epochs_until(-1))), "num_epochs is -1"),
    ],
)
def test_contradictions_are_refused_in_words(wrong: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidTraining, match=words):
        wrong()


def test_unknown_names_are_refused_in_words() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidTraining, match="scaling rule 'x' is not known"):
        AdaptiveDataParallel(model, optimizer, scaling_rule="x")
    with pytest.raises(InvalidTraining, match="reduction 'x' is not known"):
        AdaptiveDataParallel(model, optimizer, reduction="x")
    with pytest.raises(InvalidTraining, match="needs the second moments of an Adam optimizer, but SGD is not"):
        AdaptiveDataParallel(model, optimizer, preconditioned=True)
    with pytest.raises(InvalidTraining, match="noise_every is 0"):
        AdaptiveDataParallel(model, optimizer, noise_every=0)
    with pytest.raises(InvalidTraining, match="the checkpoint interval is 0"):
        dist_core.set_checkpoint_interval(0)


def test_a_loop_without_epochs_is_refused_where_it_could_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints would be written, and never be read."""

    def train() -> int:
        reset_core()
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        AdaptiveDataParallel(model, optimizer)
        return len(list(AdaptiveDataLoader(Numbered(8), batch_size=4)))

    assert train() == 2
    monkeypatch.setenv("ELASTUNE_CHECKPOINT_DIR", str(tmp_path))
    with pytest.raises(InvalidTraining, match=f"so that it can go on from the checkpoints in {tmp_path}"):
        train()


def test_epoch_loops_do_not_nest() -> None:
    outer = iter(remaining_epochs_until(1))
    assert next(outer) == 0
    with pytest.raises(InvalidTraining, match="within another loop"):
        next(iter(remaining_epochs_until(1)))


def test_a_second_loop_over_epochs_that_would_train_nothing_is_refused() -> None:
    reset_core()
    assert list(remaining_epochs_until(1)) == [0]
    assert list(remaining_epochs_until(3)) == [1, 2]
    with pytest.raises(InvalidTraining, match="until epoch 2, but its trial has trained 3 already"):
        next(iter(remaining_epochs_until(2)))


def test_every_public_name_can_be_imported() -> None:
    assert dist_core.__all__ == sorted(dist_core.__all__)
    for name in dist_core.__all__:
        assert getattr(dist_core, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dist_core.nothing
