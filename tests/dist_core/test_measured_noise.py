"""The noise scale as training measures it: against a known covariance, and against AdaptDL's estimator."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.gradients.noise.norms import AdamPreconditioner, in_memory_order, segments_of, squared_norm
from dist_core.trial.current import get_core, reset_core
from tests.support.ranks import run_ranks

DIMENSION = 50
BATCH = 24
TRUE_GRADIENT = 0.3


class KnownGradients(Dataset[torch.Tensor]):
    """Example i is its own gradient: mean 0.3 and standard deviation 2 in each of 50 directions."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.x = TRUE_GRADIENT + 2.0 * torch.randn(count, DIMENSION, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(DIMENSION - 7))
        self.second = nn.Parameter(torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.cat([self.first, self.second])


def measured(adam: bool, batch: int, steps: int, reduction: str = "all_reduce") -> list[tuple[float, float]]:
    """(sqr, trace) of each measured step."""
    reset_core()
    model = Linear()
    optimizer: torch.optim.Optimizer
    if adam:
        # Well past its warm-up, at rate 0; the loop below keeps its second moments at values that are known.
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(1000.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = AdaptiveDataLoader(KnownGradients(batch * steps), batch_size=batch)
    if os.environ["WORLD_SIZE"] == "1":
        # One replica splits its batches to measure, and does so only where batch sizes adapt.
        loader.autoscale_batch_size(batch + 1, local_bsz_bounds=(1, batch + 1))
    wrapped = AdaptiveDataParallel(model, optimizer, noise_every=1, reduction=reduction)
    seen: list[tuple[float, float]] = []
    update = wrapped.noise.update

    def record(sqr: float, trace: float, *, work: float) -> bool:
        seen.append((sqr, trace))
        return update(sqr, trace, work=work)

    wrapped.noise.update = record  # type: ignore[method-assign]
    core = get_core()
    for _ in remaining_epochs_until(1):
        for x in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: None  # type: ignore[method-assign]
            if adam:
                for parameter, moment in ((model.first, 4.0), (model.second, 9.0)):
                    correction = 1.0 - 0.999 ** (1000 + core.position.steps)
                    optimizer.state[parameter]["exp_avg_sq"].fill_(moment * correction)
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
    return seen


def test_lossy_reductions_measure_what_the_exact_one_does() -> None:
    [exact, _] = run_ranks(measured, 2, False, 13, 40)
    assert len(exact) > 30
    for reduction in ("power_sgd", "bf16", "fp16"):
        [lossy, _] = run_ranks(measured, 2, False, 13, 40, reduction)
        for mine, theirs in zip(lossy, exact, strict=True):
            assert mine == pytest.approx(theirs, rel=0.01), reduction


def test_replicas_without_examples_are_no_parts_of_the_batch() -> None:
    results = run_ranks(measured, 4, False, 3, 150)
    assert len(results[0]) > 140
    assert_unbiased([sqr for sqr, _ in results[0]], DIMENSION * TRUE_GRADIENT**2)
    assert_unbiased([trace for _, trace in results[0]], DIMENSION * 4.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_are_summed_in_single(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for gradient in (torch.randn(100_003, generator=generator) * 1e-2, torch.full((16384,), 600.0)):
        half = gradient.to(dtype)
        assert float(squared_norm(half)) == pytest.approx(float(half.double().square().sum()), rel=1e-5)


def assert_unbiased(values: list[float], truth: float) -> None:
    error = torch.tensor(values).std().item() / math.sqrt(len(values))
    assert abs(sum(values) / len(values) - truth) < 3.0 * error


@pytest.mark.parametrize(
    ("world_size", "adam", "steps"),
    [
        (1, False, 150),
        (2, False, 150),
        (1, True, 150),
        (3, True, 150),
        # Some local batches are single examples.
        pytest.param(8, False, 400, marks=pytest.mark.slow),
        pytest.param(3, False, 400, marks=pytest.mark.slow),
        pytest.param(3, True, 400, marks=pytest.mark.slow),
    ],
)
def test_training_measures_the_true_covariance(world_size: int, adam: bool, steps: int) -> None:
    """13 examples a batch: local batches are uneven for all but one replica."""
    results = run_ranks(measured, world_size, adam, 13, steps)
    assert all(result == results[0] for result in results)
    assert len(results[0]) > steps - 5
    weights = torch.ones(DIMENSION)
    if adam:
        weights = torch.tensor([1 / 4.0] * (DIMENSION - 7) + [1 / 9.0] * 7, dtype=torch.float64)
    # Against the data as drawn: its own mean and covariance are known exactly.
    x = KnownGradients(13 * steps).x.double()
    assert_unbiased([sqr for sqr, _ in results[0]], float((weights * TRUE_GRADIENT**2).sum()))
    assert_unbiased([trace for _, trace in results[0]], float((weights * x.var(dim=0)).sum()))


def noted_in(rows: list[tuple[float, float]]) -> Callable[..., bool]:
    """Stands for the estimator's update: keeps what was measured."""

    def note(sqr: float, trace: float, *, work: float) -> bool:
        rows.append((sqr, trace))
        return True

    return note


def both(adam: bool) -> list[tuple[float, float, float, float]]:
    """What training measures and what AdaptDL's formulas give, step by step, on the same gradients."""
    reset_core()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(480, 30, generator=generator), torch.randint(5, (480,), generator=generator))
    model = nn.Sequential(nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, 5))
    parameters = list(model.parameters())
    groups: list[dict[str, Any]]
    groups = [{"params": parameters[:2], "weight_decay": 0.01}, {"params": parameters[2:]}]
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.Adam(groups, lr=1e-3) if adam else torch.optim.SGD(groups, lr=0.05)
    loader = AdaptiveDataLoader(data, batch_size=BATCH, shuffle=True)
    wrapped = AdaptiveDataParallel(model, optimizer, noise_every=1, bucket_cap_mb=0.002)
    ours: list[tuple[float, float]] = []
    wrapped.noise.update = noted_in(ours)  # type: ignore[method-assign]
    core = get_core()
    reference: list[tuple[float, float]] = []
    for _ in remaining_epochs_until(2):
        for x, y in loader:
            if core.position.steps < 5 or not adam:
                preconditioners = [torch.ones_like(parameter) for parameter in parameters]
            if adam and core.position.steps >= 5:
                preconditioners = [
                    (optimizer.state[p]["exp_avg_sq"].sqrt() / math.sqrt(1 - 0.999**core.position.steps)).add_(1e-8)
                    for p in parameters
                ]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            mine = [p.grad.detach().clone() / c for p, c in zip(parameters, preconditioners, strict=True)]  # type: ignore[union-attr]
            optimizer.zero_grad()
            local = sum(float(gradient.double().square().sum()) for gradient in mine)
            gathered = core.generation.group.gather_json([local, [gradient.flatten().tolist() for gradient in mine]])
            count = core.generation.group.world_size
            mean = [
                torch.tensor([rows[1][index] for rows in gathered], dtype=torch.float64).mean(dim=0)
                for index in range(len(mine))
            ]
            total = sum(float(gradient.square().sum()) for gradient in mean)
            mean_local = sum(rows[0] for rows in gathered) / count
            scale = 1.0
            reference.append(
                ((count * total - mean_local) / (count - 1), (mean_local - total) * scale / (count - 1) * BATCH)
            )
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
    skipped = 5 if adam else 0
    return [(*mine, *theirs) for mine, theirs in zip(ours, reference[skipped:], strict=False)]


@pytest.mark.parametrize(("world_size", "adam"), [(2, True), (4, False), (4, True)])
def test_the_estimate_is_adaptdls(world_size: int, adam: bool) -> None:
    rows = run_ranks(both, world_size, adam)[0]
    assert len(rows) > 30
    for sqr, trace, their_sqr, their_trace in rows:
        # sqr is a difference of two nearly equal norms: compared on the scale of what is subtracted.
        assert sqr == pytest.approx(their_sqr, abs=1e-4 * (abs(their_sqr) + their_trace / BATCH))
        assert trace == pytest.approx(their_trace, rel=1e-4)


def not_a_number(where: int) -> tuple[int, float]:
    reset_core()
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = AdaptiveDataLoader(KnownGradients(120), batch_size=8)
    wrapped = AdaptiveDataParallel(model, optimizer, noise_every=1)
    warnings: list[str] = []
    core = get_core()
    core.news.warn = lambda message: warnings.append(message)  # type: ignore[method-assign]
    for _ in remaining_epochs_until(1):
        for x in loader:
            optimizer.zero_grad()
            loss = wrapped(x).mean()
            (loss * float("nan") if core.position.steps == where else loss).backward()
            optimizer.step()
    assert len(warnings) == 1
    assert f"the gradient of step {where} was not finite" in warnings[0]
    return wrapped.noise.samples, wrapped.noise.averages[1]


def test_gradients_that_are_not_numbers_are_no_measurements() -> None:
    for samples, trace in run_ranks(not_a_number, 2, 4):
        assert samples == 13
        assert math.isfinite(trace)


def two_backward_passes(second_model: bool) -> list[tuple[float, float]]:
    """A GAN's discriminator: two backward passes before its step, and gradients through it after its step."""
    reset_core()
    model, other = Linear(), Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    second = torch.optim.SGD(other.parameters(), lr=0.0)
    loader = AdaptiveDataLoader(KnownGradients(1600), batch_size=8)
    wrapped = AdaptiveDataParallel(model, optimizer, noise_every=1)
    generator = AdaptiveDataParallel(other, second) if second_model else None
    seen: list[tuple[float, float]] = []
    wrapped.noise.update = noted_in(seen)  # type: ignore[method-assign]
    for _ in remaining_epochs_until(1):
        for x in loader:
            optimizer.zero_grad()
            wrapped(x[: len(x) // 2]).mean().backward()
            wrapped(x[len(x) // 2 :]).mean().backward()
            optimizer.step()
            if generator is not None:
                second.zero_grad()
                (wrapped(x).mean() * 100.0 + generator(x).mean()).backward()
                second.step()
    return seen


@pytest.mark.parametrize("second_model", [False, True])
def test_two_backward_passes_and_another_models_gradients(second_model: bool) -> None:
    """The gradient is the sum over two halves of two examples each: mean 2 x 0.3, variance of a sum of two means."""
    rows = run_ranks(two_backward_passes, 2, second_model)[0]
    assert_unbiased([sqr for sqr, _ in rows], DIMENSION * (2 * TRUE_GRADIENT) ** 2)
    # Each half is two of the replica's four examples: its gradient varies twice as much, and there are two of them.
    assert_unbiased([trace for _, trace in rows], 4 * float(KnownGradients(1600).x.double().var(dim=0).sum()))


def test_norms_are_exact_where_plain_sums_are_not() -> None:
    tensor = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    truth = float(tensor.double().square().sum())
    assert float(squared_norm(tensor)) == pytest.approx(truth, rel=1e-7)


def test_memory_order_is_that_of_buckets() -> None:
    dense = torch.arange(24.0).view(2, 3, 4)
    assert in_memory_order(dense.permute(2, 0, 1)).tolist() == list(range(24))
    assert in_memory_order(dense.to(memory_format=torch.contiguous_format)).tolist() == list(range(24))
    assert in_memory_order(dense[:, :2]).tolist() == dense[:, :2].flatten().tolist()


def test_slices_of_a_preconditioned_norm_add_up() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    for _ in range(6):
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    preconditioner = AdamPreconditioner([optimizer])
    assert preconditioner.ready
    segments = segments_of(model.parameters())
    buffer = torch.randn(segments[-1].stop)
    whole = float(preconditioner.squared_norm(buffer, segments, 0, buffer.numel()))
    cuts = [0, 7, 333, 600, 631, buffer.numel()]
    parts = [float(preconditioner.squared_norm(buffer, segments, a, b)) for a, b in pairwise(cuts)]
    assert sum(parts) == pytest.approx(whole, rel=1e-6)
    expected = 0.0
    for segment in segments:
        state = optimizer.state[segment.parameter]
        divisor = (state["max_exp_avg_sq"] / (1 - 0.999**6)).sqrt() + 1e-8
        expected += float((buffer[segment.start : segment.stop] / divisor.flatten()).double().square().sum())
    assert whole == pytest.approx(expected, rel=1e-5)
