"""What is kept, for how long, and that what is forgotten leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
import torch

from dist_core.state.checkpoint import load_checkpoint, write_checkpoint
from dist_core.state.manifests import STATE, newest_parts
from dist_core.state.parts import newest_in_parts
from scheduler.host.retention import MOST_AT_ONCE, SWEEP_SECONDS, Retention, abandoned, expired
from scheduler.loop.control_loop import ControlLoop
from scheduler.loop.settings import LoopSettings
from scheduler.loop.trial_files import PREPARED_SECONDS, SPARED_SECONDS, TrialFiles
from scheduler.policy import policy_by_name
from scheduler.state_folder import StateFolder
from trials.errors import StoreUnavailable, UnknownTrial
from trials.launch import InMemoryLauncher
from trials.record import Reason, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store import TrialStore, sql_store
from trials.store.base import HistoryEntry
from trials.terms import StudyTerms

DAY = 86400.0


def trial(number: int, ended: float | None, study: str = "s") -> TrialRecord:
    state = TrialState.RUNNING if ended is None else TrialState.SUCCEEDED
    spec = TrialSpec(study=study, number=number, entrypoint="m:f")
    return TrialRecord(
        trial_id=f"t{number}",
        spec=spec,
        state=state,
        reason=Reason(code="c", sentence="s"),
        submitted_at=0.0,
        finished_at=ended,
    )


def study(name: str = "s", *, owner: str | None = None, seen: float = 0.0, budget: float | None = None) -> Study:
    terms = StudyTerms(budget_slot_hours=budget)
    return Study(name=name, direction="minimize", terms=terms, owner=owner, owner_seen_at=seen)


def test_trials_that_ended_long_ago_are_forgotten_oldest_first() -> None:
    trials = [trial(0, 3 * DAY), trial(1, None), trial(2, 1 * DAY), trial(3, 9.5 * DAY)]
    assert [each.trial_id for each in expired(trials, [study()], 10 * DAY, DAY)] == ["t2", "t0"]


def test_studies_that_are_driven_or_have_a_budget_keep_their_trials() -> None:
    trials = [trial(0, 1.0, "driven"), trial(1, 1.0, "budget"), trial(2, 1.0, "neither"), trial(3, 1.0, "unknown")]
    studies = [study("driven", owner="o"), study("budget", budget=5.0), study("neither")]
    assert [each.spec.study for each in expired(trials, studies, 10 * DAY, DAY)] == ["neither", "unknown"]


def test_studies_that_nobody_uses_are_forgotten() -> None:
    studies = [study("used"), study("driven", owner="o"), study("fresh", seen=9.5 * DAY), study("old", seen=DAY)]
    assert [each.name for each in abandoned([trial(0, 1.0, "used")], studies, 10 * DAY, DAY)] == ["old"]


class Kept:
    def __init__(self, folder: Path) -> None:
        self.now = 100 * DAY
        self.folder = folder
        self.url = f"sqlite:///{folder / 'trials.db'}"
        self.store = sql_store(self.url)
        settings = LoopSettings(
            state_dir=folder, api_url=lambda: "", replica_token=lambda replica_id: "", base_environ={}
        )
        launcher = InMemoryLauncher({"n0": 1})
        self.loop = ControlLoop(
            self.store, launcher, policy_by_name("fifo"), settings, clock=lambda: self.now, monotonic=lambda: self.now
        )
        self.retention = Retention(self.store, self.loop, 90 * DAY, clock=lambda: self.now)

    def ended(self, number: int, days_ago: float) -> str:
        at = self.now - days_ago * DAY
        record = self.store.submit(TrialSpec(study="s", number=number, entrypoint="m:f"), at)
        trial_id = record.trial_id
        self.store.add_replica(
            ReplicaRecord(
                replica_id=f"{trial_id}-a", trial_id=trial_id, node="n0", slot=0, launch_index=0, launched_at=at
            )
        )
        self.store.update_replica(f"{trial_id}-a", state=ReplicaState.GONE, gone_at=at)
        self.store.put_hints(trial_id, {"epoch": 1})
        self.store.add_report(Report(trial_id, 0, 1.0, 1.0))
        self.store.add_history(
            HistoryEntry(at=at, trial_id=trial_id, what="warning", reason=Reason(code="c", sentence="s"))
        )
        self.store.save_trial(replace(record, state=TrialState.SUCCEEDED, finished_at=at))
        log = self.folder / "logs" / trial_id / f"{trial_id}-a.log"
        log.parent.mkdir(parents=True)
        log.write_text("words")
        return trial_id

    def rows(self) -> dict[str, int]:
        engine = sa.create_engine(self.url)
        with engine.connect() as connection:
            counts = {
                table: connection.execute(sa.text(f"select count(*) from {table}")).scalar_one()
                for table in ("trials", "replicas", "reports", "hints", "history")
            }
        engine.dispose()
        return counts


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    made.store.close()


def test_nothing_of_a_forgotten_trial_is_left(kept: Kept) -> None:
    old, young = kept.ended(0, 91.0), kept.ended(1, 89.0)
    kept.loop.tick()
    kept.retention.look()
    assert [record.trial_id for record in kept.store.trials()] == [young]
    with pytest.raises(UnknownTrial):
        kept.store.trial(old)
    assert set(kept.rows().values()) == {1}
    assert not (kept.folder / "logs" / old).exists()
    assert (kept.folder / "logs" / young).exists()
    assert [report.trial_id for report in kept.store.reports("s")] == [young]
    kept.loop.tick()


def test_a_forgotten_number_may_be_used_again(kept: Kept) -> None:
    old = kept.ended(0, 91.0)
    kept.retention.look()
    assert kept.store.submit(TrialSpec(study="s", number=0, entrypoint="m:f"), kept.now).trial_id != old


def test_many_are_forgotten_little_by_little(kept: Kept) -> None:
    for number in range(MOST_AT_ONCE + 5):
        kept.ended(number, 91.0)
    kept.retention.look()
    assert len(kept.store.trials()) == 5
    kept.retention.look()
    assert len(kept.store.trials()) == 5
    kept.now += SWEEP_SECONDS + 1.0
    kept.retention.look()
    assert kept.store.trials() == []


def test_a_database_that_takes_no_write_is_tried_again(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.ended(0, 91.0)
    with monkeypatch.context() as broken:
        broken.setattr(kept.store, "forget_trials", lambda ids: (_ for _ in ()).throw(StoreUnavailable("full")))
        kept.retention.look()
    assert len(kept.store.trials()) == 1
    kept.now += SWEEP_SECONDS + 1.0
    kept.retention.look()
    assert kept.store.trials() == []


def test_everything_is_kept_where_that_is_asked_for(kept: Kept) -> None:
    kept.ended(0, 99.0)
    Retention(kept.store, kept.loop, 0.0, clock=lambda: kept.now).look()
    assert len(kept.store.trials()) == 1


# ---------------------------------- a state folder has tokens, and keeps itself out of the repository that it lies in


def test_git_sees_nothing_of_a_state_folder(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    folder = StateFolder.acquire(tmp_path / ".elastune" / "study")
    (folder.path / "token").write_text("secret")
    seen = subprocess.check_output(["git", "-C", str(tmp_path), "status", "--porcelain", "-uall"], text=True)
    assert seen == ""
    folder.release()


# --------------------------- files of trials: prepared data that nobody needs any more, and states that are handed on


def test_data_of_unknown_studies_is_forgotten_and_of_known_ones_kept(tmp_path: Path) -> None:
    store, now = TrialStore(), 0.0
    store.put_study(Study(name="a b", direction="minimize", terms=StudyTerms(), owner=None, owner_seen_at=0.0))
    files = TrialFiles(tmp_path, store, InMemoryLauncher({}), lambda: now)
    known, gone, young = (files.prepared_dir(name) for name in ("a b", "a/b", "c"))
    assert len({known, gone, young}) == 3 and all(each.parent == tmp_path / "prepared" for each in (known, gone))
    long_ago = time.time() - SPARED_SECONDS - 1
    for folder in (known, gone, young):
        (folder / "data").mkdir(parents=True)
        if folder != young:
            os.utime(folder, (long_ago, long_ago))
    files.forget_prepared()
    assert gone.exists()
    now = PREPARED_SECONDS
    files.forget_prepared()
    assert known.exists() and young.exists() and not gone.exists()


def test_logs_come_in_the_order_in_which_their_replicas_started(tmp_path: Path) -> None:
    store = TrialStore()
    trial = store.submit(TrialSpec(study="s", number=0, entrypoint="a.b:c"), 0.0).trial_id
    files = TrialFiles(tmp_path, store, InMemoryLauncher({}), time.monotonic)
    for index, name in enumerate(("z", "a", "m")):
        replica = ReplicaRecord(replica_id=name, trial_id=trial, node="n", slot=index, launch_index=index)
        store.add_replica(replica)
        files.log(replica).parent.mkdir(parents=True, exist_ok=True)
        files.log(replica).write_text("words")
    # The first one has printed last.
    os.utime(tmp_path / "logs" / trial / "z.log", (time.time() + 9, time.time() + 9))
    assert [path.stem for path in files.logs(trial)] == ["z", "a", "m"]


def test_a_state_that_is_removed_while_it_is_handed_on_is_no_state_for_the_child(tmp_path: Path) -> None:
    """Its parent may have written two newer ones between the scheduler's look at it and the link."""
    files = TrialFiles(tmp_path, TrialStore(), InMemoryLauncher({}), time.monotonic, one_machine=True)
    parent = files.checkpoint_dir("parent")
    write_checkpoint(parent, 1, {"weight": torch.ones(2)}, {"epoch": 1})
    child = TrialRecord(trial_id="child", spec=TrialSpec(study="s", number=1, entrypoint="a.b:c", parent="parent"))
    present = newest_parts(parent, flushed=False)
    (present[0][0] / STATE).unlink()
    assert not files.hand_on(child)
    assert not files.newest_checkpoint("child")
    write_checkpoint(parent, 2, {"weight": torch.ones(2)}, {"epoch": 2})
    assert files.hand_on(child)
    paths, manifest = newest_in_parts(files.checkpoint_dir("child")) or pytest.fail("the child has no state")
    assert manifest["summary"] == {"epoch": 2, "left": True, "parent": "parent"}
    assert load_checkpoint(paths[0])["weight"].tolist() == [1.0, 1.0]
