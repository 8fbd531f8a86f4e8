"""Loops over a loader: every sample once, evaluations, several loops an epoch, and restarts among them."""

from __future__ import annotations

import copy
import math
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler

import dist_core
from dist_core import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.errors import InvalidTraining, ReplicaExit
from dist_core.state.states import FunctionState
from dist_core.trial.current import get_core, reset_core
from dist_core.trial.plain_replica import run_training
from tests.support.small_trials import ConstantGradient, Numbered, classes, classifier, train

pytestmark = pytest.mark.usefixtures("fresh_core")


def test_every_sample_once_an_epoch() -> None:
    for samples in train(AdaptiveDataLoader(Numbered(37), batch_size=8, shuffle=True), 3):
        assert sorted(samples) == list(range(37))


def test_drop_last_leaves_out_the_rest() -> None:
    loader = AdaptiveDataLoader(Numbered(10), batch_size=4, drop_last=True)
    assert len(loader) == 2
    assert train(loader, 2) == [list(range(8)), list(range(8))]


def test_code_that_runs_again_finds_the_variables_that_a_library_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAKEN", "once")
    runs: list[str] = []

    def code() -> int:
        runs.append(os.environ.pop("TAKEN"))
        if len(runs) == 1:
            raise MemoryError
        return 5

    present = SimpleNamespace(
        raise_postponed=lambda: None, can_run_again=lambda error: True, free_device_memory=lambda: None
    )
    assert run_training(cast("Any", SimpleNamespace(present=present)), code) == 5
    assert runs == ["once", "once"]


def test_drop_last_of_less_than_a_batch_leaves_no_step() -> None:
    loader = AdaptiveDataLoader(Numbered(3), batch_size=4, drop_last=True)
    assert len(loader) == 0
    assert train(loader, 2) == [[], []]
    assert get_core().position.steps == 0


def test_the_order_follows_the_seed_of_the_script_its_generator_or_its_samplers() -> None:
    def order(**options: Any) -> list[int]:
        reset_core()
        [samples] = train(AdaptiveDataLoader(Numbered(40), batch_size=8, **options), 1)
        return samples

    def of_generator(seed: int) -> list[int]:
        return order(shuffle=True, generator=torch.Generator().manual_seed(seed))

    def of_script(seed: int, *, sampled: bool = False) -> list[int]:
        torch.manual_seed(seed)
        return order(sampler=RandomSampler(range(40))) if sampled else order(shuffle=True)

    for of in (of_generator, of_script, partial(of_script, sampled=True)):
        assert of(1) == of(1) != of(2)
        assert sorted(of(1)) == list(range(40))
    assert of_generator(1) == order(shuffle=True, seed=1)


@pytest.mark.parametrize("amount", [-1.0, math.nan, math.inf])
def test_an_amount_that_means_nothing_is_refused(amount: float) -> None:
    loader = AdaptiveDataLoader(Numbered(8), batch_size=4)
    with pytest.raises(InvalidTraining, match=r"weigh\(\) was given .*at least 0"):
        loader.weigh(amount)


def test_passes_are_weighed_all_or_none() -> None:
    loader = AdaptiveDataLoader(Numbered(16), batch_size=8, max_local_bsz=4)
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = AdaptiveDataParallel(model, optimizer)
    for _ in remaining_epochs_until(1):
        for number, x in enumerate(loader):
            optimizer.zero_grad()
            if number == 0:
                loader.weigh(1.0)
                wrapped(x).mean().backward()
            else:
                with pytest.raises(InvalidTraining, match="1 of a step's 2 passes"):
                    wrapped(x).mean().backward()
                return
            optimizer.step()


def test_after_a_loop_was_left_early_the_next_one_begins_a_new_pass_and_is_no_longer() -> None:
    assert train(AdaptiveDataLoader(Numbered(40), batch_size=4), 3, stop_after=3) == [list(range(12))] * 3


def test_worker_processes_and_custom_collation() -> None:
    loader = AdaptiveDataLoader(
        Numbered(20), batch_size=6, shuffle=True, num_workers=1, collate_fn=lambda rows: torch.tensor(rows)
    )
    for samples in train(loader, 2):
        assert sorted(samples) == list(range(20))
    del loader


