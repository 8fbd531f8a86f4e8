"""Real processes that are grown, shrunk, paused and killed while they train; the result must not tell."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rig import PRELOAD, Rig
from tests.support.scripts import run_forked
from tests.support.training_code import EPOCHS, SAMPLES
from trials.launch import LocalLauncher
from trials.record import TrialRecord
from trials.states import TrialState


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Weights of the same training in one plain process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_forked("tests.support.training_code", TRACE_DIR=str(folder))
    weights: list[float] = json.loads((folder / "weights.json").read_text())
    return weights


@pytest.fixture(scope="module")
def launcher() -> Iterator[LocalLauncher]:
    """With a fork server that has torch in memory, for all tests that do not end it."""
    made = LocalLauncher(slots=4, preload=PRELOAD)
    yield made
    made.close()


def assert_as_undisturbed(rig: Rig, record: TrialRecord, undisturbed: list[float]) -> None:
    assert record.state is TrialState.SUCCEEDED, record.reason
    assert record.outcome is not None
    assert record.outcome.value == pytest.approx(undisturbed, abs=1e-5)
    rig.assert_each_sample_once(EPOCHS, SAMPLES)
    assert all(len(states) == 1 for states in rig.states_by_generation().values())


def test_growing_and_shrinking_leaves_no_trace(rig: Rig, undisturbed: list[float]) -> None:
    trial_id = rig.submit(1)
    rig.until_size(trial_id, 1)
    survivor = rig.members(trial_id)[0].pid
    rig.want(trial_id, 3)
    rig.until_size(trial_id, 3)
    rig.want(trial_id, 2)
    rig.until_size(trial_id, 2)
    assert rig.members(trial_id)[0].pid == survivor
    record = rig.until_over(trial_id)
    assert_as_undisturbed(rig, record, undisturbed)
    assert {row["world_size"] for row in rig.rows()} >= {1, 3, 2}
    assert record.losses == 0


def test_a_replica_that_is_told_to_end_leaves_and_the_others_train_on(rig: Rig, undisturbed: list[float]) -> None:
    """SIGTERM, as from a machine that is drained or reclaimed."""
    trial_id = rig.submit(2)
    rig.until_size(trial_id, 2)
    rig.until_step(3)
    stays, goes = rig.members(trial_id)
    assert goes.pid is not None
    os.kill(goes.pid, signal.SIGTERM)
    with rig.unhurried():
        rig.until(lambda: goes.replica_id not in {row.replica_id for row in rig.members(trial_id)}, "it has left")
    record = rig.until_over(trial_id)
    assert_as_undisturbed(rig, record, undisturbed)
    assert record.losses == 0
    assert stays.pid in {row["pid"] for row in rig.rows() if row["epoch"] == EPOCHS - 1}
    assert "replica_preempted" in {entry.reason.code for entry in rig.store.history(trial_id)}


@pytest.mark.slow
def test_ten_random_rescales_leave_no_trace(rig: Rig, tmp_path: Path) -> None:
    """Losses of 600 steps and the final weights are those of one undisturbed process, to rounding."""
    alone = tmp_path / "alone"
    alone.mkdir()
    run_forked("tests.support.training_code", TRACE_DIR=str(alone), EPOCHS="60")
    undisturbed = json.loads((alone / "weights.json").read_text())
    expected = [
        row["loss"] / len(row["samples"]) for row in map(json.loads, (alone / "alone.jsonl").read_text().splitlines())
    ]
    chance = random.Random(7)
    size = 1
    trial_id = rig.submit(size, EPOCHS="60", STEP_SECONDS="0.03")
    rig.until_size(trial_id, size)
    for _ in range(10):
        size = chance.choice([other for other in (1, 2, 3, 4) if other != size])
        rig.want(trial_id, size)
        rig.until_size(trial_id, size)
        rig.until_step(rig.latest_step() + chance.randint(1, 15))
    record = rig.until_over(trial_id)
    assert record.state is TrialState.SUCCEEDED, record.reason
    assert record.outcome is not None
    assert record.outcome.value == pytest.approx(undisturbed, abs=1e-5)
    losses = rig.losses()
    assert len(losses) == len(expected) == 600
    assert max(abs(mine - theirs) for mine, theirs in zip(losses, expected, strict=True)) < 1e-5
    states = rig.states_by_generation()
    assert len({generation for generation, _ in states}) >= 11
    assert all(len(digests) == 1 for digests in states.values())


def test_a_killed_replica_is_left_behind_without_going_back(rig: Rig, undisturbed: list[float]) -> None:
    """Rank 0; another one: test_commands.py."""
    trial_id = rig.submit(3)
    rig.until_size(trial_id, 3)
    members = rig.members(trial_id)
    rig.until_step(15)
    rig.want(trial_id, 2)
    rig.kill(members[0])
    rig.until_size(trial_id, 2)
    assert {row.pid for row in rig.members(trial_id)} == {row.pid for row in members} - {members[0].pid}
    record = rig.until_over(trial_id)
    assert_as_undisturbed(rig, record, undisturbed)
    assert record.losses == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "rank"),
    [("forward", 0), ("forward", 1), ("all-reduce", 0), ("all-reduce", 1), ("rescale", 0), ("rescale", 1)],
)
def test_a_replica_killed_at_a_chosen_place_leaves_no_trace(
    rig: Rig, undisturbed: list[float], place: str, rank: int
) -> None:
    """In a rescale it may have handed over or not; in a checkpoint the one before it stays."""
    trial_id = rig.submit(2, DIE_IN=place, DIE_RANK=str(rank), STEP_SECONDS="0.05")
    rig.until_size(trial_id, 2)
    if place == "rescale":
        rig.until_step(20)
        rig.want(trial_id, 3)
    with rig.unhurried():
        rig.until((rig.trace / "died").exists, "the death")
    rig.want(trial_id, 2)
    assert_as_undisturbed(rig, rig.until_over(trial_id), undisturbed)
    rig.until(lambda: rig.store.replicas() == [], "all replicas to end")


@pytest.mark.slow
def test_a_replica_killed_within_a_large_message_leaves_no_trace(rig: Rig, undisturbed: list[float]) -> None:
    """40 MB of gradients a step: when it ends, parts of them have come and others have not."""
    trial_id = rig.submit(3, DIE_IN="message", DIE_RANK="1", DIE_AFTER="0.02", BALLAST="10000000")
    rig.until_size(trial_id, 3)
    rig.until((rig.trace / "died").exists, "the death")
    rig.want(trial_id, 2)
    rig.until_size(trial_id, 2)
    record = rig.until_over(trial_id)
    assert_as_undisturbed(rig, record, undisturbed)
    assert record.losses == 0


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 20])
def test_a_replica_killed_while_it_writes_a_checkpoint_leaves_the_one_before(
    rig: Rig, undisturbed: list[float], step: int
) -> None:
    """The first one, which has none before it, or one written because the trial is to pause."""
    trial_id = rig.submit(2, DIE_IN="checkpoint", DIE_STEP=str(step))
    rig.until_size(trial_id, 2)
    with rig.unhurried():
        if step:
            rig.until_step(step)
            rig.want(trial_id, 0)
        rig.until((rig.trace / "died").exists, "the death")
    rig.want(trial_id, 2)
    record = rig.until_over(trial_id)
    assert record.outcome is not None and record.outcome.value == pytest.approx(undisturbed, abs=1e-5)


@pytest.mark.slow
def test_a_killed_fork_server_costs_the_trial_nothing(
    tmp_path: Path, request: pytest.FixtureRequest, undisturbed: list[float]
) -> None:
    """The next server imports torch anew."""
    rig = Rig(tmp_path)
    request.addfinalizer(rig.close)
    trial_id = rig.submit(2)
    rig.until_size(trial_id, 2)
    before = {row.pid for row in rig.members(trial_id)}
    assert rig.launcher.servers is not None
    rig.launcher.servers.kill()
    with rig.unhurried():
        rig.until_step(rig.latest_step() + 3)
    rig.want(trial_id, 3)
    rig.until_size(trial_id, 3)
    assert before < {row.pid for row in rig.members(trial_id)}
    assert_as_undisturbed(rig, rig.until_over(trial_id), undisturbed)


@pytest.mark.slow
def test_a_replica_that_hangs_is_noticed_and_left_behind(tmp_path: Path, undisturbed: list[float]) -> None:
    """A stopped process keeps its connections: only its silence tells."""
    rig = Rig(tmp_path, silence_seconds=18.0)
    try:
        trial_id = rig.submit(3)
        rig.until_size(trial_id, 3)
        members = rig.members(trial_id)
        rig.until_step(15)
        rig.want(trial_id, 2)
        assert members[1].pid is not None
        os.kill(members[1].pid, signal.SIGSTOP)
        record = rig.until_over(trial_id)
        assert_as_undisturbed(rig, record, undisturbed)
        assert any(entry.reason.code == "silent" for entry in rig.store.history(trial_id))
    finally:
        rig.close()


def test_all_killed_at_once_resume_from_the_checkpoint(rig: Rig, undisturbed: list[float]) -> None:
    trial_id = rig.submit(2, STEP_SECONDS="0.04")
    rig.until_size(trial_id, 2)
    rig.until(lambda: any((rig.folder / "checkpoints" / trial_id).glob("checkpoint-*")), "a checkpoint")
    rig.until_step(35)
    for replica in rig.members(trial_id):
        rig.kill(replica)
    rig.until(lambda: rig.trial(trial_id).losses == 1, "the loss to be noticed")
    record = rig.until_over(trial_id)
    assert record.state is TrialState.SUCCEEDED
    assert record.outcome is not None
    assert record.outcome.value == pytest.approx(undisturbed, abs=1e-5)
    resumed = min(row["step"] for row in rig.rows() if row["generation"] >= 2)
    assert resumed > 0


def test_a_paused_trial_goes_on_where_it_was_at_another_size(rig: Rig, undisturbed: list[float]) -> None:
    trial_id = rig.submit(2)
    rig.until_size(trial_id, 2)
    rig.until_step(20)
    rig.want(trial_id, 0)
    rig.until(lambda: rig.trial(trial_id).state is TrialState.PAUSED, "the pause")
    assert rig.store.replicas() == []
    rig.want(trial_id, 3)
    record = rig.until_over(trial_id)
    assert_as_undisturbed(rig, record, undisturbed)
    assert record.losses == 0


def test_an_exception_on_any_rank_ends_all(rig: Rig) -> None:
    trial_id = rig.submit(3, RAISE_AT_SIZE="3")
    with rig.unhurried():
        record = rig.until_over(trial_id)
    assert record.state is TrialState.FAILED
    assert "on purpose, on the last rank" in record.reason.sentence
    rig.until(lambda: rig.store.replicas() == [], "all replicas to end")


def test_a_joiner_that_dies_costs_the_trial_nothing(rig: Rig, undisturbed: list[float]) -> None:
    trial_id = rig.submit(1)
    rig.until_size(trial_id, 1)
    rig.want(trial_id, 2)
    with rig.unhurried():
        rig.until(
            lambda: len([row for row in rig.store.replicas() if row.pid is not None]) == 2, "the joiner's process"
        )
    joiner = rig.store.replicas(trial_id=trial_id)[-1]
    rig.kill(joiner)
    rig.want(trial_id, 1)
    record = rig.until_over(trial_id)
    assert_as_undisturbed(rig, record, undisturbed)
