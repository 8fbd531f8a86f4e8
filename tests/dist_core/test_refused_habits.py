"""Training code that cannot work is refused by name, in words that help."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.utils.data import DataLoader, Dataset

import dist_core
import dist_core.generations.membership
import dist_core.trial.current
from tests.support.habits import (
    BATCH,
    GROWN,
    PAIR,
    Habit,
    Kit,
    as_trial,
    examples,
    in_plain_pytorch,
    network,
    told_by_one_replica,
    weights_of,
)
from tests.support.shared_habits import (
    mse,
    simple,
)


def one_step(kit: Kit, step: Callable[..., Any], **options: Any) -> None:
    model = network()
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    wrapped = kit.wrap(model, optimizer, **options)
    for _ in kit.epochs(1):
        for x, y in kit.loader(examples()):
            step(wrapped, optimizer, x, y)


def with_lbfgs(kit: Kit) -> None:
    one_step(kit, lambda *_: None, optimizer=torch.optim.LBFGS)


def with_a_hook(kit: Kit) -> None:
    one_step(kit, lambda model, *_: model.register_comm_hook(None, print))


def with_join(kit: Kit) -> None:
    one_step(kit, lambda model, *_: model.join())


def with_a_process_group(kit: Kit) -> None:
    one_step(kit, lambda *_: None, process_group=object())


def around_the_wrapper(kit: Kit) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        mse(model.module(x), y).backward()
        optimizer.step()

    one_step(kit, step)


def outside_of_the_loop_in_evaluation_mode(kit: Kit) -> None:
    one_step(kit, lambda *_: None)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = kit.wrap(model, optimizer).eval()
    wrapped(torch.ones(4, 6)).sum().backward()
    optimizer.step()


def without_a_loader(kit: Kit) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = kit.wrap(model, optimizer)
    wrapped(torch.ones(4, 6)).sum().backward()
    optimizer.step()


def around_the_wrapper_without_a_loader(kit: Kit) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kit.wrap(model, optimizer).module(torch.ones(4, 6)).sum().backward()
    optimizer.step()


def with_an_optimizer_that_nobody_gave(kit: Kit) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        mse(model(x), y).backward()
        optimizer.step()
        torch.optim.AdamW(model.parameters(), lr=0.1).step()

    one_step(kit, step)


def with_a_loader_of_its_own(kit: Kit) -> list[float]:
    """As semi-supervised training does; its evaluations are none of this."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = kit.wrap(model, optimizer)
    others = DataLoader(examples(), batch_size=8)
    drawn = iter(others)
    for _ in kit.epochs(3):
        for x, y in kit.loader(examples()):
            with torch.no_grad():
                assert len([wrapped(each) for each, _ in others]) == 12
            try:
                unlabelled, _ = next(drawn)
            except StopIteration:
                drawn = iter(others)
                unlabelled, _ = next(drawn)
            optimizer.zero_grad()
            (mse(wrapped(x), y) + 0.1 * wrapped(unlabelled).pow(2).mean()).backward()
            optimizer.step()
    return weights_of(model)


def with_evaluations_alone(kit: Kit) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(1):
        for x, y in kit.loader(examples()):
            with torch.no_grad():
                assert len([wrapped(each) for each, _ in DataLoader(examples(), batch_size=8)]) == 12
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
    return weights_of(model)


