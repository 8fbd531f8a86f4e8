"""A partition as a picture: what each stage takes, block by block, and how full its device is."""

from __future__ import annotations

from pathlib import Path

from dist_core.partition.balance import Partition, PipelineTerms

_SHADES = ("#3b6ea5", "#7fa8d1")
"""Blocks in turn."""


def draw(partition: Partition, terms: PipelineTerms, file: Path) -> None:
    """Write it as PNG. On the left a bar a stage, divided into its blocks; the dotted line is what no cuts would beat.

    On the right the memory of each stage, and as an outline its device's, where that is limited.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 1.2 + 0.5 * len(partition.stages)), layout="constrained")
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
    names = [f"{index}: {stage.device.name}" for index, stage in enumerate(partition.stages)]
    for row, stage in enumerate(partition.stages):
        left, computes = 0.0, sum(block.seconds for block in stage.blocks)
        scale = stage.seconds / computes if computes else 1.0
        for index, block in enumerate(stage.blocks):
            width = 1e3 * block.seconds * scale
            times.barh(row, width, left=left, color=_SHADES[index % 2], edgecolor="white", linewidth=0.5)
            left += width
        memory.barh(row, stage.memory_bytes / 1e6, color=_SHADES[0])
        if stage.device.memory_bytes != float("inf"):
            memory.barh(row, stage.device.memory_bytes / 1e6, fill=False, edgecolor="gray")
    times.axvline(1e3 * partition.bound_seconds, linestyle=":", color="black")
    times.set_yticks(range(len(names)), names)
    times.invert_yaxis()
    times.set_xlabel(f"ms for one of {terms.microbatches} microbatches")
    memory.set_xlabel("MB")
    figure.savefig(file, dpi=120)
