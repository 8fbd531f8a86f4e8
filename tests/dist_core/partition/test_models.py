"""Blocks of real models: what they cost, and that the stages together are the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.axes
import pytest
import torch
from torch import nn

from dist_core.errors import InvalidTraining
from dist_core.larger.stages import stages_of, without_other_blocks
from dist_core.partition.balance import PipelineTerms, partition
from dist_core.partition.blocks import BlockCosts, StageDevice
from dist_core.partition.explain import bubble, draw, explain, step_seconds
from dist_core.partition.measure import DeviceProfile, estimate_blocks, measure_blocks, ties_between

WIDTH, WORDS = 16, 50


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, *, causal: bool) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if causal else None
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        out: torch.Tensor = x + self.wide(x)
        return out


class Decoder(nn.Module):
    """As people write them: an embedding, a list of layers with an argument of their own, a head."""

    def __init__(self, layers: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x, causal=True)
        out: torch.Tensor = self.head(self.norm(x))
        return out


NAMES = ["embedding", *(f"layers.{index}" for index in range(4)), "norm", "head"]
MICROBATCH = torch.arange(24).view(3, 8) % WORDS


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_a_block_costs_what_its_layers_do() -> None:
    model = Decoder()
    blocks = {block.name: block for block in measure_blocks(model, NAMES, MICROBATCH)}
    assert list(blocks) == NAMES
    assert all(block.forward_seconds > 0.0 and block.backward_seconds > 0.0 for block in blocks.values())
    assert blocks["head"].parameter_bytes == 4 * WIDTH * WORDS
    assert blocks["head"].output_bytes == 4 * 24 * WORDS
    # Of a product its input is kept, of an embedding the words.
    assert blocks["head"].activation_bytes == 4 * 24 * WIDTH
    assert blocks["embedding"].activation_bytes == MICROBATCH.nbytes
    assert blocks["layers.0"].activation_bytes > 4 * 24 * 6 * WIDTH
    assert all(parameter.grad is None for parameter in model.parameters())


def test_measuring_leaves_gradients_as_they_were() -> None:
    model = Decoder()
    model(MICROBATCH).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    measure_blocks(model, NAMES, MICROBATCH, repeats=1)
    after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(before) == len(after)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_a_model_that_is_nowhere_is_estimated_by_its_operations() -> None:
    with torch.device("meta"):
        model = Decoder()
    profile = DeviceProfile(flops_per_second=1e9, bytes_per_second=1e15)
    blocks = {block.name: block for block in estimate_blocks(model, NAMES, MICROBATCH.to("meta"), profile)}
    assert blocks["head"].forward_seconds == pytest.approx(2 * 24 * WIDTH * WORDS / 1e9)
    assert blocks["head"].backward_seconds == pytest.approx(2 * blocks["head"].forward_seconds)
    assert blocks["head"].activation_bytes == 4 * 24 * WIDTH
    assert blocks["layers.0"].forward_seconds == pytest.approx(blocks["layers.3"].forward_seconds)
    slow_memory = DeviceProfile(flops_per_second=1e30, bytes_per_second=1e6)
    head = estimate_blocks(model, NAMES, MICROBATCH.to("meta"), slow_memory)[-1]
    assert head.forward_seconds == pytest.approx((4 * WIDTH * WORDS + 4 * 24 * WIDTH + 4 * 24 * WORDS) / 1e6)


@pytest.mark.parametrize("stages", [1, 2, 3, 7])
def test_the_stages_one_after_another_are_the_model(stages: int) -> None:
    model = Decoder()
    blocks = measure_blocks(model, NAMES, MICROBATCH, repeats=1)
    found = partition(blocks, [StageDevice()] * stages, PipelineTerms(microbatches=8))
    parts = stages_of(model, NAMES, found)
    x: Any = MICROBATCH
    for part in parts:
        x = part(x)
    torch.testing.assert_close(x, model(MICROBATCH))
    states = [part.state_dict() for part in parts]
    assert sum(map(len, states)) == len(model.state_dict())
    assert {name for state in states for name in state} == set(model.state_dict())


def test_blocks_of_a_sequence_keep_their_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    names = ["0", "1", "2"]
    last = without_other_blocks(model, names, {"1", "2"})
    assert list(last.state_dict()) == ["2.weight", "2.bias"]
    x = torch.randn(3, 4)
    torch.testing.assert_close(last(without_other_blocks(model, names, {"0"})(x)), model(x))


def test_shared_weights_are_found_and_stay_on_one_device() -> None:
    model = Decoder(tied=True)
    assert ties_between(model, NAMES) == [("embedding", "head")]
    assert ties_between(Decoder(), NAMES) == []
    blocks = measure_blocks(model, NAMES, MICROBATCH, repeats=1)
    with pytest.raises(InvalidTraining, match="blocks that share a parameter"):
        partition(blocks, [StageDevice()] * 2, PipelineTerms(microbatches=8), ties=ties_between(model, NAMES))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["embedding", "decoder"], "the model has no module 'decoder'"),
        (["layers.1", "layers.0"], "in the order layers.0, layers.1, but they were named in the order layers.1"),
        (["layers"], "does not call the block 'layers'"),
    ],
)
def test_blocks_that_are_none_are_named(names: list[str], words: str) -> None:
    with pytest.raises(InvalidTraining, match=words):
        measure_blocks(Decoder(), names, MICROBATCH)


def test_a_block_that_runs_twice_is_named() -> None:
    shared = nn.Linear(4, 4)
    with pytest.raises(InvalidTraining, match="the block '0' is called twice"):
        measure_blocks(nn.Sequential(shared, shared), ["0"], torch.randn(2, 4))


def test_no_stage_keeps_what_is_no_block() -> None:
    with pytest.raises(InvalidTraining, match="'tail' is not a block of this model; its blocks are 0, 1"):
        without_other_blocks(nn.Sequential(nn.Tanh(), nn.Tanh()), ["0", "1"], {"tail"})


def test_a_partition_is_explained_in_a_table() -> None:
    model = Decoder()
    terms = PipelineTerms(microbatches=8)
    blocks = measure_blocks(model, NAMES, MICROBATCH, repeats=1)
    found = partition(blocks, [StageDevice(name="gpu 0", memory_bytes=1e9), StageDevice(name="gpu 1")], terms)
    words = explain(found, terms)
    print(words)
    lines = words.splitlines()
    assert lines[0].split() == ["stage", "device", "blocks", "ms", "memory", "of"]
    assert lines[1].startswith("0") and "gpu 0" in words and "1 GB (" in words
    assert "a step of 8 microbatches (1f1b)" in words and "89% if all were equal" in words
    assert bubble(2, 8) == pytest.approx(1 / 9)
    assert step_seconds(found, terms) == pytest.approx(
        sum(stage.seconds for stage in found.stages) + 7 * found.slowest_seconds
    )


# ------------------------------------------------------------------ a partition's picture shows its stages and blocks


def test_each_block_is_a_part_of_its_stages_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [
        BlockCosts(name=str(index), forward_seconds=0.01, backward_seconds=0.02, parameter_bytes=10**6)
        for index in range(6)
    ]
    terms = PipelineTerms(microbatches=8)
    found = partition(blocks, [StageDevice(name="a", memory_bytes=5e7), StageDevice(name="b")], terms)
    drawn: list[tuple[int, float]] = []
    barh = matplotlib.axes.Axes.barh

    def note(self: matplotlib.axes.Axes, row: int, width: float, **more: object) -> object:
        drawn.append((row, width))
        return barh(self, row, width, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(matplotlib.axes.Axes, "barh", note)
    draw(found, terms, tmp_path / "stages.png")
    assert (tmp_path / "stages.png").stat().st_size > 1000
    for row, stage in enumerate(found.stages):
        bars = [width for where, width in drawn if where == row]
        parts = bars[: len(stage.blocks)]
        assert sum(parts) == pytest.approx(1e3 * stage.seconds)
        # Then its memory, and what its device has.
        assert bars[len(parts)] == pytest.approx(stage.memory_bytes / 1e6)
        assert len(bars) == len(parts) + (2 if stage.device.name == "a" else 1)
