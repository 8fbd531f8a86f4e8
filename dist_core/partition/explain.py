"""A partition in words and bars, for people: what each stage holds, how long it takes, and what is lost."""

from __future__ import annotations

import math

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
