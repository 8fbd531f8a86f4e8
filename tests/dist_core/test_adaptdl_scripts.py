"""Scripts written for AdaptDL, with changed imports: alone, and in several processes as under torchrun."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist

import dist_core.adaptdl.torch as adl
from dist_core.adaptdl import checkpoint, collective, env
from dist_core.adaptdl.torch.iterator import TextWindows
from dist_core.errors import InvalidTraining
from dist_core.generations import torchrun
from dist_core.trial.current import get_core, reset_core
from tests.support.adaptdl_scripts import cifar, dcgan, mnist, ncf, transformer
from tests.support.ranks import run_ranks


class Writer:
    """Stands for TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[float]] = {}

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        assert step >= 0
        self.scalars.setdefault(tag, []).append(float(value))


@pytest.fixture(autouse=True)
def fresh_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    reset_core()
    yield
    reset_core()
    if dist.is_initialized():
        dist.destroy_process_group()


def run_mnist() -> tuple[float, int, dict[str, list[float]]]:
    reset_core()
    writer = Writer()
    accuracy, samples = mnist.main(writer)
    return accuracy, samples, writer.scalars


def run_cifar(mixed_precision: bool) -> tuple[float, dict[str, list[float]]]:
    reset_core()
    writer = Writer()
    return cifar.main(writer, mixed_precision), writer.scalars


def run_dcgan() -> tuple[float, float]:
    reset_core()
    return dcgan.main(Writer())


def run_ncf() -> float:
    reset_core()
    return ncf.main()


def run_transformer() -> tuple[float, float]:
    reset_core()
    return transformer.main()


@pytest.mark.parametrize("world_size", [1, 2])
def test_mnist(world_size: int) -> None:
    results = run_ranks(run_mnist, world_size)
    assert all(result[0] == results[0][0] > 0.9 for result in results)
    assert sum(samples for _, samples, _ in results) >= 4 * 2000
    scalars = results[0][2]
    assert len(scalars["AdaptDL/Data/Total_Batch_Size"]) == 4
    assert {
        "AdaptDL/Data/Local_Batch_Size",
        "AdaptDL/Data/Accumulation_Steps",
        "AdaptDL/Model/Gradient_Norm_Sqr",
        "AdaptDL/Model/Gradient_Variance",
        "AdaptDL/Model/Gain",
        "AdaptDL/Model/Learning_Rate_Factor",
    } <= set(scalars)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "mixed_precision"), [(1, False), (2, True)])
def test_cifar(world_size: int, mixed_precision: bool) -> None:
    results = run_ranks(run_cifar, world_size, mixed_precision)
    assert all(accuracy == results[0][0] > 0.8 for accuracy, _ in results)


@pytest.mark.parametrize("world_size", [1, 2])
def test_dcgan(world_size: int) -> None:
    results = run_ranks(run_dcgan, world_size)
    assert all(result == results[0] for result in results)
    assert 0.0 < results[0][0] < 5.0


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ncf(world_size: int) -> None:
    results = run_ranks(run_ncf, world_size)
    assert all(ratio == results[0] for ratio in results)
    assert results[0] > 0.5


@pytest.mark.parametrize("world_size", [1, 2])
def test_transformer(world_size: int) -> None:
    results = run_ranks(run_transformer, world_size)
    assert all(result == results[0] for result in results)
    # Guessing costs 2.4. How far three epochs come depends on the batch sizes, and these on how fast the machine is.
    assert max(results[0]) < 1.0


def test_every_token_is_predicted_once() -> None:
    windows = TextWindows(torch.arange(24), 5)
    starts = [int(windows[index][0]) for index in range(len(windows))]
    assert starts == [0, 5, 10, 15, 18]
    with pytest.raises(InvalidTraining, match="3 tokens and bptt_len is 5"):
        TextWindows(torch.arange(3), 5)


class Counter(checkpoint.State):
    def __init__(self) -> None:
        super().__init__("counter")
        self.count = 0

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(str(self.count).encode())

    def load(self, fileobj: BinaryIO) -> None:
        self.count = int(fileobj.read())


