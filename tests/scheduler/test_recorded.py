"""A scheduler's own records as a workload for the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dist_core.goodput import BatchBounds, Configuration, GradientStatistics, Hints, Observation
from scheduler.cli import app
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.compare import compare
from scheduler.simulator.errors import InvalidWorkload
from scheduler.simulator.recorded import DATABASE, read_recorded
from trials.spec import TrialSpec
from trials.store import SqlTrialStore

BOUNDS = BatchBounds(init_batch=64, max_batch=1024, min_atomic=8, max_atomic=256)


def hints(progress: float, slower: float = 1.0) -> Hints:
    rows = [
        Observation(Configuration(1, replicas, 64), 0.05 * slower, (0.05 + 0.01 * (replicas > 1)) * slower, 40)
        for replicas in (1, 2, 4)
    ]
    return Hints(
        bounds=BOUNDS,
        observations=tuple(rows),
        statistics=GradientStatistics(sqr=1.0, var=20.0),
        progress=progress,
        target_progress=64_000.0,
        epoch=max(1, int(progress / 6400.0)),
    )


@pytest.fixture
def state(tmp_path: Path) -> Path:
    store = SqlTrialStore(f"sqlite:///{tmp_path / DATABASE}")
    for number, (progress, slower) in enumerate([(64_000.0, 1.0), (64_000.0, 2.0), (12_800.0, 1.0)]):
        spec = TrialSpec(study="s", number=number, entrypoint="a:b", max_replicas=4)
        trial = store.submit(spec, 1000.0 + 60.0 * number)
        store.put_hints(trial.trial_id, hints(progress, slower).to_json())
    store.submit(TrialSpec(study="s", number=3, entrypoint="a:b"), 2000.0)
    store.close()
    return tmp_path


def test_trials_come_when_they_came_and_do_what_they_did(state: Path) -> None:
    found = read_recorded(state)
    assert found.skipped == 1
    assert [(each.name, each.at) for each in found.submissions] == [("s/0", 0.0), ("s/1", 60.0), ("s/2", 120.0)]
    ends = [float(each.application.epoch_ends[-1]) for each in found.submissions]
    assert ends == pytest.approx([1000.0, 1000.0, 200.0])
    steps = [each.application.step_seconds((1,), 64)[0] for each in found.submissions]
    assert steps[1] == pytest.approx(2.0 * steps[0], rel=0.05)
    assert steps[0] == pytest.approx(0.05, rel=0.1)


def test_more_nodes_would_have_been_faster(state: Path) -> None:
    jobs = read_recorded(state).submissions

    def span(slots: int) -> float:
        settings = SimulationSettings(nodes=1, slots_per_node=slots, decide_every_seconds=5.0, rescale_seconds=1.0)
        [result] = compare(jobs, ["goodput"], settings)
        return sum(job.completion_seconds for job in result.jobs)

    assert span(4) < span(1)


def test_the_command_reads_it(state: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", "--recorded", str(state), "--nodes", "1", "--policy", "goodput"])
    assert done.exit_code == 0, done.output
    assert "1 trials without measurements are left out" in done.output
    assert "3 jobs" in done.output


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidWorkload, match=r"holds no trials.db; name the state folder"):
        read_recorded(tmp_path)
    SqlTrialStore(f"sqlite:///{tmp_path / DATABASE}").close()
    with pytest.raises(InvalidWorkload, match="nothing to simulate"):
        read_recorded(tmp_path)
