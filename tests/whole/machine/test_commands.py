"""A training that is a process within its replica: it comes late, is grown, shrunk, paused and killed all the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.project import ROOT
from tests.support.rig import Rig
from tests.support.training_code import EPOCHS, SAMPLES
from trials.launch import LocalLauncher
from trials.states import TrialState

CODE = "from tests.support.training_code import train; train()"
"""No more than the training: nothing catches what it ends with."""
LATE = """
import os, time
import dist_core
from tests.support.training_code import get_core, train

remaining = dist_core.remaining_epochs_until

def late(epochs):
    for epoch in remaining(epochs):
        # The epoch that it has asked for passes.
        if get_core().is_outside and os.environ["ELASTUNE_ATTEMPTS"] == "0":
            time.sleep(float(os.environ["LATE_SECONDS"]))
        yield epoch

dist_core.remaining_epochs_until = late
train()
"""


@pytest.fixture(scope="module")
def launcher() -> Iterator[LocalLauncher]:
    made = LocalLauncher(slots=4)
    yield made
    made.close()


def submit(rig: Rig, replicas: int, code: str, **environ: str) -> str:
    command = ["/bin/sh", "-c", 'exec "$0" -c "$1"', sys.executable, code]
    return rig.submit(replicas, command=command, **{"PYTHONPATH": str(ROOT), **environ})  # type: ignore[arg-type]


def assert_trained_once(rig: Rig, trial_id: str, epochs: int = EPOCHS) -> None:
    record = rig.until_over(trial_id)
    assert record.state is TrialState.SUCCEEDED, f"{record.reason}\n{rig.story()}\n{rig.logs()}"
    assert record.losses == 0
    rig.assert_each_sample_once(epochs, SAMPLES)


@pytest.mark.slow
def test_one_that_comes_too_late_comes_again(rig: Rig) -> None:
    """An epoch lasts as long as one that joins takes to come too late."""
    trial_id = submit(rig, 1, LATE, EPOCHS="20", LATE_SECONDS="3")
    rig.until_size(trial_id, 1)
    rig.want(trial_id, 2)
    rig.until_size(trial_id, 2)
    assert_trained_once(rig, trial_id, 20)
    joiner = [row for row in rig.store.replicas(live_only=False) if row.launch_index > 0]
    assert len(joiner) == 1
    assert [row["world_size"] for row in rig.rows() if row["replica"] == joiner[0].replica_id][:1] == [2]


@pytest.mark.slow
def test_one_that_leaves_does_not_end_the_trial_and_a_paused_one_goes_on_where_it_was(rig: Rig) -> None:
    """Three cold starts of a command."""
    trial_id = submit(rig, 2, CODE, STEP_SECONDS="0.05")
    rig.until_size(trial_id, 2)
    rig.until_step(5)
    rig.want(trial_id, 1)
    rig.until_size(trial_id, 1)
    rig.until_step(15)
    rig.want(trial_id, 0)
    rig.until(lambda: rig.trial(trial_id).state is TrialState.PAUSED, "the pause")
    rig.want(trial_id, 1)
    assert_trained_once(rig, trial_id)


@pytest.mark.slow
def test_a_killed_one_is_left_behind(rig: Rig) -> None:
    """Two cold starts of a command."""
    trial_id = submit(rig, 2, CODE, DIE_IN="all-reduce", DIE_RANK="1", STEP_SECONDS="0.05")
    rig.until_size(trial_id, 2)
    assert_trained_once(rig, trial_id)
    assert (rig.trace / "died").exists()


@pytest.mark.slow
def test_a_failing_one_ends_the_trial(rig: Rig) -> None:
    trial_id = submit(rig, 2, CODE, RAISE_AT_SIZE="2")
    with rig.unhurried():
        record = rig.until_over(trial_id)
    assert record.state is TrialState.FAILED
    assert "status 1" in record.reason.sentence
    assert "on purpose, on the last rank" in rig.logs()


def test_one_without_a_training_may_end_with_any_status(rig: Rig) -> None:
    """Also with the one that says of a training that it came too late."""
    trial_id = rig.submit(1, command=["/bin/sh", "-c", "exit 76"])
    record = rig.until_over(trial_id)
    assert record.state is TrialState.FAILED
    assert "status 76" in record.reason.sentence


def test_another_python_runs_as_a_process_of_its_own(rig: Rig, tmp_path: Path) -> None:
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    other.write_text('#!/bin/sh\necho "another interpreter got $2"\n')
    other.chmod(0o700)
    trial_id = rig.submit(1, command=[str(other), "-c", "print(1)"])
    assert rig.until_over(trial_id).state is TrialState.SUCCEEDED
    assert "another interpreter got print(1)" in rig.logs()