def test_evaluation_loops_see_everything_and_change_nothing() -> None:
    data = Numbered(23)
    training = AdaptiveDataLoader(data, batch_size=8)
    evaluation = AdaptiveDataLoader(data, batch_size=5)
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = AdaptiveDataParallel(model, optimizer)
    for _ in remaining_epochs_until(2):
        wrapped.train()
        for x in training:
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
        wrapped.eval()
        totals = Accumulator()
        with torch.no_grad():
            for x in evaluation:
                totals["count"] += len(x)
        with totals.synchronized():
            assert totals["count"] == 23
    assert get_core().position.progress == 46.0
    assert dist_core.current_dataloader() is training


@pytest.mark.parametrize("leaves_at", ["evaluation", "sums", "second loop"])
def test_a_trial_resumed_behind_a_loop_of_its_epoch_sees_the_sums_that_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves_at: str
) -> None:
    """What was summed before the place where it left is shown again; nothing counts twice."""
    monkeypatch.setenv("ELASTUNE_CHECKPOINT_DIR", str(tmp_path))
    seen: list[tuple[int, str, dict[str, float]]] = []

    def leave(place: str, epoch: int) -> None:
        if place == leaves_at and epoch == 1 and not left:
            left.append(place)
            get_core().leaving.ask()

    def train() -> None:
        reset_core()
        data = Numbered(24)
        training, evaluation = AdaptiveDataLoader(data, batch_size=8), AdaptiveDataLoader(data, batch_size=5)
        model = ConstantGradient()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = AdaptiveDataParallel(model, optimizer)
        totals = Accumulator()

        def pass_over(place: str, epoch: int) -> None:
            for x in training:
                optimizer.zero_grad()
                wrapped(x).mean().backward()
                totals[place] += len(x)
                optimizer.step()
                leave(place, epoch)

        for epoch in remaining_epochs_until(3):
            wrapped.train()
            pass_over("first loop", epoch)
            with totals.synchronized():
                seen.append((epoch, "trained", dict(totals)))
                del totals["first loop"]
            pass_over("second loop", epoch)
            wrapped.eval()
            with torch.no_grad():
                for x in evaluation:
                    totals["evaluated"] += len(x)
                    leave("evaluation", epoch)
            with totals.synchronized():
                leave("sums", epoch)
                get_core().leave_if_asked()
                seen.append((epoch, "evaluated", dict(totals)))
                totals.clear()

    left: list[str] = []
    with pytest.raises(ReplicaExit):
        train()
    before = list(seen)
    seen.clear()
    train()
    trained, evaluated = {"first loop": 24.0}, {"second loop": 24.0, "evaluated": 24.0}
    whole = [(epoch, *each) for epoch in range(3) for each in (("trained", trained), ("evaluated", evaluated))]
    assert before == whole[:3]
    # The list comes back as it was where the code that runs again begins.
    assert seen == whole


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("leaves_at", ["first evaluation", "training", "last evaluation"])
def test_what_code_between_loops_did_counts_once_where_the_trial_left_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves_at: str
) -> None:
    """That code runs again: a schedule that it steps, a state that it changes, and two evaluations under one name."""
    monkeypatch.setenv("ELASTUNE_CHECKPOINT_DIR", str(tmp_path))
    leaves = [leaves_at]

    def leave(place: str, epoch: int, number: int) -> None:
        if leaves == [place] and (epoch, number) == (1, 1):
            leaves.clear()
            get_core().leaving.ask()

    def train() -> list[tuple[float, Any, int]]:
        reset_core()
        seen = []
        training, evaluation = AdaptiveDataLoader(Numbered(24), batch_size=8), AdaptiveDataLoader(Numbered(23), 5)
        model = ConstantGradient()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        wrapped = AdaptiveDataParallel(model, optimizer, schedule)
        totals, epochs = Accumulator(), {"seen": 0}
        dist_core.register_state("epochs", FunctionState(lambda: dict(epochs), epochs.update))

        def evaluate(place: str, epoch: int) -> None:
            wrapped.eval()
            schedule.step()
            epochs["seen"] += 1
            with torch.no_grad():
                for number, x in enumerate(evaluation):
                    totals["count"] += len(x)
                    leave(place, epoch, number)

        for epoch in remaining_epochs_until(3):
            evaluate("first evaluation", epoch)
            wrapped.train()
            for number, x in enumerate(training):
                optimizer.zero_grad()
                wrapped(x).mean().backward()
                optimizer.step()
                leave("training", epoch, number)
            evaluate("another evaluation", epoch)
            evaluate("last evaluation", epoch)
            with totals.synchronized():
                seen.append((totals["count"], schedule.get_last_lr()[0], epochs["seen"]))
                totals.clear()
        return seen

    with pytest.raises(ReplicaExit):
        train()
    assert train() == [(69.0, 0.1 * 0.5**seen, seen) for seen in (3, 6, 9)]


