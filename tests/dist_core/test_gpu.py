"""What only a GPU shows: that training on one is what it is on a CPU, alone, shared by replicas, and over NCCL.

``ELASTUNE_TEST_PLACE=cpu python -m pytest -m gpu tests/dist_core/test_gpu.py`` runs the same on a CPU, which checks the
tests themselves where no GPU is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not marked so
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.device import device_of, limit_memory, release_cached_memory
from dist_core.errors import PeerLost
from dist_core.generations.process_groups import GroupNeeds, build_group, carrier_for
from dist_core.generations.state_transfer import broadcast_in_place, hand_over, share_state
from dist_core.gradients.reduce import STRATEGIES, reduction_strategy
from dist_core.state.checkpoint import CheckpointWriter, load_checkpoint, newest_checkpoint
from dist_core.state.copies import in_host_memory
from dist_core.state.random_streams import RandomStreams
from dist_core.trial.core import get_core, reset_core
from tests.support.perceptrons import MODELS, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

ON_CPU = os.environ.get("ELASTUNE_TEST_PLACE") == "cpu"
GPUS = 0 if ON_CPU else torch.cuda.device_count()
two_gpus = pytest.mark.skipif(GPUS < 2 and not ON_CPU, reason="NCCL takes one rank for each GPU: needs two")
on_a_gpu = pytest.mark.skipif(ON_CPU, reason="of GPUs alone")
EXACT = [name for name in STRATEGIES if reduction_strategy(name).exact]
LOSSY = [name for name in ("bf16", "fp16", "power_sgd") if name in STRATEGIES]


def settle_on_a_place(*, shared: bool = True) -> torch.device:
    """This rank's; ``shared``: all ranks are on the first GPU, over Gloo."""
    if ON_CPU:
        return torch.device("cpu")
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if shared and world_size > 1:
        os.environ["ELASTUNE_GPU_SHARE"] = str(0.9 / world_size)
    place = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(place)
    return place


@pytest.fixture
def place() -> Iterator[torch.device]:
    reset_core()
    torch.manual_seed(0)
    yield settle_on_a_place()
    reset_core()


def trained(model: str, reduction: str, clip: bool, shared: bool) -> list[float]:
    return train(model, reduction, 11, clip, str(settle_on_a_place(shared=shared)))


def assert_close(weights: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-3, atol=2e-5)


# --------------------------------------------------------------------- as on a CPU


@pytest.mark.parametrize("model", MODELS)
def test_one_gpu_trains_as_a_cpu_does(model: str, alone: Any, place: torch.device) -> None:
    assert_close(train(model, "all_reduce", 11, place=str(place)), alone(model))


@pytest.mark.parametrize("model", MODELS)
def test_replicas_that_share_a_gpu_train_as_one_process_does(model: str, alone: Any) -> None:
    for weights in run_ranks(trained, 2, model, "all_reduce", False, True):
        assert_close(weights, alone(model))


@pytest.mark.parametrize("reduction", [name for name in EXACT if name != "all_reduce"])
def test_every_exact_reduction_goes_through_the_hosts_memory(reduction: str, alone: Any) -> None:
    for weights in run_ranks(trained, 3, "perceptron", reduction, False, True):
        assert_close(weights, alone("perceptron"))


@pytest.mark.parametrize("reduction", LOSSY)
def test_replicas_agree_whatever_a_reduction_leaves_out(reduction: str) -> None:
    first, second = run_ranks(trained, 2, "perceptron", reduction, False, True)
    assert first == second


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


def _noise(place: torch.device, adam: bool) -> tuple[float, float]:
    reset_core()
    torch.manual_seed(0)
    model = nn.Linear(20, 1).to(place)
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=1e-3)
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(960, 20)), batch_size=16)
    loader.autoscale_batch_size(17, local_bsz_bounds=(1, 17))
    wrapped = AdaptiveDataParallel(model, optimizer, noise_every=1)
    for _ in remaining_epochs_until(1):
        for (x,) in loader:
            core = get_core()
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: None  # type: ignore[method-assign]
            optimizer.zero_grad()
            (wrapped(x.to(place)) - 1.0).square().mean().backward()
            optimizer.step()
    statistics = wrapped.statistics
    assert statistics is not None
    return statistics.sqr, statistics.var


def _noise_of_a_rank(adam: bool) -> tuple[float, float]:
    return _noise(settle_on_a_place(), adam)


@pytest.mark.parametrize("adam", [False, True], ids=["SGD", "Adam"])
def test_one_gpu_measures_the_noise_that_a_cpu_does(adam: bool, place: torch.device) -> None:
    # The last steps' norms are still on their way.
    assert _noise(place, adam) == pytest.approx(_noise(torch.device("cpu"), adam), rel=0.1)


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


