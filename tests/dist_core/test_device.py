"""What a device promises, and that training waits for what is late: on a CPU, on one that runs late, and on a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.data.batch_size import Adaptation
from dist_core.device import HOST, Device, Elapsed, device_of, known_seconds
from dist_core.errors import InvalidTraining
from dist_core.generations.group_needs import GroupNeeds, carrier_for
from dist_core.gradients.noise.norms import AdamPreconditioner
from dist_core.gradients.reduce import STRATEGIES, reduction_strategy
from dist_core.gradients.reduce.ordered_worker import OrderedWorker
from dist_core.state.checkpoint import CheckpointWriter
from dist_core.state.copies import Copies, host_memory_for, in_host_memory
from dist_core.trial.current import get_core, reset_core
from tests.support.checkpoints import written_by
from tests.support.gpus import on_a_gpu
from tests.support.late_device import GARBAGE, Clock, LateDevice, TakesTime, in_place_of_the_cpu
from tests.support.perceptrons import MODELS, train
from tests.support.ranks import run_ranks
from tests.support.small_trials import measured_noise, running_mean

EXACT = [name for name in STRATEGIES if reduction_strategy(name).exact]
STAGED = sorted({("perceptron", name) for name in EXACT} | {(model, "all_reduce") for model in MODELS})


@pytest.fixture
def late() -> Iterator[LateDevice]:
    reset_core()
    torch.manual_seed(0)
    with in_place_of_the_cpu(LateDevice()) as device:
        yield device
    reset_core()


# --------------------------------------------------------------------- the contract


def keep_busy(place: torch.device) -> None:
    """A GPU comes to what is asked of it next only after a while, so that nothing is right by chance."""
    if place.type == "cuda":
        torch.cuda._sleep(10**8)


@pytest.fixture(params=["host", "late", pytest.param("gpu", marks=[pytest.mark.gpu, on_a_gpu])])
def place(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where tensors lie whose device is tested."""
    if request.param == "late":
        with in_place_of_the_cpu(LateDevice()):
            yield torch.device("cpu")
    else:
        yield torch.device("cuda", 0) if request.param == "gpu" else torch.device("cpu")


@pytest.fixture
def device(place: torch.device) -> Device:
    return device_of(place)


def test_a_copy_is_there_at_the_mark_behind_it(place: torch.device, device: Device) -> None:
    source = torch.arange(1000.0, device=place)
    target = device.host_memory(source.shape, source.dtype)
    device.copy(target, source)
    device.mark().wait()
    assert torch.equal(target, torch.arange(1000.0))


def test_a_copy_back_is_there_at_the_mark_behind_it(place: torch.device, device: Device) -> None:
    source = device.host_memory((1000,), torch.float32)
    source.copy_(torch.arange(1000.0))
    target = torch.zeros(1000, device=place)
    device.copy(target, source)
    device.mark().wait()
    assert torch.equal(target.cpu(), torch.arange(1000.0))


def test_another_stream_begins_behind_a_mark(place: torch.device, device: Device) -> None:
    source = torch.zeros(1000, device=place)
    target = device.host_memory(source.shape, source.dtype)
    keep_busy(place)
    source.fill_(3.0)
    with device.stream().behind(device.mark()):
        device.copy(target, source)
        there = device.mark()
    there.wait()
    assert target.tolist() == [3.0] * 1000


def test_what_follows_a_mark_changes_nothing_that_is_copied_before_it(place: torch.device, device: Device) -> None:
    source = torch.ones(1000, device=place)
    target = device.host_memory(source.shape, source.dtype)
    keep_busy(place)
    with device.stream().behind(device.mark()):
        device.copy(target, source)
        there = device.mark()
    device.follow(there)
    source.fill_(2.0)
    there.wait()
    assert target.tolist() == [1.0] * 1000


def test_times_are_between_two_marks_in_their_order(place: torch.device, device: Device) -> None:
    begin = device.mark()
    torch.ones(1000, device=place).sum()
    passed = Elapsed(begin, device.mark())
    passed.end.wait()
    assert passed.is_known
    assert 0.0 <= passed.seconds < 60.0
    assert known_seconds(1.5).seconds == 1.5


def test_a_future_gives_its_result_to_callbacks_of_any_thread(place: torch.device, device: Device) -> None:
    future = device.future()
    doubled = future.then(lambda done: done.value() * 2.0)
    threading.Thread(target=lambda: future.set_result(torch.ones(3, device=place))).start()
    assert doubled.wait().tolist() == [2.0] * 3


