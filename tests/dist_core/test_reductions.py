"""One suite for all ways to reduce gradients: replicas train as one process does, whatever model and batches."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.data.order import ElasticCursor
from dist_core.errors import InvalidTraining, PeerLost
from dist_core.gradients.reduce import STRATEGIES, reduction_strategy
from dist_core.gradients.reduce.autotune import ROUNDS, SKIPPED_STEPS, TIMED_STEPS, Tuner
from dist_core.trial.core import get_core, reset_core
from tests.support.ranks import run_ranks

EXACT = [name for name in STRATEGIES if reduction_strategy(name).exact]
SYNCHRONOUS = [name for name in STRATEGIES if name != "parameter_server"]
LOSSY = {"bf16": 3e-2, "fp16": 3e-3, "power_sgd": 0.5}
"""How far weights may be off after training, relative to how far training moved them."""
SAMPLES = 70


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, 8, generator=generator)
        self.y = torch.randint(4, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class WithUnused(Perceptron):
    """One layer takes part on some batches only, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(8, 4)
        self.never = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        for_these = (x[:, :1] > 1.0).float()
        return out + self.sometimes(x) * for_these if bool(for_these.any()) else out


class Tied(nn.Module):
    """Encoder and decoder share a matrix; the middle is recomputed in the backward pass; one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 16, bias=False)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(8, 4)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = checkpoint(self.middle, self.encode(x * self.frozen), use_reentrant=False)
        out: torch.Tensor = self.head(hidden @ self.encode.weight)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {"perceptron": Perceptron, "unused": WithUnused, "tied": Tied}


def train(model_name: str, reduction: Any, batch: int, clip: bool = False, **options: Any) -> list[float]:
    """Weights after three epochs; the last batch of each is smaller than the others, and uneven over the replicas."""
    rank = int(os.environ.get("RANK", "0"))
    # Two replicas a node, for strategies that care.
    socket.gethostname = lambda: f"node-{rank // 2}"
    reset_core()
    torch.manual_seed(0)
    model = MODELS[model_name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * batch, momentum=0.5, weight_decay=1e-4)
    loader = AdaptiveDataLoader(Points(), batch_size=batch, shuffle=True)
    wrapped = AdaptiveDataParallel(
        model, optimizer, reduction=reduction, find_unused_parameters=model_name == "unused", **options
    )
    for _ in remaining_epochs_until(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    assert get_core().broken is None
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


@pytest.fixture(scope="module")
def alone() -> Callable[..., torch.Tensor]:
    """Weights of the same training in one process, and before it."""

    def run(model_name: str, batch: int = 11, clip: bool = False) -> torch.Tensor:
        return torch.tensor(train(model_name, "all_reduce", batch, clip))

    return run


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("model", MODELS)
def test_exact_strategies_train_as_one_process_does(name: str, model: str, alone: Any) -> None:
    expected = alone(model)
    for weights in run_ranks(train, 3, model, name, 11):
        torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_strategies_stay_close_and_all_replicas_agree(name: str, alone: Any) -> None:
    expected = alone("perceptron")
    torch.manual_seed(0)
    before = torch.cat([parameter.detach().flatten() for parameter in Perceptron().parameters()])
    results = run_ranks(train, 2, "perceptron", name, 11)
    assert results[0] == results[1]
    error = (torch.tensor(results[0]) - expected).norm() / (expected - before).norm()
    assert error < LOSSY[name]


def test_clipping_sees_the_whole_gradient(alone: Any) -> None:
    expected = alone("perceptron", clip=True)
    for weights in run_ranks(train, 2, "perceptron", "all_reduce", 11, True):
        torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-4, atol=2e-6)


def test_more_replicas_than_samples_in_a_batch(alone: Any) -> None:
    expected = alone("perceptron", batch=3)
    for weights in run_ranks(train, 4, "perceptron", "all_reduce", 3):
        torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-4, atol=2e-6)


def with_options(name: str, options: dict[str, Any]) -> list[float]:
    return train("perceptron", reduction_strategy(name, **options), 11)


@pytest.mark.parametrize(
    ("name", "options"), [("sharded", {"staging": "host"}), ("round_robin", {"num_groups": 3})], ids=str
)
def test_options_of_strategies(name: str, options: dict[str, Any], alone: Any) -> None:
    expected = alone("perceptron")
    for weights in run_ranks(with_options, 3, name, options):
        torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-4, atol=2e-6)


def tuned(batch: int) -> tuple[list[float], dict[str, int]]:
    weights = train("perceptron", ["all_reduce", "round_robin", "sharded"], batch, bucket_cap_mb="auto")
    return weights, get_core().registry.capture()["model-0"]["tuned"]


def test_tuning_tries_all_on_all_replicas_and_changes_no_result(alone: Any) -> None:
    """Nine candidates in 3 rounds of 9 steps need 243 steps; batches of one sample give 210: every one is tried."""
    expected = alone("perceptron", batch=1)
    results = run_ranks(tuned, 2, 1)
    for weights, _ in results:
        torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-3, atol=1e-5)


def settled() -> tuple[list[float], dict[str, int]]:
    weights = train("perceptron", ["all_reduce", "round_robin"], 1)
    return weights, get_core().registry.capture()["model-0"]["tuned"]


def test_replicas_settle_on_what_rank_0_found() -> None:
    results = run_ranks(settled, 2)
    assert results[0][1] == results[1][1]
    assert set(results[0][1]) == {"1x2"}


class Mean(nn.Module):
    """The gradient of its mean output is the mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def numbered(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def accumulate(passes: int, clear: str) -> list[tuple[float, list[int]]]:
    """By how much each step moved the weight, and the samples this replica computed for it."""
    reset_core()
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = AdaptiveDataLoader(numbered(200), batch_size=8, shuffle=True)
    loader.autoscale_batch_size(60, local_bsz_bounds=(1, 10), gradient_accumulation=True)
    wrapped = AdaptiveDataParallel(model, optimizer, scaling_rule="none", noise_every=3)
    core = get_core()
    steps: list[tuple[float, list[int]]] = []
    samples: list[int] = []
    for _ in remaining_epochs_until(2):
        for (x,) in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: (5 + core.position.steps % 3, core.position.steps // 3 % 3)  # type: ignore[method-assign]
            samples.extend(x.tolist())
            before = model.weight.item()
            if clear == "first":
                optimizer.zero_grad()
            for _ in range(passes):
                wrapped(x.float()).mean().backward()
            if wrapped.is_last_micro_batch:
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            if clear == "last":
                optimizer.zero_grad(set_to_none=False)
            if wrapped.is_last_micro_batch:
                steps.append((before - model.weight.item(), samples))
                samples = []
    return steps


@pytest.mark.parametrize("clear", ["first", "last"])
@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_several_backward_passes_of_several_micro_batches_add_up(world_size: int, passes: int, clear: str) -> None:
    """As in a GAN's discriminator: the gradient of each pass is the mean over the whole global batch."""
    results = run_ranks(accumulate, world_size, passes, clear)
    assert len({len(result) for result in results}) == 1
    sizes = set()
    for ranks in zip(*results, strict=True):
        batch = [sample for _, samples in ranks for sample in samples]
        sizes.add(len(batch))
        for moved, _ in ranks:
            assert moved == pytest.approx(passes * sum(batch) / len(batch), rel=1e-4)
    assert len(sizes) > 3


def die_in_a_step(name: str) -> str | None:
    """Rank 1 is killed in its fourth step; the others learn of it at that step's end instead of waiting for ever."""
    reset_core()
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveDataLoader(Points(), batch_size=11)
    wrapped = AdaptiveDataParallel(model, optimizer, reduction=name)
    core = get_core()
    for _ in remaining_epochs_until(1):
        for x, y in loader:
            if core.position.steps == 3 and core.generation.group.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            if core.broken is not None:
                unchanged = all(torch.equal(mine, old) for mine, old in zip(model.parameters(), before, strict=True))
                return "unchanged" if unchanged else "changed"
    return None


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_lost_peer_breaks_the_step_and_leaves_the_weights(name: str) -> None:
    results = run_ranks(die_in_a_step, 2, name, dies=1)
    assert results == ["unchanged", None]


def accumulate_by_hand(style: str) -> list[float]:
    """The loop sums the gradients of two batches of the loader itself, as scripts do that know nothing of ours."""
    reset_core()
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveDataLoader(Points(), batch_size=10, shuffle=True)
    wrapped = AdaptiveDataParallel(model, optimizer, noise_every=2)
    for _ in remaining_epochs_until(2):
        for number, (x, y) in enumerate(loader):
            last = number % 2 == 1 or number == 6
            with contextlib.nullcontext() if last or style == "plain" else wrapped.no_sync():
                (nn.functional.cross_entropy(wrapped(x), y) / 2).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    assert wrapped.user_accumulates
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def by_plain_torch() -> torch.Tensor:
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Points()
    cursor = ElasticCursor(SAMPLES, shuffle=True)
    for _ in range(2):
        order = torch.tensor(cursor.order())
        for number in range(7):
            batch = order[number * 10 : (number + 1) * 10]
            (nn.functional.cross_entropy(model(data.x[batch]), data.y[batch]) / 2).backward()
            if number % 2 == 1 or number == 6:
                optimizer.step()
                optimizer.zero_grad()
        cursor.end_pass()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("style", ["no_sync", "plain"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loop_may_accumulate_by_itself(world_size: int, style: str) -> None:
    expected = by_plain_torch()
    for weights in run_ranks(accumulate_by_hand, world_size, style):
        torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-4, atol=1e-6)


def asynchronous(slow: bool, momentum: float) -> tuple[list[float], float, int]:
    """Weights after the training, their loss over all data, and how far this replica was ever ahead of the slowest."""
    reset_core()
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    loader = AdaptiveDataLoader(Points(), batch_size=12, shuffle=True)
    wrapped = AdaptiveDataParallel(model, optimizer, reduction="parameter_server")
    core = get_core()
    ahead = 0
    for _ in remaining_epochs_until(40):
        for x, y in loader:
            if slow and core.generation.group.rank == 1:
                time.sleep(0.004)
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            ahead = max(ahead, core.vote.steps_ahead)
    assert core.broken is None
    data = Points()
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(data.x), data.y))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist(), loss, ahead


@pytest.mark.parametrize("slow", [False, True])
def test_a_parameter_server_learns_and_all_end_with_its_weights(slow: bool) -> None:
    results = run_ranks(asynchronous, 3, slow, 0.5)
    assert all(weights == results[0][0] for weights, _, _ in results)
    assert results[0][1] < 0.9 < 1.38
    # Nobody waits for the others in each step, and nobody runs away from them.
    assert all(0 < ahead <= 3 for _, _, ahead in results)


def test_a_parameter_server_alone_is_plain_training() -> None:
    weights, _, ahead = run_ranks(asynchronous, 1, False, 0.5)[0]
    assert ahead == 0
    assert len(weights) > 100


def server_dies() -> str:
    try:
        return train_until_broken()
    except PeerLost:
        # Noticed at the end of a step, where a scheduler would have published a generation to go on in.
        return "noticed"


def train_until_broken() -> str:
    reset_core()
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveDataLoader(Points(), batch_size=12)
    wrapped = AdaptiveDataParallel(model, optimizer, reduction="parameter_server")
    core = get_core()
    for _ in remaining_epochs_until(100):
        for x, y in loader:
            if core.position.steps == 7 and core.generation.group.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            if core.broken is not None:
                return "noticed"
    return "not noticed"


def test_a_server_that_dies_is_noticed() -> None:
    assert run_ranks(server_dies, 3, dies=0) == [None, "noticed", "noticed"]


def lose_a_peer_that_others_wait_for(name: str) -> str:
    """Rank 1 dies in a step of a ring of three; who notices closes its group, by which the next one notices."""
    reset_core()
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(300, 300)), batch_size=6)
    wrapped = AdaptiveDataParallel(model, optimizer, reduction=name, bucket_cap_mb=0.4)
    core = get_core()
    for _ in remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = wrapped(x).square().mean()
            if core.position.steps == 5 and core.generation.group.rank == 1:
                threading.Timer(0.003, os.kill, (os.getpid(), signal.SIGKILL)).start()
            loss.backward()
            optimizer.step()
            if core.broken is not None:
                # As in a switch to the generation without the lost one; torchrun's own groups stay with torch.
                core.changes._drop_group()
                return "noticed"
    return "not noticed"