def test_states_of_the_scripts_own_come_back(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTUNE_CHECKPOINT_DIR", str(tmp_path))
    reset_core()
    counter = Counter()
    assert not checkpoint.load_state(counter)
    counter.count = 41
    checkpoint.save_all_states()
    assert env.checkpoint_path() == str(tmp_path)
    reset_core()
    again = Counter()
    next(iter(adl.remaining_epochs_until(1)))
    assert checkpoint.load_state(again)
    assert again.count == 41
    with pytest.raises(InvalidTraining, match="'user-counter' is already registered"):
        Counter()


def test_an_accumulator_adds_outside_and_reads_inside() -> None:
    totals = adl.Accumulator()
    totals["a"] += 2
    totals["a"] -= 0.5
    totals += {"b": 3}
    totals -= {"b": 1}
    totals.update(a=torch.tensor(1.0))  # type: ignore[arg-type]  # scripts do
    assert len(totals) == 0
    assert "a" not in totals
    assert repr(totals) == "{}"
    with totals.synchronized():
        assert dict(totals) == {"a": 2.5, "b": 2.0}
        totals["mean"] = totals["a"] / totals["b"]
        with totals.synchronized() as same:
            assert same is totals
        with pytest.raises(KeyError):
            totals["c"]
    totals["a"] += 1
    with totals.synchronized():
        assert dict(totals) == {"a": 3.5, "b": 2.0, "mean": 1.25}
        totals.clear()
    with totals.synchronized():
        assert dict(totals) == {}
    for wrong, words in ((True, "given True"), ("x", "given 'x'"), (totals["b"], "only numbers")):
        with pytest.raises(InvalidTraining, match=words):
            totals["a"] += wrong
    with pytest.raises(InvalidTraining, match="was set to 5 outside"):
        totals["a"] = 5
    with pytest.raises(InvalidTraining, match="was set to"):
        totals["a"] = totals["b"] + 1
    with pytest.raises(KeyError):
        del totals["a"]


def test_an_accumulators_sums_are_part_of_the_trials_state() -> None:
    totals = adl.Accumulator()
    totals["a"] += 2
    with totals.synchronized():
        assert dict(totals) == {"a": 2}
    totals["a"] += 5
    state = get_core().registry.capture()
    reset_core()
    get_core().registry.restore(state)
    again = adl.Accumulator()
    again["a"] += 2
    with again.synchronized():
        # What was seen here before; that it is added once more has no effect.
        assert dict(again) == {"a": 2}
        again["a"] = 100
    again["b"] += 1
    with again.synchronized():
        assert dict(again) == {"a": 7, "b": 1}


def test_a_trial_that_was_saved_where_it_reads_its_sums_reads_them_again_and_goes_on() -> None:
    totals = adl.Accumulator()
    totals["a"] += 2
    with totals.synchronized():
        state = get_core().registry.capture()
    reset_core()
    get_core().registry.restore(state)
    again = adl.Accumulator()
    again["a"] += 2
    with again.synchronized():
        assert dict(again) == {"a": 2}
        again.clear()
    again["a"] += 1
    with again.synchronized():
        assert dict(again) == {"a": 1}


def sums(rank_value: float) -> dict[str, float]:
    adl.init_process_group()
    reset_core()
    loader = adl.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.arange(4)), batch_size=2)
    model = torch.nn.Linear(1, 1)
    adl.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    totals = adl.Accumulator()
    for _ in adl.remaining_epochs_until(1):
        for _ in loader:
            pass
    totals["all"] += rank_value
    totals[f"only-{env.replica_rank()}"] += 1
    with totals.synchronized():
        return dict(totals)


def test_replicas_may_add_under_different_keys() -> None:
    for result in run_ranks(sums, 3, 2.0):
        assert result == {"all": 6.0, "only-0": 1.0, "only-1": 1.0, "only-2": 1.0}


def find_nobody() -> tuple[int, str]:
    torchrun.TORCHRUN_SECONDS = 1.0
    # Bound by us, so nobody else can come to listen there.
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port: int = silent.getsockname()[1]
        os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_PORT=str(port))
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        try:
            adl.init_process_group("gloo")
        except InvalidTraining as error:
            return port, str(error)
    return port, "found somebody"


def test_an_address_where_nobody_answers_is_named() -> None:
    [(port, words)] = run_ranks(find_nobody, 1)
    assert words.startswith(
        f"rank 1 of 2 could not meet the other ranks at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port} (timeout 1 s)"
    )
    assert "torchrun" in words


class Kept(checkpoint.State):
    def save(self, fileobj: BinaryIO) -> None:
        assert env.replica_rank() == 0
        fileobj.write(b"kept")

    def load(self, fileobj: BinaryIO) -> None:
        self.content = fileobj.read()


def a_run(folder: str, number: int) -> tuple[int | None, int, Any, list[int]]:
    """Epochs before the loop, a state, and the epochs trained; the first run leaves in epoch 3."""
    os.environ.update(ADAPTDL_CHECKPOINT_PATH=folder, ADAPTDL_NUM_RESTARTS=str(number))
    reset_core()
    assert env.num_restarts() == number
    before = adl.finished_epochs()
    state = Kept("mine")
    loaded = checkpoint.load_state(state)
    trained = []
    for epoch in adl.remaining_epochs_until(6):
        trained.append(epoch)
        if number == 0 and epoch == 3:
            checkpoint.save_all_states()
            break
    return adl.current_epoch(), before, state.content if loaded else None, trained


def test_states_of_an_earlier_run_are_back_before_the_loop(tmp_path: Any) -> None:
    assert run_ranks(a_run, 1, str(tmp_path), 0) == [(None, 0, None, [0, 1, 2, 3])]
    # Its list is as it was when the script saved, within epoch 3, which begins anew.
    assert run_ranks(a_run, 3, str(tmp_path), 1) == [(None, 3, b"kept", [0, 1, 2, 3, 3, 4, 5])] * 3


@pytest.mark.parametrize("replicas", [1, 3, 5])
@pytest.mark.parametrize("index", [0, 7, 50])
def test_the_samplers_parts_are_equally_long_and_hold_what_is_left(replicas: int, index: int) -> None:
    sampler = adl.ElasticSampler(range(25), shuffle=True)
    sampler.num_replicas = replicas
    drawn: list[int] = []
    for sampler.rank in range(replicas):
        sampler.set_epoch(2, index)
        part = list(sampler)
        assert len(part) == len(sampler)
        drawn += part
    assert 25 - index % 25 <= len(set(drawn)) < 25 - index % 25 + replicas
    assert max(drawn.count(each) for each in drawn) <= 2


def told(number: int) -> tuple[int, int]:
    collective.initialize()
    return collective.allreduce(env.replica_rank() + number), collective.broadcast(env.replica_rank())


def test_replicas_tell_each_other_values() -> None:
    assert run_ranks(told, 3, 1) == [(6, 0)] * 3
