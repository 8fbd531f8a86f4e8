"""A loop over Accelerate, and the elastic Accelerator in its place."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dist_core.errors import InvalidTraining
from tests.support.habits import GROWN, PAIR, RESCALED, Kit, as_trial, examples, in_plain_pytorch, network, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def accelerator_of(kit: Kit, **options: Any) -> Any:
    import accelerate

    from dist_core.huggingface import Accelerator

    return (Accelerator if kit.elastic else accelerate.Accelerator)(cpu=True, **options)


def batch_of_one_process(size: int) -> int:
    """Of torchrun's processes each has a batch of its own."""
    return size // int(os.environ.get("WORLD_SIZE", "1"))


def loop(kit: Kit, accelerator: Any, passes: int) -> list[float]:
    """As Accelerate's examples have it: accumulation, clipping, a schedule by steps, an evaluation that is gathered."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    size = batch_of_one_process(24 // passes)
    training, held_out = DataLoader(examples(), size), DataLoader(examples(41), batch_of_one_process(8))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    model, optimizer, training, held_out, schedule = accelerator.prepare(model, optimizer, training, held_out, schedule)
    found: list[float] = []
    for _ in kit.epochs(3):
        model.train()
        for x, y in training:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        errors = []
        for x, y in held_out:
            with torch.no_grad():
                predicted = model(x)
            predicted, y = accelerator.gather_for_metrics((predicted, y))
            errors.append((predicted - y).square())
        whole = torch.cat(errors)
        assert len(whole) == 41
        found.append(float(whole.mean()))
    return [*weights_of(accelerator.unwrap_model(model)), *found, schedule.get_last_lr()[0]]


def in_one_pass(kit: Kit) -> list[float]:
    return loop(kit, accelerator_of(kit), 1)


def in_three_passes(kit: Kit) -> list[float]:
    return loop(kit, accelerator_of(kit, gradient_accumulation_steps=3), 3)


@pytest.mark.parametrize("replicas", [1, 2, PAIR, RESCALED])
@pytest.mark.parametrize("habit", [in_one_pass, in_three_passes])
def test_a_loop_over_accelerate_ends_as_on_one_process(habit: Any, replicas: int) -> None:
    expected = in_plain_pytorch(habit)
    results = [each for each in as_trial(habit, replicas, 3 if habit is in_three_passes else 1) if each is not None]
    assert len(results) == (1 if replicas == 1 else 2)
    for found in results:
        assert found == pytest.approx(expected, abs=2e-4)


def skips_and_gathers(kit: Kit) -> list[float]:
    """Goes on behind two batches of the first epoch; gathers losses, counts and, behind an evaluation, results."""
    accelerator = accelerator_of(kit)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, held_out = DataLoader(examples(), batch_of_one_process(12)), DataLoader(examples(41), 41)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    found: list[float] = []
    for epoch in kit.epochs(2):
        found = []
        for x, y in accelerator.skip_first_batches(loader, 2) if epoch == 0 else loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            count = accelerator.gather(torch.tensor(len(x))).sum()
            losses = accelerator.reduce({"sum": loss.detach() * len(x)})
            rows = accelerator.gather((x.detach(), y))
            assert [len(each) for each in rows] == [count, count]
            found += [float(count), float(losses["sum"] / count), float(rows[0].sum()), float(rows[1].sum())]
        model.eval()
        with torch.no_grad():
            [(x, y)] = held_out
            error = nn.functional.mse_loss(model(x), y, reduction="sum")
        model.train()
        found += [float(accelerator.gather(error).sum()), float(accelerator.reduce(error, "mean"))]
    return [*found, *weights_of(accelerator.unwrap_model(model))]


@pytest.mark.parametrize("replicas", [1, 2, GROWN])
def test_batches_are_skipped_and_values_gathered_as_on_one_process(replicas: int) -> None:
    expected = in_plain_pytorch(skips_and_gathers)
    results = as_trial(skips_and_gathers, replicas)
    assert len(results) == (3 if replicas == GROWN else replicas)
    for found in results:
        assert found == pytest.approx(expected, abs=2e-4)


def first_batches(kit: Kit) -> list[list[float]]:
    """The first batch that a model trains on, by the seed of the data, with an epoch that the script announces."""
    from accelerate.utils import DataLoaderConfiguration

    found = []
    for seed in (42, 42, 43):
        torch.manual_seed(0)
        config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
        accelerator = accelerator_of(kit, dataloader_config=config)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(examples(), 24, shuffle=True))
        loader.set_epoch(0)
        for x, _ in loader:
            found.append([float(each) for each in x[:, 0]])
            break
    return found


def test_the_seed_of_the_data_is_that_of_their_order() -> None:
    [[first, again, other]] = as_trial(first_batches, 1)
    assert first == again != other


def is_main(kit: Kit) -> list[bool]:
    """Before training, and behind it."""
    accelerator = accelerator_of(kit)
    before = accelerator.is_main_process
    loop(kit, accelerator, 1)
    return [before, accelerator.is_main_process]


@pytest.mark.parametrize("replicas", [2, PAIR, RESCALED])
def test_one_replica_is_the_main_process(replicas: int) -> None:
    found = [each for each in as_trial(is_main, replicas) if each is not None]
    assert [sum(flags) for flags in zip(*found, strict=True)] == [1, 1]


def _refused(kit: Kit, what: str) -> list[str]:
    accelerator = None
    try:
        if what == "plugin":
            accelerator_of(kit, fsdp_plugin=object())
        accelerator = accelerator_of(kit)
        if what == "model":
            accelerator.prepare(network())
        accelerator.prepare(DataLoader(examples(), batch_sampler=torch.utils.data.BatchSampler(range(8), 4, False)))
    except InvalidTraining as error:
        return [str(error)]
    return []


def _plugin(kit: Kit) -> list[str]:
    return _refused(kit, "plugin")


def _model(kit: Kit) -> list[str]:
    return _refused(kit, "model")


def _batches(kit: Kit) -> list[str]:
    return _refused(kit, "batches")


@pytest.mark.parametrize(
    ("habit", "sentence"),
    [(_plugin, "given fsdp_plugin"), (_model, "without its optimizer"), (_batches, "with a batch_sampler")],
)
def test_what_does_not_go_with_a_trial_is_refused(habit: Any, sentence: str) -> None:
    [[message]] = as_trial(habit, 1)
    assert sentence in message
