"""The training core in one plain process: what a user's loop may do, and what it gets."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.utils.data import Dataset, IterableDataset, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import dist_core
from dist_core import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.errors import InvalidTraining, ReplicaExit
from dist_core.state.states import FunctionState
from dist_core.trial.core import get_core, reset_core
from dist_core.trial.restart import run_training


@pytest.fixture(autouse=True)
def fresh_core() -> Iterator[None]:
    reset_core()
    torch.manual_seed(0)
    yield
    reset_core()


class Numbered(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class ConstantGradient(nn.Module):
    """Its loss has the gradient 1 for every example: each optimizer step at rate 1 moves the weight by -1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.ones_like(x, dtype=torch.float32)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def classes(count: int = 200) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x[:, :3].argmax(dim=1)))


def test_a_fixed_batch_trains_as_plain_pytorch_does() -> None:
    """Same batches, same order: the weights are the same bit for bit as without any of our classes."""
    data = classes()
    model = classifier()
    reference = classifier()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    loader = AdaptiveDataLoader(data, batch_size=32, shuffle=True)
    wrapped = AdaptiveDataParallel(model, optimizer)
    for _ in remaining_epochs_until(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            plain.zero_grad()
            nn.functional.cross_entropy(reference(x), y).backward()
            plain.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert get_core().position.steps == 3 * 7


def zero_first(model: Any, optimizer: Any, backward: Callable[[], None]) -> None:
    optimizer.zero_grad()
    backward()
    optimizer.step()


def zero_last(model: Any, optimizer: Any, backward: Callable[[], None]) -> None:
    backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def zero_by_model(model: Any, optimizer: Any, backward: Callable[[], None]) -> None:
    model.zero_grad()
    backward()
    optimizer.step()


def zero_by_inner_model(model: Any, optimizer: Any, backward: Callable[[], None]) -> None:
    model.module.zero_grad()
    backward()
    optimizer.step()


@pytest.mark.parametrize("style", [zero_first, zero_last, zero_by_model, zero_by_inner_model])
def test_measured_and_accumulated_steps_apply_the_mean_gradient_once(style: Any) -> None:
    """Early steps are measured, which splits the batch in two; the weight moves by exactly 1 each time all the same."""
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = AdaptiveDataLoader(Numbered(40), batch_size=5)
    loader.autoscale_batch_size(6, local_bsz_bounds=(1, 6), gradient_accumulation=True)
    wrapped = AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    seen = []
    for _ in remaining_epochs_until(1):
        for x in loader:
            style(wrapped, optimizer, lambda x=x: wrapped(x).mean().backward())
            seen.append(round(-model.weight.item(), 5))
    assert seen[-1] == get_core().position.steps
    assert set(seen) == set(range(int(seen[-1]) + 1)) - ({0} if seen[0] else set())


@pytest.mark.parametrize("style", [zero_first, zero_last])
def test_gradients_are_accumulated_to_the_mean_of_the_whole_batch(style: Any) -> None:
    """Micro-batches of uneven sizes; the gradient of example i is i, so the mean tells whether each counted once."""

    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    model = Numbers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = AdaptiveDataLoader(Numbered(100), batch_size=8)
    loader.autoscale_batch_size(40, local_bsz_bounds=(1, 10), gradient_accumulation=True)
    wrapped = AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    batches: list[list[int]] = [[]]
    moved: list[float] = []
    core = get_core()
    for _ in remaining_epochs_until(2):
        for x in loader:
            assert core.adaptation is not None
            core.adaptation.use(9, 3)
            before = model.weight.item()
            batches[-1].extend(x.tolist())
            style(wrapped, optimizer, lambda x=x: wrapped(x.float()).mean().backward())
            if wrapped.is_last_micro_batch:
                moved.append(before - model.weight.item())
                batches.append([])
    assert max(len(batch) for batch in batches) == 36
    for batch, step in zip(batches, moved, strict=False):
        assert step == pytest.approx(sum(batch) / len(batch), rel=1e-5)
    assert sorted(number for batch in batches for number in batch)[:2] == [0, 0]


def test_a_learning_rate_scheduler_fits_before_and_after_wrapping() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = AdaptiveDataLoader(classes(), batch_size=50)
    wrapped = AdaptiveDataParallel(model, optimizer, before)
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
    for _ in remaining_epochs_until(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
        before.step()
        after.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("samples", [403, 400, 171])
def test_a_one_cycle_schedule_stays_at_its_end_when_the_last_step_is_worth_several(samples: int) -> None:
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 2 * math.ceil(samples / 8)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
    loader = AdaptiveDataLoader(Numbered(samples), batch_size=8)
    loader.autoscale_batch_size(64)
    wrapped = AdaptiveDataParallel(model, optimizer, schedule, scaling_rule="none", noise_every=1000)
    core = get_core()
    for _ in remaining_epochs_until(2):
        for x in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: (64, 0)  # type: ignore[method-assign]
            for _ in range(4 - wrapped.noise.samples):
                wrapped.noise.update(1.0, 64.0, work=1.0)
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            schedule.step()
    assert total - 8 <= schedule.last_epoch <= total


def schedules_of_torch(total: int) -> dict[str, Callable[[torch.optim.Optimizer], Any]]:
    """Each as a script makes it that takes so many steps at its initial batch size."""
    return {
        "one cycle": lambda each: lr.OneCycleLR(each, max_lr=0.2, total_steps=total),
        "cosine": lambda each: lr.CosineAnnealingLR(each, total),
        "warm restarts": lambda each: lr.CosineAnnealingWarmRestarts(each, total // 3),
        "sequential": lambda each: lr.SequentialLR(
            each, [lr.LinearLR(each, 0.1, 1.0, 10), lr.CosineAnnealingLR(each, total - 10)], milestones=[10]
        ),
        "chained": lambda each: lr.ChainedScheduler([lr.ConstantLR(each, 0.5, 9), lr.ExponentialLR(each, 0.99)], each),
        "lambda": lambda each: lr.LambdaLR(each, lambda step: 1.0 / (1.0 + step)),
        "multiplicative": lambda each: lr.MultiplicativeLR(each, lambda step: 0.99),
        "cyclic": lambda each: lr.CyclicLR(each, 0.05, 0.2, step_size_up=7),
        "polynomial": lambda each: lr.PolynomialLR(each, total),
        "step": lambda each: lr.StepLR(each, 9),
        "multi-step": lambda each: lr.MultiStepLR(each, [total // 3, 2 * total // 3]),
    }


def steps_made(schedule: Any) -> int:
    parts = schedule._schedulers if isinstance(schedule, lr.ChainedScheduler) else [schedule]
    return int(parts[-1].last_epoch)


@pytest.mark.parametrize("by_epoch", [False, True])
@pytest.mark.parametrize("name", schedules_of_torch(50))
def test_a_schedule_is_where_it_would_be_with_small_steps_although_the_batch_adapts(name: str, by_epoch: bool) -> None:
    """Its rate is that of as many steps at the initial batch size as were gained, or of the epochs that ended."""
    samples, epochs = 200, 2
    total = epochs if by_epoch else epochs * samples // 8
    make = schedules_of_torch(epochs * samples // 8)[name]
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = make(optimizer)
    loader = AdaptiveDataLoader(Numbered(samples), batch_size=8)
    loader.autoscale_batch_size(32)
    wrapped = AdaptiveDataParallel(model, optimizer, schedule, scaling_rule="none", noise_every=1000)
    core = get_core()
    rates = {}
    for _ in remaining_epochs_until(epochs):
        for x in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: (32, 0)  # type: ignore[method-assign]
            for _ in range(4 - wrapped.noise.samples):
                wrapped.noise.update(1.0, 64.0, work=1.0)
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            if not by_epoch:
                schedule.step()
                rates[steps_made(schedule)] = optimizer.param_groups[0]["lr"]
        if by_epoch:
            schedule.step()
            rates[steps_made(schedule)] = optimizer.param_groups[0]["lr"]
    small = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.0)
    expected = make(small)
    rates_of_small = {}
    for step in range(1, total + 1):
        small.step()
        expected.step()
        rates_of_small[step] = small.param_groups[0]["lr"]
    assert rates == pytest.approx({step: rates_of_small[step] for step in rates})
    assert total - 4 <= max(rates) <= total
    assert by_epoch or len(rates) < 0.7 * total


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_schedule_stepped_within_the_loop_follows_progress(adaptive: bool) -> None:
    """At four times the batch, whose every step is worth three small ones, the schedule moves three steps at a time."""
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step))
    by_hand = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), lambda step: 1.0)
    loader = AdaptiveDataLoader(Numbered(400), batch_size=8)
    if adaptive:
        loader.autoscale_batch_size(32)
    wrapped = AdaptiveDataParallel(model, optimizer, schedule, scaling_rule="none", noise_every=1000)
    core = get_core()
    steps = 0
    for _ in remaining_epochs_until(1):
        for x in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: (32, 0) if adaptive else None  # type: ignore[method-assign]
            for _ in range(4 - wrapped.noise.samples):
                wrapped.noise.update(1.0, 64.0, work=1.0)
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            schedule.step()
            if wrapped.is_last_micro_batch:
                by_hand.optimizer.step()
                by_hand.step()
                steps += 1
    assert by_hand.last_epoch == steps == core.position.steps
    if adaptive:
        assert 2.0 < wrapped.gain <= (8 + 1) / (8 / 4 + 1)
        assert schedule.last_epoch == pytest.approx(core.position.progress / 8, abs=3)
        assert schedule.last_epoch > 1.5 * steps
    else:
        assert schedule.last_epoch == steps == 50
    schedule.step()
    assert schedule.last_epoch == pytest.approx(core.position.progress / 8 + 1, abs=3)


def test_two_models_with_one_optimizer_scale_its_rate_once() -> None:
    first, second = ConstantGradient(), ConstantGradient()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1.0)
    loader = AdaptiveDataLoader(Numbered(120), batch_size=4)
    loader.autoscale_batch_size(8)
    one = AdaptiveDataParallel(first, optimizer, scaling_rule="linear", noise_every=1000)
    two = AdaptiveDataParallel(second, optimizer, scaling_rule="linear", noise_every=1000)
    core = get_core()
    moved: set[float] = set()
    for _ in remaining_epochs_until(1):
        for x in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: (8, 0)  # type: ignore[method-assign]
            before = first.weight.item(), second.weight.item()
            optimizer.zero_grad()
            (one(x).mean() + two(x).mean()).backward()
            optimizer.step()
            if one.is_last_micro_batch:
                assert one.stepped
                assert two.stepped
                moved.add(round(before[0] - first.weight.item(), 5))
                assert before[0] - first.weight.item() == before[1] - second.weight.item()
    assert max(moved) == 2.0


