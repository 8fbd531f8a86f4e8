"""A partition's picture shows its stages and blocks."""

from __future__ import annotations

from pathlib import Path

import matplotlib.axes
import pytest

from dist_core.partition.balance import PipelineTerms, partition
from dist_core.partition.blocks import BlockCosts, StageDevice
from dist_core.partition.explain import draw


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
