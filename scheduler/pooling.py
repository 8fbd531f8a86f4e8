"""Trials of one study run the same code: what one has measured tells about the others.

Their speeds differ by what the tuner varies (a wider layer), mostly by a factor. So another trial's step times are
scaled by the median ratio over the configurations that both have run, and used for those that only the other has.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from dist_core.goodput import Configuration, Observation

MOST_POOLED = 40
"""Rows taken over at most, most-seen first: a fit gains nothing from more."""


def pool_observations(own: Sequence[Observation], others: Sequence[Sequence[Observation]]) -> list[Observation]:
    """Rows for configurations that ``own`` lacks, from ``others`` that share at least one configuration with it."""
    mine = {row.configuration: row for row in own}
    found: dict[Configuration, list[Observation]] = {}
    for rows in others:
        ratios = [
            mine[row.configuration].optim_seconds / row.optim_seconds for row in rows if row.configuration in mine
        ]
        if not ratios:
            continue
        factor = statistics.median(ratios)
        for row in rows:
            if row.configuration not in mine:
                scaled = replace(
                    row, gradient_seconds=row.gradient_seconds * factor, optim_seconds=row.optim_seconds * factor
                )
                found.setdefault(row.configuration, []).append(scaled)
    pooled = [
        Observation(
            configuration,
            statistics.median(row.gradient_seconds for row in rows),
            statistics.median(row.optim_seconds for row in rows),
            # Others' measurements count for less than as many of one's own.
            max(1, max(row.count for row in rows) // 2),
        )
        for configuration, rows in found.items()
    ]
    return sorted(pooled, key=lambda row: (-row.count, row.configuration))[:MOST_POOLED]
