"""What only a GPU shows: that training on one is what it is on a CPU, alone and shared by replicas."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.device import device_of
from dist_core.trial.current import get_core, reset_core
from tests.support.gpus import EXACT, GPUS, LOSSY, ON_CPU, assert_close, settle_on_a_place, trained, two_gpus
from tests.support.perceptrons import MODELS, train
from tests.support.ranks import run_ranks
from tests.support.small_trials import measured_noise, running_mean

pytestmark = pytest.mark.gpu

# --------------------------------------------------------------------- as on a CPU


@pytest.mark.parametrize("model", MODELS)
def test_one_gpu_trains_as_a_cpu_does(model: str, alone: Any, gpu: torch.device) -> None:
    assert_close(train(model, "all_reduce", 11, place=str(gpu)), alone(model))


@pytest.mark.parametrize("model", MODELS)
def test_replicas_that_share_a_gpu_train_as_one_process_does(model: str, alone: Any) -> None:
    for weights in run_ranks(trained, 2, model, "all_reduce", False, True):
        assert_close(weights, alone(model))


@pytest.mark.parametrize("reduction", [name for name in EXACT if name != "all_reduce"])
def test_every_exact_reduction_goes_through_the_hosts_memory(reduction: str, alone: Any) -> None:
    for weights in run_ranks(trained, 3, "perceptron", reduction, False, True):
        assert_close(weights, alone("perceptron"))


def _trained_seldom_measured(reduction: str) -> list[float]:
    return train("perceptron", reduction, 11, place=str(settle_on_a_place()), noise_every=1000)


@pytest.mark.parametrize("reduction", LOSSY)
def test_replicas_agree_whatever_a_reduction_leaves_out(reduction: str) -> None:
    first, second = run_ranks(_trained_seldom_measured, 2, reduction)
    assert first == second
    assert first != run_ranks(_trained_seldom_measured, 2, "all_reduce")[0]


def test_clipping_sees_the_whole_gradient(alone: Any) -> None:
    for weights in run_ranks(trained, 2, "perceptron", "all_reduce", True, True):
        assert_close(weights, alone("perceptron", clip=True))


def _in_a_stream_of_its_own() -> list[float]:
    place = settle_on_a_place()
    own: Any = contextlib.nullcontext() if ON_CPU else torch.cuda.stream(torch.cuda.Stream(place))
    with own:
        return train("perceptron", "all_reduce", 11, place=str(place))


def test_a_script_may_train_in_a_stream_of_its_own(alone: Any) -> None:
    for weights in run_ranks(_in_a_stream_of_its_own, 2):
        assert_close(weights, alone("perceptron"))


# --------------------------------------------------------------------- noise and times


def _noise_of_a_rank(adam: bool) -> tuple[float, float]:
    return measured_noise(settle_on_a_place(), adam=adam)


@pytest.mark.parametrize("adam", [False, True], ids=["SGD", "Adam"])
def test_one_gpu_measures_the_noise_that_a_cpu_does(adam: bool, gpu: torch.device) -> None:
    # The last steps' norms are still on their way.
    assert measured_noise(gpu, adam=adam) == pytest.approx(measured_noise(torch.device("cpu"), adam=adam), rel=0.1)


@pytest.mark.parametrize("adam", [False, True], ids=["SGD", "Adam"])
def test_replicas_agree_on_the_noise(adam: bool) -> None:
    first, second = run_ranks(_noise_of_a_rank, 2, adam)
    assert first == second
    assert min(first) > 0.0


class Slow(nn.Module):
    """Takes a GPU far longer than the call that gives it the work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512) / 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = torch.tanh(x @ self.weight)
        return x


def test_step_times_are_those_of_the_device(gpu: torch.device) -> None:
    model = Slow().to(gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    examples = 64 if ON_CPU else 4096
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(examples * 30, 512)), batch_size=examples)
    wrapped = AdaptiveDataParallel(model, optimizer)
    for _ in remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x.to(gpu)).mean().backward()
            optimizer.step()
    adaptation = get_core().adaptation
    assert adaptation is not None
    (observed,) = adaptation.profile.observations()
    x, took = torch.randn(examples, 512, device=gpu), []
    for _ in range(5):
        device_of(gpu).mark().wait()
        began = time.perf_counter()
        model(x).mean().backward()
        optimizer.step()
        device_of(gpu).mark().wait()
        took.append(time.perf_counter() - began)
    assert 0.5 < observed.optim_seconds / sorted(took)[2] < 2.0


# --------------------------------------------------------------------- precision, compilation, running statistics


