"""A loss that is no mean over its samples is told of, once, where replicas or passes average gradients of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

import dist_core
from dist_core.gradients.loss_means import other_than_mean
from dist_core.gradients.mixed_samples import mixes_samples
from tests.support.habits import BATCH, GROWN, Kit, as_trial, examples, hear, network

ROWS, CLASSES = 6, 4
SUM, WEIGHTS, IGNORED = "a sum over the samples", "a mean over class weights", "the labels that are not ignored"
DIVIDED, UNEVEN, TIMES = "a replica's pass, divided by", "elements of 6 samples", "multiplied by 6"
MIXED = "mixes samples"
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
weights = torch.arange(1.0, CLASSES + 1.0)


def with_ignored(labels: torch.Tensor) -> torch.Tensor:
    return torch.where(labels == 1, -100, labels)


def told(loss: torch.Tensor, outputs: torch.Tensor) -> str | None:
    return MIXED if mixes_samples(loss, ROWS, [outputs]) else other_than_mean(loss, ROWS, [outputs], batch=BATCH)


LOSSES: list[tuple[str | None, Loss]] = [
    (None, functional.cross_entropy),
    (None, lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1)),
    (None, lambda x, y: functional.cross_entropy(x, y, reduction="sum") / len(y)),
    (DIVIDED, lambda x, y: functional.cross_entropy(x, with_ignored(y), reduction="sum") / 4),
    (None, lambda x, y: 0.3 * functional.cross_entropy(x, y, reduction="sum") / len(y)),
    (None, lambda x, y: -(x.detach().softmax(1) * x.log_softmax(1)).sum(1).mean()),
    (None, lambda x, y: torch.stack([x[:, index].mean() for index in range(4)]).mean()),
    (None, lambda x, y: functional.mse_loss(x, torch.zeros_like(x), reduction="sum") * (1 / x.numel())),
    (SUM, lambda x, y: -0.5 * x.square().sum()),
    (SUM, lambda x, y: x.square().mean(1).sum()),
    (SUM, lambda x, y: functional.cross_entropy(x, y, reduction="none").masked_select(y != 1).sum()),
    (DIVIDED, lambda x, y: functional.cross_entropy(x, y, reduction="sum") / BATCH),
    (DIVIDED, lambda x, y: (functional.cross_entropy(x, y, reduction="none") * (y != 1)).sum() / (y != 1).sum()),
    (UNEVEN, lambda x, y: functional.cross_entropy(x[y != 1], y[y != 1])),
    (UNEVEN, lambda x, y: x[y != 1][:, 0].mean()),
    (UNEVEN, lambda x, y: functional.binary_cross_entropy_with_logits(x[y != 1], x[y != 1].detach().sigmoid())),
    (MIXED, lambda x, y: 1 - 2 * (x * y[:, None]).sum() / (x.sum() + y.sum())),
    (MIXED, lambda x, y: functional.mse_loss(x, torch.zeros_like(x)) + 0.1 * x.norm()),
    (None, lambda x, y: functional.mse_loss(x, torch.zeros_like(x), reduction="none").mean()),
    (None, lambda x, y: functional.kl_div(x.log_softmax(1), x.detach().softmax(1), reduction="batchmean")),
    (None, lambda x, y: torch.stack([functional.cross_entropy(x, y), x.mean()]).sum()),
    (None, lambda x, y: x.mean()),
    (None, lambda x, y: functional.cross_entropy(x, functional.one_hot(y, CLASSES).float(), label_smoothing=0.1)),
    (None, lambda x, y: x.mean(0).sum()),
    (None, lambda x, y: x.mean(0).mean()),
    (None, lambda x, y: functional.cross_entropy(x, y).sum(0)),
    (None, lambda x, y: x.square().sum() / float("inf")),
    (None, lambda x, y: torch.stack([functional.mse_loss(row, 2.0 * row.detach()) for row in x]).mean()),
    (None, lambda x, y: torch.bmm(x[:, None], x[..., None]).mean()),
    (None, lambda x, y: torch.cdist(x, torch.ones(3, CLASSES)).mean()),
    (None, lambda x, y: 3.0 * functional.cross_entropy(x, y)),
    (SUM, lambda x, y: x.sum(0).mean()),
    (TIMES, lambda x, y: len(x) * (functional.cross_entropy(x, y) + x.mean())),
    (MIXED, lambda x, y: functional.mse_loss(x, torch.zeros_like(x)).sqrt()),
    (MIXED, lambda x, y: -10.0 * torch.log10(1.0 / functional.mse_loss(x, torch.zeros_like(x)))),
    (MIXED, lambda x, y: torch.cdist(x, x).mean()),
    (MIXED, lambda x, y: functional.relu(3.0 - x.std(0)).mean()),
    (None, lambda x, y: x.var(1).mean()),
    (MIXED, lambda x, y: functional.pdist(x).mean()),
    (MIXED, lambda x, y: (x * x.roll(1, 0)).mean()),
    (MIXED, lambda x, y: (x[:, None] - x).square().sum(2).neg().exp().mean()),
    (MIXED, lambda x, y: (x.softmax(1).mean(0) * x.softmax(1).mean(0).log()).sum()),
    (MIXED, lambda x, y: (x.softmax(1) / x.softmax(1).sum(0) * x).mean()),
    (MIXED, lambda x, y: functional.triplet_margin_loss(x[:2], x[2:4], x[4:])),
    (None, lambda x, y: functional.cosine_embedding_loss(x, torch.ones_like(x), torch.ones(ROWS))),
    (None, lambda x, y: functional.multi_margin_loss(x, y)),
    (None, lambda x, y: (x.softmax(1).log() * x.softmax(1)).sum(1).mean()),
    (MIXED, lambda x, y: torch.einsum("ij,kj->ik", x, x).mean()),
    (SUM, lambda x, y: functional.cross_entropy(x, y, reduction="sum")),
    (SUM, lambda x, y: functional.mse_loss(x, torch.zeros_like(x), reduction="sum")),
    (SUM, lambda x, y: functional.mse_loss(x, torch.zeros_like(x), reduction="none").sum()),
    (SUM, lambda x, y: functional.l1_loss(x, torch.zeros_like(x), reduction="sum") + x.mean()),
    (SUM, lambda x, y: functional.cross_entropy(x, y, reduction="none").sum()),
    (SUM, lambda x, y: functional.cross_entropy(x, y, reduction="sum") / 1),
    (WEIGHTS, lambda x, y: functional.cross_entropy(x, y, weight=weights)),
    (WEIGHTS, lambda x, y: 0.5 * functional.nll_loss(x.log_softmax(1), y, weight=weights)),
    (IGNORED, lambda x, y: functional.cross_entropy(x, with_ignored(y))),
    (IGNORED, lambda x, y: functional.cross_entropy(x.T[None], with_ignored(y)[None])),
]


@pytest.mark.parametrize(("expected", "loss"), LOSSES)
def test_a_loss_is_known_by_its_graph(expected: str | None, loss: Loss) -> None:
    x = torch.randn(ROWS, CLASSES, requires_grad=True, generator=torch.Generator().manual_seed(0))
    outputs = 2.0 * x
    decay = 0.1 * (x.square().sum() + x[:, 0].mean() / x.norm())
    words = told(loss(outputs, torch.arange(ROWS) % CLASSES) + decay, outputs)
    assert (words is None) == (expected is None), words
    assert expected is None or expected in str(words)


def test_a_sum_is_right_that_a_trainer_divides_by_what_it_knows() -> None:
    x = torch.randn(ROWS, CLASSES, requires_grad=True, generator=torch.Generator().manual_seed(0))
    loss = functional.cross_entropy(2.0 * x, torch.arange(ROWS) % CLASSES, reduction="sum") / 8.5
    assert DIVIDED in str(other_than_mean(loss, ROWS))
    assert other_than_mean(loss, ROWS, denominator=8.5) is None


@pytest.mark.parametrize("in_turns", [True, False])
def test_two_views_of_a_sample_may_be_compared_with_each_other_and_not_with_those_of_others(in_turns: bool) -> None:
    outputs = 2.0 * torch.randn(2 * ROWS, CLASSES, requires_grad=True, generator=torch.Generator().manual_seed(0))
    first, second = (outputs[:ROWS], outputs[ROWS:]) if in_turns else (outputs[::2], outputs[1::2])
    assert not mixes_samples(functional.mse_loss(first.softmax(1), second.softmax(1)), ROWS, [outputs])
    across = functional.cross_entropy(first @ second.T, torch.arange(ROWS))
    assert mixes_samples(across, ROWS, [outputs])


def test_samples_may_be_in_the_second_dimension() -> None:
    outputs = 2.0 * torch.randn(12, ROWS, CLASSES, requires_grad=True, generator=torch.Generator().manual_seed(0))
    assert not mixes_samples(outputs.square().mean((0, 2)).sqrt().mean(), ROWS, [outputs])
    assert mixes_samples(outputs.square().mean((1, 2)).sqrt().mean(), ROWS, [outputs])
    # Boxes, of which there are six for each of four samples, and distances within each sample.
    boxes = 2.0 * torch.rand(24, 4, requires_grad=True, generator=torch.Generator().manual_seed(0))
    assert not mixes_samples((boxes.square().sum(1) / boxes.sum(1)).mean(), 4, [boxes])
    assert not mixes_samples(torch.cdist(outputs, outputs).mean(), 12, [outputs])
    assert not mixes_samples(boxes.square().mean().sqrt(), 1, [boxes])
    # Nothing tells where they are here.
    assert not mixes_samples(outputs[:7].flatten().square().mean().sqrt(), 5, [outputs])


def test_what_lies_between_two_outputs_is_the_models() -> None:
    norm = torch.nn.Sequential(torch.nn.BatchNorm1d(CLASSES), torch.nn.Linear(CLASSES, CLASSES))
    features = 2.0 * torch.randn(ROWS, CLASSES, requires_grad=True, generator=torch.Generator().manual_seed(0))
    logits = norm(features)
    loss = functional.cross_entropy(logits, torch.arange(ROWS) % CLASSES) + functional.mse_loss(features, features * 0)
    assert not mixes_samples(loss, ROWS, [features, logits])


def test_a_look_at_samples_leaves_the_graph_and_its_hooks_alone() -> None:
    x = torch.randn(ROWS, CLASSES, requires_grad=True, generator=torch.Generator().manual_seed(0))
    outputs, reached = 2.0 * x, []
    outputs.register_hook(lambda gradient: reached.append(len(gradient)))
    loss = outputs.square().mean().sqrt()
    assert mixes_samples(loss, ROWS, [outputs])
    assert not reached
    loss.backward()
    assert reached == [ROWS]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2.0 * outputs.detach() / outputs.numel() / loss.detach())


Step = Callable[[Any, torch.nn.Module, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns a loss, of the loader, the model, the number of the batch and the batch itself."""


