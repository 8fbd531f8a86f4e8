"""Replicas of several real processes are grown, shrunk, lost, resumed at another shape; the result must not tell."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.rig import PRELOAD, Rig
from tests.support.scripts import run_forked
from tests.support.training_code import EPOCHS, SAMPLES
from trials.launch import LocalLauncher
from trials.record import TrialRecord
from trials.states import TrialState

CODE = "tests.support.larger_code:main"
HOWS = pytest.mark.parametrize("how", ["sharded", pytest.param("pipeline", marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Outputs of the same training in one plain process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_forked("tests.support.larger_code", TRACE_DIR=str(folder))
    outputs: list[float] = json.loads((folder / "outputs.json").read_text())
    return outputs


@pytest.fixture(scope="module")
def launcher() -> Iterator[LocalLauncher]:
    made = LocalLauncher(slots=4, preload=(*PRELOAD, "dist_core.larger.model"))
    yield made
    made.close()


def assert_as_undisturbed(rig: Rig, record: TrialRecord, undisturbed: list[float]) -> None:
    assert record.state is TrialState.SUCCEEDED, f"{record.reason}\n{rig.story()}\n{rig.logs()}"
    assert record.outcome is not None
    assert record.outcome.value == pytest.approx(undisturbed, abs=1e-4)
    rig.assert_each_sample_once(EPOCHS, SAMPLES)


@HOWS
def test_whole_replicas_join_and_leave(rig: Rig, undisturbed: list[float], how: str) -> None:
    trial_id = rig.submit(1, entrypoint=CODE, slots_per_replica=2, HOW=how)
    rig.until_size(trial_id, 2)
    survivors = [each.pid for each in rig.members(trial_id)]
    rig.want(trial_id, 4)
    rig.until_size(trial_id, 4)
    rig.want(trial_id, 2)
    rig.until_size(trial_id, 2)
    assert [each.pid for each in rig.members(trial_id)] == survivors
    record = rig.until_over(trial_id)
    assert_as_undisturbed(rig, record, undisturbed)
    assert {row["world_size"] for row in rig.rows()} == {2, 4}
    assert record.losses == 0


@pytest.mark.slow
@HOWS
def test_one_lost_process_takes_its_replica_along_and_the_other_trains_on(
    rig: Rig, undisturbed: list[float], how: str
) -> None:
    trial_id = rig.submit(2, entrypoint=CODE, slots_per_replica=2, HOW=how)
    rig.until_size(trial_id, 4)
    rig.until_step(4)
    survivors = [each.pid for each in rig.members(trial_id)[:2]]
    rig.kill(rig.members(trial_id)[3])
    with rig.unhurried():
        rig.until(lambda: len(rig.trial(trial_id).members) == 2, "the loss to be noticed")
    assert [each.pid for each in rig.members(trial_id)] == survivors
    record = rig.until_over(trial_id)
    assert_as_undisturbed(rig, record, undisturbed)


@pytest.mark.slow
@HOWS
def test_a_lost_process_of_the_only_replica_is_a_restart_from_the_checkpoint(
    rig: Rig, undisturbed: list[float], how: str
) -> None:
    """The loss is noticed, and two processes start again."""
    trial_id = rig.submit(1, entrypoint=CODE, slots_per_replica=2, HOW=how, STEP_SECONDS="0.08")
    rig.until_size(trial_id, 2)
    rig.until_step(14)
    rig.kill(rig.members(trial_id)[1])
    record = rig.until_over(trial_id)
    assert record.outcome is not None and record.outcome.value == pytest.approx(undisturbed, abs=1e-4)
    assert any(entry.reason.code == "lost" for entry in rig.store.history(trial_id)), rig.story()


@pytest.mark.slow
def test_a_trial_goes_on_with_any_layout_that_it_is_given(rig: Rig, undisturbed: list[float]) -> None:
    """It starts anew with each of five layouts."""
    trial_id = rig.submit(1, entrypoint=CODE, layout="1", replica_sizes=(1, 2, 4), HOW="chosen", STEP_SECONDS="0.05")
    rig.until_size(trial_id, 1)
    for slots, layout in (
        (2, "2 sharded"),
        (4, "4 stages"),
        (2, "1 recomputed"),
        (2, "2 sharded recomputed"),
    ):
        rig.until_step(max((row["step"] for row in rig.rows()), default=0) + 3)
        rig.want(trial_id, slots, layout)
        with rig.unhurried():
            rig.until(lambda layout=layout: rig.trial(trial_id).layout == layout, f"the layout {layout}")  # type: ignore[misc]
        rig.until_size(trial_id, slots)
        assert rig.trial(trial_id).slots_per_replica == int(layout.split()[0])
    record = rig.until_over(trial_id)
    assert_as_undisturbed(rig, record, undisturbed)
    assert record.losses == 0
    hints = rig.store.hints([trial_id])[trial_id]
    assert hints["layout"] == "2 sharded recomputed"
    assert len(hints["layouts"]) == 10