def test_values_in_the_hosts_memory_are_ready_to_be_read(place: torch.device) -> None:
    tensors = [torch.arange(6.0, device=place).view(2, 3).t(), torch.zeros((), device=place), torch.ones(0)]
    found = in_host_memory(tensors)
    assert [each.tolist() for each in found] == [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], 0.0, []]
    assert all(each.is_contiguous() and each.device.type == "cpu" for each in found)


def test_jobs_of_an_ordered_worker_see_what_was_written_before_they_were_asked_for(place: torch.device) -> None:
    worker = OrderedWorker("test")
    buffer = torch.zeros(1000, device=place)
    keep_busy(place)
    buffer.fill_(1.0)
    results = [worker.submit(lambda: buffer.add_(1.0), on=place) for _ in range(5)]
    assert [each.wait() is not None for each in results] == [True] * 5
    assert buffer.tolist() == [6.0] * 1000


def test_an_error_of_a_job_is_the_futures(place: torch.device) -> None:
    def fail() -> torch.Tensor:
        raise ValueError("no such sum")

    with pytest.raises(Exception, match="no such sum"):
        OrderedWorker("test").submit(fail, on=place).wait()


def test_adams_norms_are_the_same_in_chunks_of_any_length(place: torch.device) -> None:
    parameter = nn.Parameter(torch.zeros(1000, device=place))
    optimizer = torch.optim.Adam([parameter])
    moments = torch.linspace(0.5, 2.0, 1000, device=place)
    optimizer.state[parameter] = {"step": torch.tensor(100.0), "exp_avg": moments * 0, "exp_avg_sq": moments}
    gradient = torch.linspace(-1.0, 1.0, 1000, device=place)
    preconditioner = AdamPreconditioner([optimizer])
    assert preconditioner.ready
    correction = 1.0 - 0.999**100
    expected = ((gradient.double() / ((moments.double() / correction).sqrt() + 1e-8)) ** 2).sum()
    assert float(preconditioner.squared_norm_of_all([(parameter, gradient)])) == pytest.approx(
        float(expected), rel=1e-5
    )


def test_a_kind_of_device_that_nobody_described_is_named() -> None:
    with pytest.raises(ValueError, match="tensors are on meta; elastune trains on cpu and cuda devices"):
        device_of(torch.ones(1, device="meta"))


# --------------------------------------------------------------------- what carries gradients


def test_gradients_travel_as_the_device_and_its_other_replicas_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert carrier_for(HOST) == "host"
    assert carrier_for(LateDevice()) == "staged"
    assert carrier_for(LateDevice(has_nccl=True)) == "nccl"
    monkeypatch.setenv("ELASTUNE_GPU_SHARE", "0.5")
    assert carrier_for(LateDevice(has_nccl=True)) == "staged"


def test_nccl_is_used_where_all_gradients_lie_on_gpus_of_their_own() -> None:
    on_gpus, on_hosts = (GroupNeeds(carriers=frozenset({carrier})) for carrier in ("nccl", "host"))
    assert (on_gpus.nccl, on_gpus.apart) == (True, True)
    assert (on_hosts.nccl, on_hosts.apart) == (False, False)
    both = on_gpus | on_hosts
    assert (both.nccl, both.apart) == (False, True)


# --------------------------------------------------------------------- training on one that is late


def test_step_times_are_the_devices_and_not_those_of_the_calls(late: LateDevice) -> None:
    """A pass takes 3 ms an example there, and about nothing here."""
    model = nn.Sequential(TakesTime(late, 0.001), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(800, 4)), batch_size=8)
    wrapped = AdaptiveDataParallel(model, optimizer)
    began = time.process_time()
    for _ in remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            # The first layer has to be asked for a gradient to take its time.
            wrapped(x.requires_grad_()).mean().backward()
            optimizer.step()
    here = time.process_time() - began
    adaptation = get_core().adaptation
    assert isinstance(adaptation, Adaptation)
    (observed,) = adaptation.profile.observations()
    assert observed.configuration.atomic_batch == 8
    assert observed.optim_seconds == pytest.approx(8 * 0.003)
    # Those of the last steps are not known yet, and nobody has waited for them.
    assert late.clock.now() < 100 * 8 * 0.003
    assert here < 100 * 8 * 0.003


def test_norms_are_read_when_they_are_there(late: LateDevice) -> None:
    on_late = measured_noise(torch.device("cpu"), adam=False)
    with in_place_of_the_cpu(HOST):  # type: ignore[arg-type]  # the CPU itself
        on_cpu = measured_noise(torch.device("cpu"), adam=False)
    # One step more is on its way at the end.
    assert on_late == pytest.approx(on_cpu, rel=0.1)