def test_a_model_built_in_another_order_is_refused_by_name() -> None:
    class Pair(nn.Module):
        def __init__(self, names: tuple[str, str]) -> None:
            super().__init__()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.zeros(3)))

    def build(*names: str) -> None:
        model = Pair((names[0], names[1]))
        AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))

    build("a", "b")
    state = get_core().registry.capture()
    reset_core()
    get_core().registry.restore(state)
    with pytest.raises(InvalidTraining, match=r"parameter 0 is 'b \(3,\)' here and 'a \(3,\)' in the trial"):
        build("b", "a")


def test_a_single_replica_waits_for_nobody() -> None:
    """For the throughput model its gradient takes the whole step, wherever the user's code dawdles."""
    loader = AdaptiveDataLoader(Numbered(64), batch_size=8)
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = AdaptiveDataParallel(model, optimizer)
    for _ in remaining_epochs_until(2):
        for x in loader:
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            time.sleep(0.002)
    adaptation = get_core().adaptation
    assert adaptation is not None
    rows = adaptation.profile.observations()
    assert rows
    for row in rows:
        assert row.gradient_seconds == row.optim_seconds


def test_a_gradient_scaler_changes_nothing() -> None:
    results = []
    for scaled in (False, True):
        reset_core()
        torch.manual_seed(0)
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        loader = AdaptiveDataLoader(classes(), batch_size=20, shuffle=True)
        loader.autoscale_batch_size(21, local_bsz_bounds=(1, 21))
        wrapped = AdaptiveDataParallel(model, optimizer, mp_scaler=scaler, scaling_rule="none")
        for _ in remaining_epochs_until(2):
            for x, y in loader:
                optimizer.zero_grad()
                scaler.scale(nn.functional.cross_entropy(wrapped(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
        adaptation = get_core().adaptation
        assert adaptation is not None
        weight = next(model.parameters())
        results.append((weight.detach().clone(), wrapped.noise.averages))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-3)


def train(loader: AdaptiveDataLoader, epochs: int, *, stop_after: int | None = None) -> list[list[int]]:
    """Samples by epoch; ``stop_after`` batches the loop is left."""
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = AdaptiveDataParallel(model, optimizer)
    seen = []
    for _ in remaining_epochs_until(epochs):
        epoch: list[int] = []
        for number, x in enumerate(loader):
            if number == stop_after:
                break
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            epoch.extend(x.tolist())
        seen.append(epoch)
    return seen


def test_every_sample_once_an_epoch() -> None:
    for samples in train(AdaptiveDataLoader(Numbered(37), batch_size=8, shuffle=True), 3):
        assert sorted(samples) == list(range(37))


def test_drop_last_leaves_out_the_rest() -> None:
    loader = AdaptiveDataLoader(Numbered(10), batch_size=4, drop_last=True)
    assert len(loader) == 2
    assert train(loader, 2) == [list(range(8)), list(range(8))]


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
            get_core().leaving._asked = True

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
    assert seen == whole[2:]


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
            get_core().leaving._asked = bool(leaves.pop())

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
    assert train() == [(69.0, 0.1 * 0.5**seen, seen) for seen in (6, 9)]


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


def run_out_of_memory(above: int, **bounds: Any) -> tuple[list[int], list[float]]:
    """Batch sizes of the steps that counted, and the weight after each; more than ``above`` examples do not fit."""
    core = get_core()
    batches: list[int] = []
    weights: list[float] = []

    def code() -> None:
        model = ConstantGradient()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = AdaptiveDataLoader(Numbered(600), batch_size=8)
        loader.autoscale_batch_size(64, **bounds)
        wrapped = AdaptiveDataParallel(model, optimizer, scaling_rule="none", noise_every=1000)
        for _ in remaining_epochs_until(2):
            for x in loader:
                adaptation = core.adaptation
                assert adaptation is not None
                proposal = (min(core.position.steps + 8, adaptation.bounds.largest_atomic), 0)
                adaptation.proposal = lambda *_, proposal=proposal: proposal  # type: ignore[method-assign]
                if len(x) > above:
                    raise torch.OutOfMemoryError("tried to allocate too much")
                optimizer.zero_grad()
                wrapped(x).mean().backward()
                optimizer.step()
                batches.append(len(x))
                if wrapped.is_last_micro_batch:
                    weights.append(model.weight.item())

    run_training(core, code)
    return batches, weights


def test_running_out_of_memory_lowers_the_bound_and_loses_nothing() -> None:
    batches, weights = run_out_of_memory(20)
    assert 13 <= max(batches) <= 20
    # Each step that counted moved the weight by one: none was lost, none counted twice.
    assert weights == [-float(number + 1) for number in range(len(weights))]
    assert get_core().position.epoch == 2
    assert sum(batches) >= 1200
    # The epoch in which it happened was trained to its end.
    assert get_core().position.progress_shift < 16


def test_running_out_of_memory_at_the_smallest_batch_is_refused_in_words() -> None:
    with pytest.raises(InvalidTraining, match="out of memory with 8 examples a pass, and no smaller batch is allowed"):
        run_out_of_memory(7, local_bsz_bounds=(8, 64))


def as_anything(value: Any) -> Any:
    """What a script without types may pass."""
    return value


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Numbers in an order that depends on the pass, as a shuffling stream's does."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0
        self.given_out = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            self.given_out += 1
            yield (number + self.epoch) % self.length


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_dataset_gives_every_sample_once_a_pass(workers: int) -> None:
    loader = AdaptiveDataLoader(Stream(23), batch_size=5, num_workers=workers)
    epochs = train(loader, 3)
    assert [sorted(epoch) for epoch in epochs] == [list(range(23))] * 3
    assert epochs[1][0] == 1
    with pytest.raises(TypeError, match="Stream has no length"):
        len(loader)


def test_a_stream_is_read_once_although_plans_change() -> None:
    stream = Stream(4000)
    loader = AdaptiveDataLoader(stream, batch_size=10, epoch_size=4000)
    loader.autoscale_batch_size(40, gradient_accumulation=True)
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = AdaptiveDataParallel(model, optimizer)
    core = get_core()
    seen: list[int] = []
    for _ in remaining_epochs_until(1):
        for x in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: (10 + core.position.steps % 3, core.position.steps // 7 % 2)  # type: ignore[method-assign]
            seen.extend(x.tolist())
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            if len(seen) > 3000:
                break
    assert seen == list(range(len(seen)))
    assert stream.given_out <= len(seen) + 41


def test_a_stream_that_gives_nothing_is_refused() -> None:
    with pytest.raises(InvalidTraining, match="gave nothing for a whole pass"):
        train(AdaptiveDataLoader(Stream(0), batch_size=5), 1)


def test_drop_last_of_a_stream() -> None:
    assert train(AdaptiveDataLoader(Stream(10), batch_size=4, drop_last=True), 2) == [
        list(range(8)),
        [*range(1, 9)],
    ]


def test_a_sampler_sets_the_order_of_each_pass() -> None:
    weights = [0.0, 1.0, 0.0, 1.0]
    sampler = WeightedRandomSampler(weights, 40, generator=torch.Generator())
    epochs = train(AdaptiveDataLoader(Numbered(4), batch_size=8, sampler=sampler), 2)
    assert [len(epoch) for epoch in epochs] == [40, 40]
    assert {number for epoch in epochs for number in epoch} == {1, 3}
    assert epochs[0] != epochs[1]
    reset_core()
    again = train(AdaptiveDataLoader(Numbered(4), batch_size=8, sampler=WeightedRandomSampler(weights, 40)), 2)
    assert again == epochs


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
    assert told_again == told[1:]
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
    assert begun + run(None)[1:] == whole


def test_loaders_are_not_trained_on_at_the_same_time() -> None:
    first, second = (AdaptiveDataLoader(Numbered(8), batch_size=4) for _ in range(2))
    model = ConstantGradient()
    AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    next(iter(remaining_epochs_until(1)))
    with pytest.raises(InvalidTraining, match="starts while another one runs"):
        next(zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: AdaptiveDataLoader(Numbered(0), batch_size=1), "has 0 samples"),
        (lambda: AdaptiveDataLoader(Numbered(5), batch_size=0), "batch_size is 0"),
        (lambda: AdaptiveDataLoader(Unsized(), batch_size=1), "Unsized has __getitem__ but no length"),
        (lambda: AdaptiveDataLoader(as_anything(7), batch_size=1), "int has neither __getitem__"),
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
            "does not draw single indices",
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
    with pytest.raises(InvalidTraining, match="needs second moments as Adam keeps them, and SGD is not"):
        AdaptiveDataParallel(model, optimizer, preconditioned=True)
    with pytest.raises(InvalidTraining, match="noise_every is 0"):
        AdaptiveDataParallel(model, optimizer, noise_every=0)
    with pytest.raises(InvalidTraining, match="the checkpoint interval is 0"):
        dist_core.set_checkpoint_interval(0)


def test_epoch_loops_do_not_nest() -> None:
    outer = iter(remaining_epochs_until(1))
    assert next(outer) == 0
    with pytest.raises(InvalidTraining, match="inside itself"):
        next(iter(remaining_epochs_until(1)))


def test_every_public_name_can_be_imported() -> None:
    assert dist_core.__all__ == sorted(dist_core.__all__)
    for name in dist_core.__all__:
        assert getattr(dist_core, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dist_core.nothing
