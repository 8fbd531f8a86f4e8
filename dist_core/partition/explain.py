"""A partition in words and bars, for people: what each stage holds, how long it takes, and what is lost."""

from __future__ import annotations

import math
from pathlib import Path

from dist_core.partition.balance import Partition, PipelineTerms, Stage

_WIDE = 32


def explain(partition: Partition, terms: PipelineTerms) -> str:
    """Return a table with a line for each stage, and below it what the whole comes to."""
    rows = [("stage", "device", "blocks", "ms", "", "memory", "of")]
    for index, stage in enumerate(partition.stages):
        room = stage.device.memory_bytes
        rows.append(
            (
                str(index),
                stage.device.name,
                _range_of(stage),
                f"{1e3 * stage.seconds:.4g}",
                "#" * max(1, round(_WIDE * stage.seconds / max(partition.slowest_seconds, 1e-30))),
                _size(stage.memory_bytes),
                "any" if math.isinf(room) else f"{_size(room)} ({stage.memory_bytes / room:.0%})",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", *_whole(partition, terms)])


def bubble(devices: int, microbatches: int, chunks: int = 1) -> float:
    """Part of a step in which a device of an even pipeline waits (GPipe, section 2.3; Narayanan et al., SC'21)."""
    return (devices - 1) / (chunks * microbatches + devices - 1)


def step_seconds(partition: Partition, terms: PipelineTerms) -> float:
    """Return a step's seconds: all microbatches pass the slowest device, once the first has passed those before."""
    on_each = [0.0] * (len(partition.stages) // terms.chunks)
    for index, stage in enumerate(partition.stages):
        on_each[terms.device_of(index, len(partition.stages))] += stage.seconds
    slowest = max(on_each)
    return terms.microbatches * slowest + (sum(on_each) - slowest) / terms.chunks


def _whole(partition: Partition, terms: PipelineTerms) -> list[str]:
    over = partition.slowest_seconds / max(partition.bound_seconds, 1e-30)
    took = step_seconds(partition, terms)
    devices = len(partition.stages) // terms.chunks
    busy = terms.microbatches * sum(stage.seconds for stage in partition.stages) / max(devices * took, 1e-30)
    even = 1.0 - bubble(devices, terms.microbatches, terms.chunks)
    slowest = f"slowest stage {1e3 * partition.slowest_seconds:.4g} ms"
    step = f"a step of {terms.microbatches} microbatches ({terms.schedule}): about"
    return [
        f"{slowest}, {over:.3f} times the lower bound for these blocks ({1e3 * partition.bound_seconds:.4g} ms)",
        f"{step} {1e3 * took:.4g} ms, in which stages compute {busy:.0%} of the time ({even:.0%} if all were equal)",
    ]


def _range_of(stage: Stage) -> str:
    first, last = stage.blocks[0].name, stage.blocks[-1].name
    return first if first == last else f"{first} to {last} ({len(stage.blocks)})"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000.0
    return f"{count:.3g} TB"


# ---------------------------------------------------------------------- as a picture

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
