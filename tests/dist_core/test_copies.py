"""A wrapped model can be copied, averaged and saved, and a loader be looked at, as torch's own."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, default_collate

from dist_core import AdaptiveDataLoader
from tests.support.habits import GROWN, Kit, as_trial, examples, network, weights_of
from tests.support.shared_habits import mse


def train_an_epoch(model: Any, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()


def keeps_copies(kit: Kit) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    before = copy.deepcopy(wrapped)
    averaged = AveragedModel(wrapped, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in kit.epochs(2):
        train_an_epoch(wrapped, optimizer, loader)
        averaged.update_parameters(wrapped)
    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x, _ = examples()[:4]
    after = copy.deepcopy(wrapped)
    with torch.no_grad():
        inside = getattr(wrapped, "module", wrapped)
        assert torch.equal(after(x), inside(x)) and torch.equal(loaded(x), inside(x))
        assert not torch.equal(before(x), inside(x))
        return [*weights_of(inside), *averaged(x).flatten().tolist(), *before(x).flatten().tolist()]


@pytest.mark.parametrize("world", [1, 2, GROWN])
def test_a_wrapped_model_is_copied_averaged_and_saved_as_torchs_own(world: Any) -> None:
    plain = keeps_copies(Kit(elastic=False))
    for trained in as_trial(keeps_copies, world):
        assert trained == pytest.approx(plain, abs=1e-5)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


def test_a_loader_has_what_torchs_has() -> None:
    drawn = torch.Generator()
    shuffled = AdaptiveDataLoader(examples(), batch_size=24, shuffle=True, generator=drawn)
    assert isinstance(shuffled.sampler, RandomSampler) and shuffled.generator is drawn
    assert sorted(shuffled.sampler) == list(range(96))
    ordered = AdaptiveDataLoader(examples(), batch_size=36, drop_last=True)
    assert isinstance(ordered.sampler, SequentialSampler)
    assert isinstance(ordered.batch_sampler, BatchSampler)
    assert [len(batch) for batch in ordered.batch_sampler] == [36, 36]
    assert (ordered.num_workers, ordered.collate_fn, ordered.generator) == (0, default_collate, None)
    own = [3, 1, 2]
    assert AdaptiveDataLoader(examples(), batch_size=3, sampler=own).sampler is own
    stream = AdaptiveDataLoader(Stream(), batch_size=2, epoch_size=8)
    assert stream.sampler is None and stream.batch_sampler is None


def saves(kit: Kit, path: Path) -> list[float]:
    model = network()
    wrapped = kit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model[0].eval()
    torch.save(wrapped, path)
    return weights_of(model)


def test_a_copy_outlives_its_trial(tmp_path: Path) -> None:
    """Load what a trial saved where nothing is elastic."""
    path = tmp_path / "model.pt"

    [weights] = as_trial(partial(saves, path=path), 1)
    loaded = torch.load(path, weights_only=False)
    assert weights_of(loaded.module) == weights
    assert (loaded.training, loaded.module[0].training, loaded.module[2].training) == (True, False, True)
    assert set(loaded.state_dict()) == {f"module.{name}" for name in network().state_dict()}


def half(epoch: int) -> float:
    return 0.5**epoch


@pytest.mark.filterwarnings("ignore:Seems like")  # as of a copy of torch's own, whose optimizer has not stepped
@pytest.mark.parametrize("kind", [partial(ExponentialLR, gamma=0.9), partial(LambdaLR, lr_lambda=half)])
def test_an_optimizer_and_its_schedule_are_copied_and_saved_as_torchs_own(kind: Any) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = kind(optimizer)
    Kit(elastic=True).wrap(model, optimizer, lr_scheduler=schedule)
    copies: tuple[Any, ...] = (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule)))
    for again in copies:
        assert type(again).__module__ == "torch.optim.lr_scheduler"
        assert again.state_dict() == schedule.state_dict()
        rate = schedule.get_last_lr()
        again.step()
        assert again.get_last_lr() != rate and schedule.get_last_lr() == rate
    assert pickle.loads(pickle.dumps(optimizer)).state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def takes_statistics_from_all_samples(kit: Kit) -> list[float]:
    model = network(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    averaged = AveragedModel(wrapped)
    for _ in kit.epochs(2):
        train_an_epoch(wrapped, optimizer, loader)
        averaged.update_parameters(wrapped)
    update_bn(loader, averaged)
    norm = next(each for each in averaged.modules() if isinstance(each, torch.nn.BatchNorm1d))
    assert norm.running_mean is not None and norm.running_var is not None
    return [*norm.running_mean.tolist(), *norm.running_var.tolist()]


@pytest.mark.parametrize("world", [1, 2, 3, GROWN])
def test_a_batch_norm_whose_statistics_are_taken_anew_sees_all_samples_on_each_replica(world: Any) -> None:
    plain = takes_statistics_from_all_samples(Kit(elastic=False))
    trained = as_trial(takes_statistics_from_all_samples, world)
    assert all(each == trained[0] for each in trained)
    # The weights before differ by what each replica's batch norm saw of a batch.
    assert trained[0] == pytest.approx(plain, abs=0.2 if world != 1 else 1e-6)
