"""What a script keeps for itself does not reach replicas that join: the trial says so, and does not wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.rig import PRELOAD, Rig
from trials.launch import LocalLauncher
from trials.record import TrialRecord
from trials.states import TrialState

pytestmark = pytest.mark.slow

ENTRYPOINT = "tests.support.own_counts:main"


@pytest.fixture(scope="module")
def launcher() -> Iterator[LocalLauncher]:
    made = LocalLauncher(slots=4, preload=PRELOAD)
    yield made
    made.close()


def ended(rig: Rig, patience: int, *, grows: bool, keeps: bool = False) -> TrialRecord:
    environ: dict[str, Any] = {**({"GROWS": "yes"} if grows else {}), **({"KEEPS": "yes"} if keeps else {})}
    trial_id = rig.submit(1, entrypoint=ENTRYPOINT, PATIENCE=str(patience), **environ)
    if grows:
        # In an epoch behind the first one.
        rig.until(lambda: bool(rig.store.trial_reports(trial_id)), "its first epoch is over")
        rig.want(trial_id, 3)
    return rig.until_over(trial_id)


def test_alone_it_is_as_in_plain_pytorch(rig: Rig) -> None:
    record = ended(rig, 6, grows=False)
    assert record.state is TrialState.SUCCEEDED, record.outcome


def test_a_replica_that_stops_early_by_itself_fails_the_trial_at_once(rig: Rig) -> None:
    record = ended(rig, 12, grows=True)
    assert record.state is TrialState.FAILED
    assert record.outcome is not None
    assert "the replicas wait for each other at different places in the code" in str(record.outcome.message)
    assert "2 are in a step" in str(record.outcome.message)


def test_weights_that_each_replica_has_kept_for_itself_give_no_value(rig: Rig) -> None:
    record = ended(rig, 100, grows=True)
    assert record.state is TrialState.FAILED
    assert record.outcome is not None
    assert "the replicas' models are no longer equal: the parameter" in str(record.outcome.message)
    assert "dist_core.keep()" in str(record.outcome.message)


@pytest.mark.parametrize("patience", [12, 100])
def test_what_it_says_it_keeps_comes_to_those_that_join(rig: Rig, patience: int) -> None:
    alone, grown = (ended(rig, patience, grows=grows, keeps=True) for grows in (False, True))
    assert grown.state is TrialState.SUCCEEDED, grown.outcome
    assert alone.outcome is not None
    assert grown.outcome is not None
    assert grown.outcome.value == pytest.approx(alone.outcome.value, abs=1e-4)
