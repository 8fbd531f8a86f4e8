"""The training core in one plain process: what a user's loop may do, and what it gets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.errors import InvalidTraining
from dist_core.trial.current import get_core, reset_core
from tests.support.small_trials import ConstantGradient, Numbered, classes, classifier

pytestmark = pytest.mark.usefixtures("fresh_core")


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
