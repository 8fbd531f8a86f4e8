"""Weights that no replica trains need not travel: each builds them, and is told where it builds others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.errors import InvalidTraining
from dist_core.gradients.frozen_weights import FrozenWeights, sum_of_bits
from dist_core.gradients.wrapped_state import WrappedState
from dist_core.torch_private import times_written
from dist_core.trial.current import get_core, reset_core
from tests.support.ranks import run_ranks

BASE = 40_000


class Adapted(nn.Module):
    """A frozen base, tied to its output as language models are, and an adapter beside it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Embedding(BASE // 8, 8)
        self.out = nn.Linear(8, BASE // 8, bias=False)
        self.out.weight = self.base.weight
        self.base.requires_grad_(False)
        torch.manual_seed(1)
        self.adapter = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        found: torch.Tensor = self.out(y + self.adapter(y))
        return found


def state_of(model: nn.Module) -> WrappedState:
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad])
    return WrappedState(model, [optimizer], [], None, FrozenWeights(model))


def test_they_are_left_out_and_the_rest_is_restored() -> None:
    model = Adapted()
    state = state_of(model).state_dict()
    assert state["module"].keys() == {"adapter.weight", "adapter.bias"}
    assert state["frozen"].keys() == {"base.weight", "out.weight"}
    other = Adapted()
    with torch.no_grad():
        other.adapter.weight.zero_()
    state_of(other).load_state_dict(state)
    torch.testing.assert_close(other.adapter.weight, model.adapter.weight)


def test_what_is_written_to_or_trained_later_goes_along() -> None:
    written, thawed = Adapted(), Adapted()
    first, second = FrozenWeights(written), FrozenWeights(thawed)
    with torch.no_grad():
        written.base.weight.mul_(2.0)
    thawed.base.requires_grad_(True)
    assert first.names() == second.names() == set()
    assert FrozenWeights(thawed).names() == set()


def test_what_is_written_behind_torchs_back_goes_along() -> None:
    averaged, pruned = Adapted(), Adapted()
    first, second = FrozenWeights(averaged), FrozenWeights(pruned)
    averaged.base.weight.data.mul_(0.9)
    pruned.base.weight.data[: BASE // 16] = 0.0
    assert first.names() == second.names() == set()


def test_weights_of_any_kind_can_be_frozen() -> None:
    flat = torch.randn(11, dtype=torch.bfloat16)
    model = nn.Module()
    model.odd = nn.Parameter(flat[1:10].detach(), requires_grad=False)
    model.empty = nn.Parameter(torch.zeros(0), requires_grad=False)
    model.turned = nn.Parameter(torch.randn(3, 5).T, requires_grad=False)
    with torch.inference_mode():
        inferred = nn.Linear(2, 2)
    model.inferred = inferred.requires_grad_(False)
    frozen = FrozenWeights(model)
    assert frozen.names() == {"odd", "empty", "turned"}
    del model.turned
    assert frozen.names() == {"odd", "empty"}


def test_rows_in_another_order_are_another_base() -> None:
    model, other = Adapted(), Adapted()
    with torch.no_grad():
        other.base.weight.copy_(other.base.weight.flip(0))
    with pytest.raises(InvalidTraining, match="the frozen weights"):
        state_of(other).load_state_dict(state_of(model).state_dict())
    for size in (1, 7, 4096, 1 << 18):
        tensor = torch.randn(size, dtype=torch.float64)
        assert sum_of_bits(tensor) == sum_of_bits(tensor.clone())
        assert size == 1 or sum_of_bits(tensor) != sum_of_bits(tensor.roll(1))
        for kind in (torch.float64, torch.float32, torch.bfloat16):
            assert sum_of_bits(tensor.to(kind)) != sum_of_bits(-tensor.to(kind))


def test_another_base_is_refused_by_name() -> None:
    state = state_of(Adapted()).state_dict()
    with pytest.raises(InvalidTraining, match=r"the frozen weights 'base\.weight' .* load them from the same file"):
        state_of(Adapted(seed=7)).load_state_dict(state)
    # Also by a replica whose code keeps them.
    model = Adapted(seed=7)
    kept = WrappedState(model, [torch.optim.SGD(model.adapter.parameters(), lr=0.1)], [], None)
    with pytest.raises(InvalidTraining, match="the frozen weights"):
        kept.load_state_dict(state)


def test_what_an_earlier_version_has_written_is_read() -> None:
    model = Adapted()
    state = {**state_of(model).state_dict(), "module": model.state_dict()}
    del state["frozen"]
    other = Adapted(seed=7)
    state_of(other).load_state_dict(state)
    torch.testing.assert_close(other.base.weight, model.base.weight)


def test_writing_is_counted_by_torch() -> None:
    tensor = torch.zeros(3)
    before = times_written(tensor)
    tensor.add_(1.0)
    assert times_written(tensor) == before + 1


def train() -> dict[str, Any]:
    model = Adapted()
    optimizer = torch.optim.SGD(model.adapter.parameters(), lr=0.1)
    wrapped = AdaptiveDataParallel(model, optimizer, frozen="rebuild")
    data = torch.utils.data.TensorDataset(torch.arange(24))
    for _ in remaining_epochs_until(2):
        for (x,) in AdaptiveDataLoader(data, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), x).backward()
            optimizer.step()
    return {"weights": model.adapter.weight.flatten().tolist()}


def test_replicas_train_as_one_process_does() -> None:
    [alone] = run_ranks(train, 1)
    for result in run_ranks(train, 2):
        assert result["weights"] == pytest.approx(alone["weights"], abs=1e-5)


def test_a_checkpoint_has_only_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTUNE_CHECKPOINT_DIR", str(tmp_path))
    reset_core()
    train()
    core = get_core()
    core.saving.save(leaving=True)
    core.close()
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 0 < written < BASE
    reset_core()


def test_a_word_that_does_not_exist_is_refused() -> None:
    model = Adapted()
    options: dict[str, Any] = {"frozen": "drop"}
    with pytest.raises(InvalidTraining, match="frozen is 'drop'; choose 'keep' or 'rebuild'"):
        AdaptiveDataParallel(model, torch.optim.SGD(model.adapter.parameters(), lr=0.1), **options)