def test_step_times_are_those_of_the_device(place: torch.device) -> None:
    model = Slow().to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    examples = 64 if ON_CPU else 4096
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(examples * 30, 512)), batch_size=examples)
    wrapped = AdaptiveDataParallel(model, optimizer)
    for _ in remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x.to(place)).mean().backward()
            optimizer.step()
    adaptation = get_core().adaptation
    assert adaptation is not None
    (observed,) = adaptation.profile.observations()
    x, took = torch.randn(examples, 512, device=place), []
    for _ in range(5):
        device_of(place).mark().wait()
        began = time.perf_counter()
        model(x).mean().backward()
        optimizer.step()
        device_of(place).mark().wait()
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
    place = settle_on_a_place()
    reset_core()
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 1)).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(96, 4)), batch_size=12)
    wrapped = AdaptiveDataParallel(model, optimizer)
    for _ in remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x.to(place)).mean().backward()
            optimizer.step()
    assert norm.running_mean is not None
    return norm.running_mean.tolist()


def test_running_statistics_are_one_replicas_everywhere_after_a_pass() -> None:
    first, second = run_ranks(_running_mean, 2)
    assert first == second


# --------------------------------------------------------------------- states


def test_a_checkpoint_holds_what_was_there_when_it_was_asked_for(place: torch.device, tmp_path: Path) -> None:
    """Large enough for the copy to take a while, in which the device is busy with the next step."""
    writer = CheckpointWriter(tmp_path, on_error=pytest.fail)
    weights, buffer = torch.zeros(20_000_000, device=place), torch.zeros(10, device=place)
    busy = torch.randn(1000, 1000, device=place)
    for number in range(1, 4):
        weights.fill_(number)
        buffer.fill_(number)
        writer.save({"weights": weights, "buffer": buffer}, {}, keeps=lambda tensor: len(tensor) > 10)
        for _ in range(10):
            busy = torch.tanh(busy @ busy)
        buffer.fill_(-1.0)
        writer.settle()
        weights.fill_(-1.0)
        while writer.busy:
            time.sleep(0.002)
        found = newest_checkpoint(tmp_path)
        assert found is not None
        state = load_checkpoint(found[0])
        assert state["weights"].unique().tolist() == state["buffer"].unique().tolist() == [float(number)]


@on_a_gpu
def test_a_checkpoint_holds_up_the_thread_that_trains_for_no_copy(place: torch.device, tmp_path: Path) -> None:
    weights = torch.zeros(100_000_000, device=place)
    writer = CheckpointWriter(tmp_path, on_error=pytest.fail)
    writer.save({"weights": weights}, {}, keeps=lambda tensor: True, wait=True)
    took = []
    for _ in range(3):
        device_of(place).mark().wait()
        began = time.perf_counter()
        writer.save({"weights": weights}, {}, keeps=lambda tensor: True)
        writer.settle()
        took.append(time.perf_counter() - began)
        while writer.busy:
            time.sleep(0.01)
    # 400 MB over a link of 64 GB/s take 6 ms at the least.
    assert min(took) < 0.006


def test_random_numbers_of_the_device_go_on_where_they_were(place: torch.device) -> None:
    streams = RandomStreams()
    torch.manual_seed(3)
    state = streams.state_dict()
    drawn = torch.rand(5, device=place).tolist()
    torch.rand(5, device=place)
    streams.load_state_dict(state)
    assert torch.rand(5, device=place).tolist() == drawn


@on_a_gpu
def test_a_share_of_a_gpu_is_all_that_a_replica_may_have(place: torch.device) -> None:
    _, total = torch.cuda.mem_get_info(place)
    limit_memory(place, 0.1)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.2 * total), dtype=torch.uint8, device=place)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, place)
        release_cached_memory()


def _meet() -> tuple[Any, torch.device]:
    place = settle_on_a_place()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = FileStore(os.environ["MEETING_PLACE"], world_size)
    needs = GroupNeeds(carriers=frozenset({carrier_for(device_of(place))}))
    nodes = ("here",) * world_size
    group = build_group(store, name="g", rank=rank, nodes=nodes, timeout=timedelta(minutes=1), needs=needs)
    return group, place


@pytest.fixture
def meeting_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield str(Path(folder) / "store")


def _handed_over(meeting_place: str) -> list[float]:
    os.environ["MEETING_PLACE"] = meeting_place
    group, place = _meet()
    own = {"weights": torch.full((1000,), float(group.rank), device=place), "step": group.rank}
    state = hand_over(group, own if group.rank == 0 else None)
    return [float(state["weights"].sum()), float(state["step"])]


def test_a_state_on_a_gpu_is_handed_over(meeting_place: str) -> None:
    assert run_ranks(_handed_over, 2, meeting_place) == [[0.0, 0.0], [0.0, 0.0]]


def _shared_with_a_joiner(meeting_place: str) -> list[float]:
    os.environ["MEETING_PLACE"] = meeting_place
    group, place = _meet()
    own = {"weights": torch.full((1000,), 1.0 if group.rank < 2 else 9.0, device=place), "step": group.rank}
    state = share_state(group, own, joiners=(2,), is_replicated=lambda tensor: True)
    return [float(state["weights"].mean()), float(state["step"])]


def test_a_joiner_receives_what_survivors_have_on_their_gpus(meeting_place: str) -> None:
    assert run_ranks(_shared_with_a_joiner, 3, meeting_place) == [[1.0, 0.0]] * 3