def with_a_loss_that_learns(kit: Kit) -> None:
    model, loss = network(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(1):
        for x, y in kit.loader(examples()):
            mse(loss(wrapped(x)), y).backward()
            optimizer.step()


class Moody(torch.utils.data.Sampler[int]):
    """Draws from a generator of its own, which nobody seeds."""

    def __init__(self) -> None:
        self.own = torch.Generator()
        self.own.seed()

    def __len__(self) -> int:
        return 96

    def __iter__(self) -> Any:
        return iter(torch.randperm(96, generator=self.own).tolist())


def with_a_sampler_of_its_own_mind(kit: Kit) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(1):
        for x, y in kit.loader(examples(), sampler=Moody()):
            mse(wrapped(x), y).backward()
            optimizer.step()


def with_a_group_of_some_ranks(kit: Kit) -> None:
    one_step(kit, lambda *_: None)
    torch.distributed.new_group([0])


def with_rates_of_its_own(kit: Kit) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 + dist_core.rank()
        mse(model(x), y).backward()
        optimizer.step()

    one_step(kit, step)


def with_an_update_that_one_replica_skips(kit: Kit) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        if dist_core.rank() == 0:
            optimizer.step()

    one_step(kit, step)


def with_a_state_that_cannot_come_back(kit: Kit) -> None:
    class Kept:
        def state_dict(self) -> dict[str, Any]:
            return {"recent": [1.0, deque([2.0])]}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("never")

    dist_core.register_state("mine", Kept())
    one_step(kit, lambda *_: None)
    dist_core.trial.current.get_core().saving.save(leaving=False)


def with_torchs_own_wrapper(kit: Kit) -> None:
    nn.parallel.DistributedDataParallel(network())


def with_schedules_that_nobody_gave(kit: Kit) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    schedules = [lr.StepLR(optimizer, 2, 0.5), lr.ExponentialLR(optimizer, 0.9)]
    for _ in kit.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
        for each in schedules:
            each.step()
    return weights_of(model)


def with_a_layer_that_is_frozen_within_the_step(kit: Kit) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    for _ in kit.epochs(1):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            model[0].requires_grad_(False)
            mse(wrapped(x), y).backward()
            model[0].requires_grad_(True)
            optimizer.step()


def with_a_second_backward_pass(kit: Kit) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = mse(model(x), y)
        loss.backward(retain_graph=True)
        (0.1 * loss).backward()
        optimizer.step()

    one_step(kit, step)


def with_passes_crossed(kit: Kit) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        losses = [mse(model(x), y), mse(model(2.0 * x), y)]
        for loss in losses:
            loss.backward()
        optimizer.step()

    one_step(kit, step)


def with_a_weight_that_takes_no_part(kit: Kit) -> None:
    model = network()
    model.register_parameter("idle", nn.Parameter(torch.ones(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    for _ in kit.epochs(1):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()


class Climbing(torch.optim.SGD):
    """Sharpness-aware minimisation: asks its closure where the loss is largest nearby."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it requires closure"
        closure = torch.enable_grad()(closure)
        closure()
        return super().step()


def with_a_closure_that_the_optimizer_keeps(kit: Kit) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            loss = mse(model(x), y)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)

    one_step(kit, step, optimizer=Climbing)


def with_a_prefetcher(kit: Kit, moved: Callable[[Any], Any] = lambda batch: batch) -> list[float]:
    """Each batch is trained when the next one has been fetched, and perhaps moved to another device."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)

    def train(batch: Any) -> None:
        optimizer.zero_grad()
        mse(wrapped(batch[0]), batch[1]).backward()
        optimizer.step()

    for _ in kit.epochs(2):
        batches = iter(loader)
        following = moved(next(batches))
        for batch in batches:
            present, following = following, moved(batch)
            train(present)
        train(following)
    return weights_of(model)


def with_a_prefetcher_to_a_device(kit: Kit) -> list[float]:
    return with_a_prefetcher(kit, lambda batch: tuple(each.clone() for each in batch))


def with_batches_counted_first(kit: Kit) -> None:
    """The batches of a window are fetched, and their tokens counted, before the first of them is trained."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    for _ in kit.epochs(1):
        batches = iter(loader)
        while window := list(islice(batches, 2)):
            tokens = sum(len(y) for _, y in window)
            for x, y in window:
                (mse(wrapped(x), y, reduction="sum") / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()


def with_an_attack(kit: Kit) -> list[float]:
    """Adversarial examples of the model as it trains: a backward pass whose gradients are thrown away."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    for _ in kit.epochs(2):
        for x, y in loader:
            change = torch.zeros_like(x, requires_grad=True)
            mse(wrapped(x + change), y).backward()
            assert change.grad is not None
            optimizer.zero_grad()
            mse(wrapped((x + 0.1 * change.grad.sign()).detach()), y).backward()
            optimizer.step()
    return weights_of(model)


def with_updates_in_the_backward_pass(kit: Kit) -> None:
    model = network()
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}
    for each, optimizer in optimizers.items():
        each.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    loader, wrapped = kit.loader(examples()), kit.wrap(model, list(optimizers.values()))
    for _ in kit.epochs(1):
        for x, y in loader:
            mse(wrapped(x), y).backward()


def with_gradients_that_it_sets(kit: Kit) -> list[float]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        weights = list(model.parameters())
        for weight, gradient in zip(weights, torch.autograd.grad(mse(model(x), y), weights), strict=True):
            weight.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    return simple(kit, step)


def with_norms_of_gradients(kit: Kit) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        torch.stack([each.grad.norm() for each in model.parameters()])
        optimizer.step()

    one_step(kit, step)


def with_rows_carried_on(kit: Kit) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped, before = kit.loader(examples()), kit.wrap(model, optimizer), torch.zeros(1, 1)
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            outputs = wrapped(x)
            mse(outputs + 0.0 * before, y).backward()
            optimizer.step()
            before = outputs.detach()


def with_batches_by_number(kit: Kit) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    for _ in kit.epochs(1):
        batches = iter(loader)
        # As many as it had where the trial was resumed behind the first.
        for _ in range(len(loader) + 1):
            x, y = next(batches)
            mse(wrapped(x), y).backward()
            optimizer.step()


def with_the_batch_written_down(kit: Kit) -> None:
    """As in contrastive losses: a mask of pairs that is made of the batch size of the configuration."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped, pairs = kit.loader(examples()), kit.wrap(model, optimizer), ~torch.eye(2 * BATCH, dtype=torch.bool)
    for _ in kit.epochs(3):
        for x, _y in loader:
            optimizer.zero_grad()
            outputs = wrapped(torch.cat([x, x]))
            (outputs @ outputs.T)[pairs].mean().backward()
            optimizer.step()


def with_weights_that_it_clamps(kit: Kit) -> list[float]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        for weight in model.parameters():
            weight.data.clamp_(-0.05, 0.05)

    return simple(kit, step)


def with_weights_that_it_perturbs(kit: Kit) -> bool:
    """As sharpness-aware minimisation and adversarial weights do; true if its steps are of one pass from then on."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        moved = [(each, 0.05 * each.grad) for each in model.parameters() if each.grad is not None]
        for weight, by in moved:
            weight.data.add_(by)
        mse(model(x), y).backward()
        for weight, by in moved:
            weight.data.sub_(by)
        optimizer.step()

    simple(kit, step)
    return dist_core.trial.current.get_core().pacing.habits.trains_in_turns


def with_a_dataset_that_grows(kit: Kit) -> None:
    """As in active learning, which adds what it has labelled."""
    samples = [(torch.randn(6), torch.zeros(1)) for _ in range(60)]

    class Labelled(Dataset[Any]):
        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, index: int) -> Any:
            return samples[index]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        samples[60:] = samples[:12]

    simple(kit, step, data=Labelled())


REFUSALS: list[tuple[Habit, str, int]] = [
    (with_a_group_of_some_ranks, r"new_group was given the ranks \[0\] of 2", PAIR),
    (with_torchs_own_wrapper, "DistributedDataParallel calls collectives when it is created", PAIR),
    (with_schedules_that_nobody_gave, "sets the learning rate of SGD but was not given", 1),
    (with_lbfgs, "LBFGS needs a closure, which it may evaluate several times", 1),
    (with_a_hook, r"no register_comm_hook\(\)", 1),
    (with_join, r"no join\(\)", 1),
    (with_a_process_group, "was given process_group=", 1),
    (around_the_wrapper, "gradients that were not reduced over the 2 replicas", 2),
    (with_gradients_that_it_sets, r"the gradients come from torch.autograd.grad\(\)", 2),
    (without_a_loader, "the 2 replicas: each would train by itself", PAIR),
    (around_the_wrapper_without_a_loader, "the 2 replicas: each would train by itself", 2),
    (outside_of_the_loop_in_evaluation_mode, "gradients that were not reduced over the 2 replicas", 2),
    (with_a_second_backward_pass, "a second backward pass goes through", 2),
    (with_passes_crossed, "a second backward pass goes through", 2),
    (with_a_layer_that_is_frozen_within_the_step, "the weight '0.bias' of Sequential was frozen or unfrozen within", 2),
    (
        with_a_weight_that_takes_no_part,
        "1 weights of Sequential have no gradient .*the first is 'idle'.*find_unused",
        2,
    ),
    (with_a_closure_that_the_optimizer_keeps, "Climbing itself runs the closure that step", 1),
    (with_an_optimizer_that_nobody_gave, "AdamW steps 4 parameters of a model that was wrapped without it", 1),
    (with_a_loss_that_learns, "SGD trains 2 parameters that belong to no wrapped model", 1),
    (with_a_dataset_that_grows, "had 60 samples when the loader was made and has 72 now", 1),
    (with_a_sampler_of_its_own_mind, "the sampler draws a different order on each", 2),
    (with_rates_of_its_own, "the learning rates differ between the replicas", 2),
    (with_an_update_that_one_replica_skips, r"skips optimizer.step\(\) after backward\(\)", 2),
    (with_a_prefetcher, "trains on a batch after it has fetched the next one", 1),
    (with_a_prefetcher, "trains on a batch after it has fetched the next one", 2),
    (with_a_prefetcher_to_a_device, "trains on a batch after it has fetched the next one", 1),
    (with_batches_counted_first, "trains on a batch after it has fetched the next one", 2),
    (with_a_state_that_cannot_come_back, r"user-mine\['recent'\]\[1\] holds a collections.deque", 2),
]


@pytest.mark.parametrize(("breaks", "match", "replicas"), REFUSALS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_habit_that_cannot_work_is_refused_by_name(breaks: Habit, match: str, replicas: int) -> None:
    with pytest.raises(AssertionError, match=match):
        as_trial(breaks, replicas)


@pytest.mark.parametrize(
    ("breaks", "match"),
    [
        (around_the_wrapper, "gradients that were not reduced over the passes of this step"),
        (with_an_attack, "clears gradients between a backward pass and the optimizer's step"),
        (with_gradients_that_it_sets, r"sets gradients by itself, as after torch.autograd.grad\(\)"),
        (with_weights_that_it_clamps, "changes weights of Sequential by itself, as to clamp or to decay them"),
        (with_weights_that_it_perturbs, "moves weights of Sequential between two outputs of one batch"),
        (with_a_loader_of_its_own, "draws batches from a DataLoader of its own in its body"),
        (with_updates_in_the_backward_pass, r"SGD.step\(\) runs within backward\(\), in a hook of a gradient"),
    ],
)
def test_a_habit_that_cannot_be_divided_is_refused_by_name(breaks: Habit, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        as_trial(breaks, 1, 3)


@pytest.mark.parametrize(
    ("trains", "replicas", "passes"),
    [(with_a_loader_of_its_own, 1, 1), (with_a_loader_of_its_own, 2, 1), (with_evaluations_alone, 1, 3)],
)
def test_batches_of_a_loader_that_is_not_the_trials_train_as_in_plain_pytorch(
    trains: Habit, replicas: int, passes: int
) -> None:
    expected = in_plain_pytorch(trains)
    for weights in as_trial(trains, replicas, passes):
        assert weights == pytest.approx(expected, abs=1e-5)


def test_a_step_that_cannot_be_divided_is_of_one_pass_from_the_beginning() -> None:
    assert as_trial(with_weights_that_it_perturbs, 1) == [True]


@pytest.mark.parametrize(
    ("fails", "replicas", "passes", "match"),
    [
        (with_norms_of_gradients, PAIR, 2, "this step takes several passes.*Gradients are None until the last pass"),
        (with_the_batch_written_down, PAIR, 1, "this pass has 12 of the batch's 24 samples.*ask the batch"),
        (with_batches_by_number, PAIR, 1, "it had no more batches: .* has those that are left"),
        (with_rows_carried_on, GROWN, 1, "this replica's part of the batch has [0-9]+ samples, and that .* before had"),
    ],
)
def test_an_error_of_the_loop_tells_what_of_its_batch_is_the_trials(
    fails: Habit, replicas: int, passes: int, match: str
) -> None:
    with pytest.raises(AssertionError, match=match):
        as_trial(fails, replicas, passes)


@pytest.mark.parametrize("replicas", [1, 2])
def test_adversarial_examples_train_as_in_plain_pytorch(replicas: int) -> None:
    expected = in_plain_pytorch(with_an_attack)
    for weights in as_trial(with_an_attack, replicas):
        assert weights == pytest.approx(expected, abs=1e-5)


def test_gradients_that_a_loop_sets_train_one_replica_as_in_plain_pytorch() -> None:
    (weights,) = as_trial(with_gradients_that_it_sets, 1)
    assert weights == pytest.approx(in_plain_pytorch(with_gradients_that_it_sets), abs=1e-5)


def test_steps_are_not_divided_to_measure_the_noise_where_gradients_are_cleared() -> None:
    assert as_trial(passes_of_steps_with_an_attack, 1) == [{1}]


def passes_of_steps_with_an_attack(kit: Kit) -> set[int]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader, wrapped = kit.loader(examples(480)), kit.wrap(model, optimizer)
    loader.autoscale_batch_size(240, local_bsz_bounds=(8, 120))
    passes, of_step = set(), 0
    for _ in kit.epochs(3):
        for x, y in loader:
            mse(wrapped(x), y).backward()
            optimizer.zero_grad()
            mse(wrapped(2.0 * x), y).backward()
            optimizer.step()
            of_step += 1
            if dist_core.trial.current.get_core().models[0].step_place.is_last_micro_batch:
                passes.add(of_step)
                of_step = 0
    return passes


def a_step_longer_than_the_grace(kit: Kit) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        dist_core.generations.membership.GRACE_MARGIN_SECONDS = 59.7
        core = dist_core.trial.current.get_core()
        assert core.membership is not None
        core.membership.told_to_end()
        time.sleep(30.0)

    one_step(kit, step)


def test_a_replica_that_comes_to_no_place_to_leave_at_says_what_is_lost() -> None:
    [sentence] = told_by_one_replica(a_step_longer_than_the_grace)
    assert "did not reach a point where it can save within 0 s" in sentence
    assert "its work since the last checkpoint is lost" in sentence
    assert "terminationGracePeriodSeconds" in sentence