@pytest.mark.parametrize("name", ["all_reduce", "round_robin", "sharded"])
def test_all_learn_of_a_lost_peer(name: str) -> None:
    results = run_ranks(lose_a_peer_that_others_wait_for, 3, name, dies=1)
    assert results == ["noticed", None, "noticed"]


def test_options_that_do_not_exist_are_refused_in_words() -> None:
    with pytest.raises(InvalidTraining, match="'all_reduce' was given options it does not have"):
        reduction_strategy("all_reduce", num_groups=2)
    with pytest.raises(InvalidTraining, match="num_groups of round_robin is 0"):
        reduction_strategy("round_robin", num_groups=0)
    with pytest.raises(InvalidTraining, match="staging of sharded is 'disk'"):
        reduction_strategy("sharded", staging="disk")
    with pytest.raises(InvalidTraining, match="matrix_rank=0"):
        reduction_strategy("power_sgd", matrix_rank=0)
    with pytest.raises(InvalidTraining, match="staleness of parameter_server is 0"):
        reduction_strategy("parameter_server", staleness=0)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidTraining, match="name it alone"):
        AdaptiveDataParallel(model, optimizer, reduction=["all_reduce", "parameter_server"])
    with pytest.raises(InvalidTraining, match="given process_group="):
        AdaptiveDataParallel(Perceptron(), torch.optim.SGD([torch.zeros(1)], lr=0.1), process_group=None)


def tune_through(tuner: Tuner, times: list[float]) -> int | None:
    for _ in range(ROUNDS * len(times) * (SKIPPED_STEPS + TIMED_STEPS)):
        tuner.timed(times[tuner.candidate])
        tuner.advance()
    return tuner.proposal


def test_the_first_candidate_stays_unless_another_is_clearly_faster() -> None:
    for times, winner in (([1.0, 0.99], 0), ([1.0, 0.9], 1), ([1.0, 1.5, 0.5], 2)):
        tuner = Tuner(len(times))
        tuner.enter(4, 1)
        assert tune_through(tuner, times) == winner


def test_what_was_found_for_a_size_holds_when_it_comes_again() -> None:
    tuner = Tuner(2)
    tuner.enter(4, 1)
    assert tune_through(tuner, [1.0, 0.5]) == 1
    tuner.settle(1)
    tuner.enter(2, 1)
    assert (tuner.settled, tuner.candidate) == (False, 0)
    tuner.enter(4, 1)
    assert (tuner.settled, tuner.candidate) == (True, 1)
    other = Tuner(2)
    other.load_state_dict(tuner.state_dict())
    other.enter(4, 1)
    assert other.candidate == 1