def _made_rank_0s(meeting_place: str) -> list[list[float]]:
    os.environ["MEETING_PLACE"] = meeting_place
    group, place = _meet()
    tensors = [
        torch.full((4,), float(group.rank), device=place),
        torch.full((2, 3), float(group.rank), device=place).t(),
    ]
    broadcast_in_place(group, tensors)
    return [each.flatten().tolist() for each in in_host_memory(tensors)]


def test_tensors_on_a_gpu_become_rank_0s(meeting_place: str) -> None:
    assert run_ranks(_made_rank_0s, 2, meeting_place) == [[[0.0] * 4, [0.0] * 6]] * 2


class Hungry(nn.Module):
    """Keeps a gigabyte for every example until its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (x[:, :1] * self.weight).expand(-1, 1 << 27).exp()
        return wide.square().mean(dim=1)


@on_a_gpu
def test_a_batch_that_does_not_fit_is_made_smaller(place: torch.device, tmp_path: Path) -> None:
    free, total = torch.cuda.mem_get_info(place)
    torch.cuda.set_per_process_memory_fraction(min(1.0, 12e9 / total), place)
    assert free > 12e9, "the test needs 12 GB"
    try:
        seen = []

        def script() -> None:
            model = Hungry().to(place)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            loader = AdaptiveDataLoader(TensorDataset(torch.randn(64, 1)), batch_size=32)
            loader.autoscale_batch_size(64, local_bsz_bounds=(1, 32), gradient_accumulation=True)
            wrapped = AdaptiveDataParallel(model, optimizer)
            for _ in remaining_epochs_until(1):
                for (x,) in loader:
                    seen.append(len(x))
                    optimizer.zero_grad()
                    wrapped(x.to(place)).mean().backward()
                    optimizer.step()

        from dist_core.trial.restart import run_training

        run_training(get_core(), script)
        assert seen[-1] < 32
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, place)
        release_cached_memory()


# --------------------------------------------------------------------- over NCCL


@two_gpus
@pytest.mark.parametrize("reduction", EXACT)
def test_replicas_on_gpus_of_their_own_train_as_one_process_does(reduction: str, alone: Any) -> None:
    for weights in run_ranks(trained, 2, "perceptron", reduction, False, False):
        assert_close(weights, alone("perceptron"))


@two_gpus
@pytest.mark.parametrize("model", [name for name in MODELS if name != "perceptron"])
def test_models_of_any_kind_are_reduced_over_nccl(model: str, alone: Any) -> None:
    for weights in run_ranks(trained, 2, model, "all_reduce", False, False):
        assert_close(weights, alone(model))


def _generations_in_turn(meeting_place: str) -> list[float]:
    place = settle_on_a_place(shared=False)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = FileStore(meeting_place, world_size)
    needs = GroupNeeds(carriers=frozenset({carrier_for(device_of(place))}), extra=1)
    sums = []
    before = None
    for number in range(3):
        group = build_group(
            store, name=f"g{number}", rank=rank, nodes=("here",) * world_size, timeout=timedelta(minutes=1), needs=needs
        )
        if before is not None:
            before.leave()
        group.connect()
        vector = torch.ones(10, device=place)
        group.wait(group.data.allreduce([vector]), group.data)
        sums.append(float(vector.sum()))
        before = group
    return sums


@two_gpus
def test_generations_follow_each_other_over_nccl(meeting_place: str) -> None:
    assert run_ranks(_generations_in_turn, 2, meeting_place) == [[20.0] * 3] * 2


def _loses_a_peer() -> float:
    """Seconds until the loss is known, with a number read that lies behind a sum that never ends."""
    place = settle_on_a_place(shared=False)
    reset_core()
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(96, 8)), batch_size=12)
    wrapped = AdaptiveDataParallel(model, optimizer)
    began = 0.0
    try:
        for _ in remaining_epochs_until(1):
            for number, (x,) in enumerate(loader):
                if number == 4:
                    if os.environ["RANK"] == "1":
                        os.kill(os.getpid(), signal.SIGKILL)
                    began = time.perf_counter()
                optimizer.zero_grad()
                loss = wrapped(x.to(place)).square().mean()
                loss.backward()
                next(model.parameters()).grad.sum().item()  # type: ignore[union-attr]
                optimizer.step()
    except PeerLost:
        return time.perf_counter() - began
    raise AssertionError("the loss went unnoticed")


@two_gpus
def test_a_lost_peer_is_noticed_behind_a_kernel_that_waits_for_it() -> None:
    first, _ = run_ranks(_loses_a_peer, 2, dies=1)
    assert first < 30.0


def _groups_under_torchrun() -> tuple[str, str]:
    settle_on_a_place(shared=False)
    train("perceptron", "all_reduce", 11, place=str(settle_on_a_place(shared=False)))
    group = get_core().generation.group
    assert dist.is_initialized()
    return group.data.name(), group.control.name()


@two_gpus
def test_gradients_and_votes_travel_apart_under_torchrun() -> None:
    expected = ("gloo", "gloo") if ON_CPU else ("nccl", "gloo")
    assert run_ranks(_groups_under_torchrun, 2) == [expected] * 2
