"""What we say of torch's schedules is so: where stages lie, and how many microbatches' activations they keep."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from dist_core.larger.pipeline import ElasticPipeline
from dist_core.larger.schedules import Division, divided, schedule_kind
from dist_core.partition.balance import PipelineTerms
from tests.support.ranks import run_ranks

MICROBATCHES = 18


@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("name", ["simple", "1f1b", "interleaved"])
def test_every_stage_lies_on_one_process(name: str, processes: int) -> None:
    kind = schedule_kind(name, 2)
    found = {stage: process for process in range(processes) for stage in kind.stages_of(process, processes)}
    assert sorted(found) == list(range(processes * kind.chunks))
    assert found == {stage: kind.process_of(stage, processes) for stage in found}


def orders(processes: int, name: str) -> dict[int, list[Any]]:
    """Of torch's own schedule for that many processes: stage, what it does, and with which microbatch."""
    os.environ["ELASTUNE_MEMBERS"] = str(processes)
    kind = schedule_kind(name, 2)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(processes * kind.chunks)))
    wrapped = ElasticPipeline(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.functional.mse_loss,
        example=torch.zeros(1, 4),
        schedule=name,
    )
    part = Division(first=0, count=MICROBATCHES, size=1)
    made = wrapped._schedule("found", part, trains=True)
    found: dict[int, list[Any]] = {}
    for process, actions in made.pipeline_order.items():
        parts = [part for each in actions if each is not None for part in (each.sub_actions or [each])]
        found[process] = [(each.stage_index, each.computation_type.name, each.microbatch_index) for each in parts]
    return found


@pytest.mark.parametrize("name", ["interleaved"])
def test_stages_keep_no_more_activations_than_a_partition_counts_on(name: str) -> None:
    processes = 3
    kind = schedule_kind(name, 2)
    terms = PipelineTerms(microbatches=MICROBATCHES, schedule=kind.terms, chunks=kind.chunks)
    for process, actions in run_ranks(orders, processes, processes, name)[0].items():
        kept: Counter[int] = Counter()
        most: Counter[int] = Counter()
        for stage, action, _ in actions:
            assert kind.process_of(stage, processes) == process
            kept[stage] += {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_INPUT": -1}.get(action, 0)
            most[stage] = max(most[stage], kept[stage])
        for stage, count in most.items():
            assert count <= terms.in_flight(stage, processes * kind.chunks), (stage, count)
        assert not any(kept.values())


@pytest.mark.parametrize("examples", [9, 16, 17, 20, 31])
def test_what_goes_in_rounds_gets_full_ones(examples: int) -> None:
    processes = 3
    kind = schedule_kind("interleaved", 2)
    first, *rest = divided(examples, 24, 6, kind.multiple_of(processes))
    assert first.count % processes == 0
    assert all(each.count < 6 for each in rest)