def _in_half_precision(kind: str) -> tuple[list[float], int]:
    """Weights, and steps that were applied; the gradient of one step is infinite on the second replica."""
    place = settle_on_a_place()
    reset_core()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dtype = torch.float16 if kind == "fp16" and not ON_CPU else torch.bfloat16
    scaler = torch.amp.GradScaler(place.type, enabled=kind == "fp16")
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(96, 8)), batch_size=12)
    wrapped = AdaptiveDataParallel(model, optimizer, mp_scaler=scaler if kind == "fp16" else None)
    applied = 0
    for _ in remaining_epochs_until(2):
        for number, (x,) in enumerate(loader):
            optimizer.zero_grad()
            with torch.autocast(place.type, dtype=dtype):
                loss = wrapped(x.to(place)).float().square().mean()
            if kind == "fp16" and number == 3 and os.environ["RANK"] == "1":
                loss = loss * torch.tensor(float("inf"), device=place)
            before = model[0].weight.detach().clone()  # type: ignore[operator]
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            applied += not torch.equal(before, model[0].weight)  # type: ignore[arg-type]
    return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist(), applied


@pytest.mark.parametrize(("kind", "applied"), [("bf16", 16), ("fp16", 14)])
def test_mixed_precision_steps_on_all_replicas_or_on_none(kind: str, applied: int) -> None:
    first, second = run_ranks(_in_half_precision, 2, kind)
    assert first == second
    assert first[1] == applied


def _compiled(outside: bool) -> list[float]:
    place = settle_on_a_place()
    reset_core()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(96, 8)), batch_size=12)
    inside: Any = model if outside else torch.compile(model, backend="aot_eager")
    wrapped: Any = AdaptiveDataParallel(inside, optimizer)
    forward = torch.compile(wrapped, backend="aot_eager") if outside else wrapped
    for _ in remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            forward(x.to(place)).square().mean().backward()
            optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


@pytest.mark.parametrize("outside", [False, True], ids=["the model", "the wrapper"])
def test_compiled_models_train_alike_on_all_replicas(outside: bool) -> None:
    first, second = run_ranks(_compiled, 2, outside, seconds=240)
    assert first == second


def _running_mean() -> list[float]:
    return running_mean(settle_on_a_place())


def test_running_statistics_are_one_replicas_everywhere_after_a_pass() -> None:
    first, second = run_ranks(_running_mean, 2)
    assert first == second


# --------------------------------------------------------------------- a model that its own code spreads over several


class Spread(nn.Module):
    """Its layers lie where its author has put them, and so do its activations."""

    def __init__(self, *places: torch.device) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in places)
        self.places = places
        for layer, place in zip(self.layers, places, strict=True):
            layer.to(place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, place in zip(self.layers, self.places, strict=True):
            x = torch.tanh(layer(x.to(place)))
        return x


def train_spread(*places: torch.device) -> list[float]:
    model = Spread(*places)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    loader = AdaptiveDataLoader(TensorDataset(x), batch_size=12, shuffle=True)
    wrapped = AdaptiveDataParallel(model, optimizer, noise_every=1)
    for _ in remaining_epochs_until(3):
        for (inputs,) in loader:
            optimizer.zero_grad()
            wrapped(inputs).square().mean().backward()
            nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
    return [float(each) for parameter in model.parameters() for each in parameter.detach().cpu().flatten()]


def _spread_over_what_is_there() -> list[float]:
    rank, per_rank = int(os.environ.get("RANK", "0")), max(1, GPUS // 2)
    if ON_CPU:
        return train_spread(torch.device("cpu"), torch.device("cpu"))
    first = rank * per_rank
    return train_spread(torch.device("cuda", first), torch.device("cuda", first + per_rank - 1))


@two_gpus
def test_a_model_spread_over_two_gpus_trains_as_on_one_device() -> None:
    cpu = torch.device("cpu")
    reset_core()
    weights = train_spread(cpu, cpu)
    reset_core()
    places = (cpu, cpu) if ON_CPU else (torch.device("cuda", 0), torch.device("cuda", 1))
    assert_close(train_spread(*places), torch.tensor(weights))


@pytest.mark.skipif(GPUS < 4 and not ON_CPU, reason="two replicas of two GPUs each")
def test_replicas_of_two_gpus_each_train_as_one_process_does() -> None:
    reset_core()
    weights = train_spread(torch.device("cpu"), torch.device("cpu"))
    for mine in run_ranks(_spread_over_what_is_there, 2):
        assert_close(mine, torch.tensor(weights))