def _on_a_late_device(model: str, reduction: str) -> list[float]:
    with in_place_of_the_cpu(LateDevice(Clock(real=True))):
        return train(model, reduction, 11)


@pytest.mark.parametrize(("model", "name"), STAGED)
def test_reductions_through_the_hosts_memory_train_as_one_process_does(model: str, name: str, alone: Any) -> None:
    expected = alone(model)
    for weights in run_ranks(_on_a_late_device, 3, model, name):
        torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-4, atol=2e-6)


def _running_mean(where: str) -> list[float]:
    if where == "late":
        with in_place_of_the_cpu(LateDevice(Clock(real=True))):
            return running_mean(torch.device("cpu"))
    return running_mean(torch.device("cpu"))


@pytest.mark.parametrize("where", ["host", "late"])
def test_running_statistics_are_one_replicas_everywhere_after_a_pass(where: str) -> None:
    first, second = run_ranks(_running_mean, 2, where)
    assert first == second
    assert max(map(abs, first)) < GARBAGE / 2


# --------------------------------------------------------------------- copies beside training


def test_a_checkpoint_holds_what_was_there_when_it_was_asked_for(late: LateDevice, tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, on_error=pytest.fail)
    weights, buffer = torch.zeros(100), torch.zeros(10)
    for number in range(1, 5):
        weights.fill_(number)
        buffer.fill_(number)
        writer.save({"weights": weights, "buffer": buffer}, {}, keeps=lambda tensor: len(tensor) == 100)
        buffer.fill_(-1.0)
        writer.settle()
        weights.fill_(-1.0)
        state = written_by(writer)
        assert set(state["weights"].tolist()) == set(state["buffer"].tolist()) == {float(number)}


def test_whoever_does_not_settle_copies_what_comes_later(late: LateDevice) -> None:
    """That is what the test above rests on."""
    copies, weights = Copies(), torch.zeros(100)
    target = host_memory_for(weights)
    copying = copies.begin(now=[], later=[(target, weights)])
    weights.fill_(7.0)
    copying.finish()
    assert set(target.tolist()) == {7.0}


def test_whoever_reads_too_early_reads_nothing_of_use(late: LateDevice) -> None:
    weights = torch.zeros(100)
    target = late.host_memory(weights.shape, weights.dtype)
    late.copy(target, weights)
    assert set(target.tolist()) == {GARBAGE}
    late.mark().wait()
    assert set(target.tolist()) == {0.0}


def test_training_does_not_wait_for_a_copy(late: LateDevice) -> None:
    """The device does: the thread that trains goes on to give it work."""
    copies, weights = Copies(), torch.zeros(100)
    copies.begin(now=[], later=[(host_memory_for(weights), weights)]).settle()
    assert late.clock.now() == 0.0
    assert late.mark().at == pytest.approx(late.copy_seconds)


class Both(nn.Module):
    """A generator and its critic, of which one backward pass reduces both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def _two_models_in_one_pass(reduction: str, late: bool) -> list[float]:
    def run() -> list[float]:
        reset_core()
        torch.manual_seed(0)
        models = [Both(), Both()]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
        loader = AdaptiveDataLoader(TensorDataset(torch.randn(96, 4)), batch_size=12)
        first, second = (
            AdaptiveDataParallel(model, optimizer, reduction=reduction)
            for model, optimizer in zip(models, optimizers, strict=True)
        )
        for _ in remaining_epochs_until(2):
            for (x,) in loader:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                second(first(x)).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
        return torch.cat([each.detach().flatten() for model in models for each in model.parameters()]).tolist()

    if late:
        with in_place_of_the_cpu(LateDevice(Clock(real=True))):
            return run()
    return run()


@pytest.mark.parametrize(("reduction", "late"), [("all_reduce", True), ("sharded", True), ("sharded", False)])
def test_models_of_one_backward_pass_are_reduced_in_one_order(reduction: str, late: bool) -> None:
    (alone,) = run_ranks(_two_models_in_one_pass, 1, "all_reduce", False)
    for weights in run_ranks(_two_models_in_one_pass, 3, reduction, late):
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(alone), rtol=1e-4, atol=1e-5)


def test_power_sgd_is_refused_where_replicas_share_a_gpu(late: LateDevice) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(InvalidTraining, match="share a GPU"):
        AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), reduction="power_sgd")


def test_sparse_gradients_are_refused_where_they_cannot_be_sent(late: LateDevice) -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    with pytest.raises(InvalidTraining, match="0 has sparse gradients"):
        AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
