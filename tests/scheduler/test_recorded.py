"""A scheduler's own records as a workload for the simulator."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from dist_core.goodput import BatchBounds, Configuration, GradientStatistics, Hints, Observation
from scheduler.cli import command_line
from scheduler.policy import policy_by_name
from scheduler.simulator.application import InvalidWorkload
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.command import compare
from scheduler.simulator.recorded import RecordedWorld, read_recorded
from scheduler.state_folder import DATABASE
from trials.record import Outcome, ReplicaRecord, Report, Study
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store import sql_store
from trials.terms import StudyTerms

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
    store = sql_store(f"sqlite:///{tmp_path / DATABASE}")
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
    arguments = ["simulate", "--recorded", str(state), "--nodes", "1", "--policy", "goodput"]
    done = CliRunner().invoke(command_line, [*arguments, "--picture", str(tmp_path / "slots.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "slots.png").read_bytes().startswith(b"\x89PNG")
    assert "1 trials without measurements are left out" in done.output
    assert "3 jobs" in done.output


def test_it_says_how_the_best_trial_would_have_ended_with_the_fewest_slots(sweep: Path) -> None:
    store = sql_store(f"sqlite:///{sweep / DATABASE}")
    failed = store.submit(TrialSpec(study="s", number=3, entrypoint="a:b"), 1030.1)
    store.put_hints(failed.trial_id, hints(EPOCH).to_json())
    store.save_trial(replace(failed, state=TrialState.FAILED, finished_at=1050.0))
    store.set_outcome(failed.trial_id, Outcome(kind="error", value={"an": "error"}))
    store.close()
    done = CliRunner().invoke(command_line, ["simulate", "--recorded", str(sweep)])
    assert done.exit_code == 0, done.output
    sentence = done.output.rpartition("with the fewest slots for each trial: ")[2]
    assert re.fullmatch(r"\d+ s; s/2, the best, ends after \d+ s, and ended after 30 s\n", sentence)


EPOCH = 6400.0


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three trials, two at a time: the second one is stopped after its first epoch, and the third follows it."""
    store = sql_store(f"sqlite:///{tmp_path / DATABASE}")
    store.put_study(Study(name="s", direction="maximize", terms=StudyTerms(goal="time_to_best")))
    times = [(1000.0, 1040.0, 5), (1000.0, 1008.0, 1), (1008.2, 1030.0, 5)]
    for number, (submitted, finished, epochs) in enumerate(times):
        trial = store.submit(TrialSpec(study="s", number=number, entrypoint="a:b", max_replicas=2), submitted)
        done = hints(EPOCH * epochs)
        store.put_hints(trial.trial_id, replace(done, target_progress=5 * EPOCH, epoch=epochs).to_json())
        for epoch in range(1, epochs + 1):
            store.add_report(Report(trial.trial_id, epoch, 0.1 * number + 0.01 * epoch, EPOCH * epoch))
        pruned = Outcome(kind="pruned")
        outcome = Outcome(kind="value", value=0.1 * number + 0.05) if epochs == 5 else pruned
        state = TrialState.SUCCEEDED if epochs == 5 else TrialState.PRUNED
        store.save_trial(replace(trial, state=state, finished_at=finished))
        store.set_outcome(trial.trial_id, outcome)
        store.add_replica(
            ReplicaRecord(
                replica_id=f"r{number}",
                trial_id=trial.trial_id,
                node="n",
                slot=number % 2,
                launch_index=0,
                launched_at=submitted + 0.5,
                ready_at=submitted + 0.8,
                gone_at=finished + 0.1,
            )
        )
    store.close()
    return tmp_path


def test_a_successor_follows_the_end_that_it_followed(sweep: Path) -> None:
    found = read_recorded(sweep)
    assert [trial.after_ends for trial in found.trials] == [0, 0, 1]
    assert found.timing.start == pytest.approx(0.3)
    assert found.timing.leave == pytest.approx(0.1)
    assert found.timing.successor == pytest.approx(0.2)
    # What had to wait for the first launch could not have begun before.
    assert [trial.submission.at for trial in found.trials] == pytest.approx([0.5, 0.5, 8.2])


def test_a_recorded_sweep_runs_again_with_its_reports_and_its_stops(sweep: Path) -> None:
    found = read_recorded(sweep)
    settings = SimulationSettings(
        nodes=1, slots_per_node=2, decide_every_seconds=0.0, rescale_seconds=0.05, timing=found.timing
    )
    world = RecordedWorld(found, policy_by_name("goodput"), settings)
    ends = {job.name: job.finished_at for job in world.run().jobs}
    submitted = {trial.spec.number: trial for trial in world.store.trials()}
    assert submitted[2].submitted_at == pytest.approx(ends["s/1"] + 0.2, abs=1e-6)
    assert [submitted[number].outcome.kind for number in range(3)] == ["value", "pruned", "value"]  # type: ignore[union-attr]
    told = {
        number: [report.step for report in world.store.reports("s") if report.trial_id == trial.trial_id]
        for number, trial in submitted.items()
    }
    assert told == {0: [1, 2, 3, 4, 5], 1: [1], 2: [1, 2, 3, 4, 5]}
    assert world.store.studies()[0].terms.goal == "time_to_best"
    # A fifth of its declared length; five times as long, but for what the larger batches of later epochs save.
    assert ends["s/1"] - 0.5 < (ends["s/0"] - 0.5) / 3


def test_the_command_runs_a_recorded_sweep_as_a_live_scheduler_would(sweep: Path) -> None:
    arguments = ["simulate", "--recorded", str(sweep), "--live", "--nodes", "1", "--slots-per-node", "2"]
    done = CliRunner().invoke(command_line, [*arguments, "--policy", "goodput", "--policy", "fair_share"])
    assert done.exit_code == 0, done.output
    assert "fair_share" in done.output


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidWorkload, match=r"holds no trials.db; name the state folder"):
        read_recorded(tmp_path)
    sql_store(f"sqlite:///{tmp_path / DATABASE}").close()
    with pytest.raises(InvalidWorkload, match="nothing to simulate"):
        read_recorded(tmp_path)