def test_without_wrapped_models_the_loader_is_a_plain_one() -> None:
    loader = AdaptiveDataLoader(Numbered(7), batch_size=3)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6]]


def test_state_that_was_captured_puts_a_new_process_where_the_old_one_was() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, AdaptiveDataLoader, AdaptiveDataParallel]:
        torch.manual_seed(0)
        model = classifier()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = AdaptiveDataLoader(classes(), batch_size=32, shuffle=True)
        return model, optimizer, loader, AdaptiveDataParallel(model, optimizer)

    def run(parts: Any, epochs: int) -> nn.Module:
        model, optimizer, loader, wrapped = parts
        for _ in remaining_epochs_until(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
        finished: nn.Module = model
        return finished

    whole = run(build(), 4)
    reset_core()
    run(build(), 2)
    state = get_core().registry.capture()
    reset_core()
    parts = build()
    get_core().registry.restore(state)
    resumed = run(parts, 4)
    for mine, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_two_loaders_train_one_after_another_and_the_first_sets_the_pace() -> None:
    first = AdaptiveDataLoader(Numbered(20), batch_size=6, shuffle=True)
    second = AdaptiveDataLoader(Numbered(9), batch_size=4)
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = AdaptiveDataParallel(model, optimizer)
    seen: list[list[int]] = []
    for _ in remaining_epochs_until(2):
        for loader in (first, second, second):
            seen.append([])
            for x in loader:
                optimizer.zero_grad()
                wrapped(x).mean().backward()
                optimizer.step()
                seen[-1].extend(x.tolist())
    assert [sorted(samples) for samples in seen] == [list(range(20)), list(range(9)), list(range(9))] * 2
    assert get_core().position.progress == 40.0


def test_code_after_a_completed_loop_finds_its_variables_after_a_restart() -> None:
    captured: list[Any] = []

    def run(stop_after_loop: int | None) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = AdaptiveDataLoader(Numbered(12), batch_size=4)
        wrapped = AdaptiveDataParallel(model, optimizer)
        total = Accumulator()
        told: list[Any] = []
        for epoch in remaining_epochs_until(3):
            for x in loader:
                optimizer.zero_grad()
                loss = wrapped(x.float().unsqueeze(1)).square().mean()
                loss.backward()
                optimizer.step()
                total["samples"] += len(x)
            if epoch == stop_after_loop:
                captured.append(copy.deepcopy(get_core().registry.capture()))
                return told, []
            with total.synchronized():
                told.append(float(total["samples"]))
            assert math.isfinite(loss.item())
        state = model.state_dict().values()
        return told, [number for tensor in state for number in tensor.flatten().tolist()]

    told, weights = run(None)
    reset_core()
    run(1)
    reset_core()
    get_core().registry.restore(captured[0])
    told_again, weights_again = run(None)
    assert told_again == told
    assert weights_again == weights


def test_loops_that_an_epoch_has_completed_are_not_run_again_after_a_restart() -> None:
    captured: dict[str, Any] = {}

    def run(stop: int | None) -> list[tuple[int, list[int]]]:
        first = AdaptiveDataLoader(Numbered(8), batch_size=4, drop_last=True)
        second = AdaptiveDataLoader(Numbered(6), batch_size=2)
        model = ConstantGradient()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = AdaptiveDataParallel(model, optimizer)
        seen: list[tuple[int, list[int]]] = []
        for _ in remaining_epochs_until(2):
            for number, loader in enumerate((first, second)):
                for x in loader:
                    if len(seen) == stop:
                        captured.update(copy.deepcopy(get_core().registry.capture()))
                        return seen
                    optimizer.zero_grad()
                    wrapped(x).mean().backward()
                    optimizer.step()
                    seen.append((number, x.tolist()))
        return seen

    whole = run(None)
    reset_core()
    begun = run(3)
    reset_core()
    get_core().registry.restore(captured)
    # One pass over the first loop's body, which changes nothing, for what stands after that loop.
    assert begun == whole[:3] and run(None) == whole


def test_loaders_are_not_trained_on_at_the_same_time() -> None:
    first, second = (AdaptiveDataLoader(Numbered(8), batch_size=4) for _ in range(2))
    model = ConstantGradient()
    AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    next(iter(remaining_epochs_until(1)))
    with pytest.raises(InvalidTraining, match="starts while another one runs"):
        next(zip(first, second, strict=True))