def squares(loader: Any, model: torch.nn.Module, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(x), y)


def sum_of_squares(loader: Any, model: torch.nn.Module, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(x), y, reduction="sum")


def weighed_sum(loader: Any, model: torch.nn.Module, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loader.weigh(len(y))
    return sum_of_squares(loader, model, index, x, y)


def decayed_by_turns(loader: Any, model: torch.nn.Module, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    decay = 0.01 * torch.stack([weight.square().sum() for weight in model.parameters()]).sum()
    return squares(loader, model, index, x, y) + decay if index % 2 else squares(loader, model, index, x, y)


def decayed_by_progress(
    loader: Any, model: torch.nn.Module, index: int, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    return decayed_by_turns(loader, model, dist_core.progress_step(BATCH), x, y)


def with_a_scale_of_its_own(
    loader: Any, model: torch.nn.Module, index: int, x: torch.Tensor, y: torch.Tensor, *, anew: bool = False
) -> torch.Tensor:
    """A weight that no model has, with an optimizer of its own: for the whole training, or anew in each step."""
    if anew or not hasattr(loader, "scale"):
        loader.scale = torch.nn.Parameter(torch.ones(1))
        loader.of_scale = torch.optim.SGD([loader.scale], lr=0.01)
    loader.scale.grad = torch.ones(1)
    loader.of_scale.step()
    return squares(loader, model, index, x, y)


def with_a_norm() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def with_spectral_norm() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(6, 3))
    return torch.nn.Sequential(layer, torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def said(
    kit: Kit, *, loss: Step = sum_of_squares, model: Callable[[], torch.nn.Module] = network, about: str = "the loss is"
) -> list[str]:
    """Return what is logged about this while the trial trains."""
    words: list[str] = []
    hear(words)
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.001)
    loader, wrapped = kit.loader(examples()), kit.wrap(made, optimizer)
    for _ in kit.epochs(2):
        for index, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss(loader, wrapped, index, x, y).backward()
            optimizer.step()
    return [each for each in words if about in each]


said_of_norms = partial(said, loss=squares, model=with_a_norm, about="batch norms")


@pytest.mark.parametrize(("passes", "by_steps"), [(1, False), (2, False), (3, False), (2, True)])
def test_a_count_of_batches_that_decides_what_is_computed_is_told_of_where_steps_are_divided(
    passes: int, by_steps: bool
) -> None:
    loss = decayed_by_progress if by_steps else decayed_by_turns
    [told] = as_trial(partial(said, loss=loss, about="two passes of one step"), 1, passes)
    assert len(told) == (1 if passes > 1 and not by_steps else 0)


@pytest.mark.parametrize(("replicas", "anew", "times"), [(2, False, 1), (2, True, 0), (1, False, 0)])
def test_weights_that_no_model_has_are_told_of_where_they_are_trained(replicas: int, anew: bool, times: int) -> None:
    loss = partial(with_a_scale_of_its_own, anew=anew)
    first, *others = as_trial(partial(said, loss=loss, about="of no wrapped model"), replicas)
    assert len(first) == times
    assert not any(others)


def said_of_rates(kit: Kit, *, by_progress: bool) -> list[str]:
    words: list[str] = []
    hear(words)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer, lr_scheduler=schedule)
    for _ in kit.epochs(2):
        for index, (x, y) in enumerate(loader):
            if not by_progress:
                optimizer.param_groups[0]["lr"] = 0.001 / (1 + index)
            optimizer.zero_grad()
            functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
            if by_progress:
                schedule.step()
    return [each for each in words if "another learning rate" in each]


@pytest.mark.parametrize(("passes", "by_progress"), [(1, False), (2, False), (3, False), (3, True)])
def test_a_rate_that_changes_within_a_step_is_told_of_once(passes: int, by_progress: bool) -> None:
    [told] = as_trial(partial(said_of_rates, by_progress=by_progress), 1, passes)
    assert len(told) == (1 if passes > 1 and not by_progress else 0)


def test_a_replica_that_joins_tells_that_enumerate_counts_otherwise() -> None:
    first, *joiners = as_trial(partial(said, loss=squares, about="enumerate() does not count"), GROWN)
    assert not first
    assert joiners and all(len(each) == 1 for each in joiners)


@pytest.mark.parametrize(("replicas", "passes"), [(2, 1), (1, 2), (1, 1)])
def test_batch_norms_that_see_fewer_samples_are_told_of_once(replicas: int, passes: int) -> None:
    first, *others = as_trial(said_of_norms, replicas, passes)
    assert len(first) == (1 if replicas * passes > 1 else 0)
    assert not first or "over the 12 samples of a replica's pass instead of the script's 24" in first[0]
    assert not any(others)


@pytest.mark.parametrize(("replicas", "passes"), [(2, 1), (1, 2), (1, 1)])
def test_buffers_that_forward_passes_write_are_told_of_once_where_a_step_has_several(
    replicas: int, passes: int
) -> None:
    first, *others = as_trial(
        partial(said, loss=squares, model=with_spectral_norm, about="changes its buffer '_u'"), replicas, passes
    )
    assert len(first) == (1 if passes > 1 else 0)
    assert not any(others)


@pytest.mark.parametrize(("replicas", "passes"), [(2, 1), (1, 2)])
def test_a_sum_is_told_of_once_where_gradients_are_averaged(replicas: int, passes: int) -> None:
    first, *others = as_trial(said, replicas, passes)
    assert len(first) == 1
    assert "Sequential, but the loss is a sum over the samples of a batch. Divide it" in first[0]
    assert not any(others)


@pytest.mark.parametrize(
    ("replicas", "code"), [(1, said), (2, partial(said, loss=squares)), (2, partial(said, loss=weighed_sum))]
)
def test_nothing_is_told_where_gradients_are_right(replicas: int, code: Callable[[Kit], list[str]]) -> None:
    assert not any(as_trial(code, replicas))


def test_a_loss_that_compares_samples_is_known_where_the_model_ends() -> None:
    head = torch.nn.Linear(CLASSES, CLASSES)
    x = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(ROWS)
    outputs = head(x)
    normed = functional.normalize(outputs)
    for logits in (normed @ normed.T, outputs @ outputs.T):
        assert mixes_samples(functional.cross_entropy(logits, labels), ROWS, [outputs])
    # A layer of the loss's own, and products within the model, are none.
    assert not mixes_samples(functional.cross_entropy(head(normed), labels % CLASSES), ROWS, [outputs])
    within = head((x @ x.T) @ outputs)
    assert not mixes_samples(functional.cross_entropy(within, labels % CLASSES), ROWS, [within])


def test_outputs_that_come_through_one_node_are_looked_at_as_well() -> None:
    """DDP leads all outputs of a model through a node of its own where weights may be unused."""

    class Sink(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(each.clone() for each in tensors)

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return gradients

    torch.manual_seed(0)
    hidden = torch.nn.Linear(CLASSES, CLASSES)(torch.randn(ROWS, CLASSES))
    outputs, unused = Sink.apply(hidden, hidden.tanh())
    labels = torch.arange(ROWS)
    assert mixes_samples(functional.cross_entropy(outputs @ outputs.T, labels), ROWS, [outputs, unused])
    assert not mixes_samples(functional.cross_entropy(outputs, labels % CLASSES), ROWS, [outputs, unused])


class Carrying(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.RNN(6, 8, batch_first=True)
        self.outer = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, state = self.inner(x[:, None], state)
        return self.outer(outputs[:, -1]), state


def carries(kit: Kit, *, on: bool = True) -> list[str]:
    words: list[str] = []
    hear(words)
    model = Carrying()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    for _ in kit.epochs(2):
        state: torch.Tensor | None = None
        for x, y in loader:
            optimizer.zero_grad()
            outputs, state = wrapped(x, state if on else None)
            functional.mse_loss(outputs, y).backward()
            optimizer.step()
            state = state.detach()
    return [each for each in words if "returned for the batch before" in each]


@pytest.mark.parametrize(("replicas", "passes", "on"), [(2, 1, True), (1, 2, True), (2, 1, False), (1, 1, True)])
def test_a_state_that_is_carried_on_is_told_of_once_where_batches_are_divided(
    replicas: int, passes: int, on: bool
) -> None:
    first, *others = as_trial(partial(carries, on=on), replicas, passes)
    assert len(first) == (on and (replicas > 1 or passes > 1))
    assert not any(others)
