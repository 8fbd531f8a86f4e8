"""Trials that begin with the state of a parent: what is waited for, what is asked, and what is handed on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dist_core.state.manifests import present_boot
from scheduler.loop.inheritance import SAVE_SECONDS
from tests.support.loop_bench import Bench
from tests.support.site import Site
from trials.record import Outcome, Report
from trials.states import TrialState


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def save(bench: Bench, trial_id: str, sequence: int, *, parts: int = 1, folder: str = ".", boot: str = "") -> None:
    for member in range(parts):
        place = bench.folder / "checkpoints" / trial_id / folder / (f"part-{member}" if member else ".")
        path = place / f"checkpoint-{sequence:08d}"
        path.mkdir(parents=True)
        (path / "state.pt").write_text(f"state {sequence} of part {member}")
        summary = {"epoch": sequence, "left": False, "parts": parts}
        (path / "manifest.json").write_text(
            json.dumps({"format": 2, "summary": summary, **({"boot": boot} if boot else {})})
        )


def state_of(bench: Bench, trial_id: str, part: str = ".") -> str:
    return (bench.folder / "checkpoints" / trial_id / part / "checkpoint-00000001" / "state.pt").read_text()


def parent_that_trains(bench: Bench, *, keep_state: bool = False) -> str:
    parent = bench.submit(max_replicas=1, keep_state=keep_state)
    bench.train(parent)
    return parent


def child_of(bench: Bench, parent: str, number: int = 1) -> str:
    return bench.submit(number, max_replicas=1, parent=parent)


def test_a_parent_that_trains_is_asked_to_save_and_its_child_waits_for_that(bench: Bench) -> None:
    parent = parent_that_trains(bench)
    save(bench, parent, 1)
    child = child_of(bench, parent)
    bench.tick(4)
    assert bench.loop.inheritance.asked == {parent: "after checkpoint-00000001"}
    assert bench.store.replicas(trial_id=child) == []
    assert "waits until its parent" in bench.trial(child).reason.sentence
    save(bench, parent, 2)
    bench.tick(2)
    assert bench.loop.inheritance.asked == {}
    assert state_of(bench, child) == "state 2 of part 0"
    manifest = bench.folder / "checkpoints" / child / "checkpoint-00000001" / "manifest.json"
    assert json.loads(manifest.read_text())["summary"] == {"epoch": 2, "left": True, "parts": 1, "parent": parent}
    assert len(bench.store.replicas(trial_id=child)) == 1
    assert bench.trial(parent).state is TrialState.RUNNING


@pytest.mark.parametrize("one_machine", [True, False])
def test_a_state_that_is_in_memory_only_is_handed_on_within_the_machine(bench: Bench, one_machine: bool) -> None:
    bench.one_machine = one_machine
    bench.loop = bench.new_loop()
    parent = parent_that_trains(bench)
    save(bench, parent, 1)
    child = child_of(bench, parent)
    bench.tick(2)
    save(bench, parent, 2, boot=present_boot())
    bench.tick(2)
    assert bool(bench.store.replicas(trial_id=child)) == one_machine
    manifest = bench.folder / "checkpoints" / parent / "checkpoint-00000002" / "manifest.json"
    if one_machine:
        assert state_of(bench, child) == "state 2 of part 0"
    else:
        manifest.write_text(json.dumps({"format": 2, "summary": {"epoch": 2, "parts": 1}, "sha256": "0"}))
        bench.tick(2)
        assert state_of(bench, child) == "state 2 of part 0"


def test_a_state_that_was_in_the_memory_of_a_machine_that_stopped_is_none(bench: Bench) -> None:
    bench.one_machine = True
    bench.loop = bench.new_loop()
    parent = parent_that_trains(bench)
    save(bench, parent, 1)
    save(bench, parent, 2, boot="another one")
    child = child_of(bench, parent)
    bench.tick(int(SAVE_SECONDS) + 5, seconds=1.0)
    assert state_of(bench, child) == "state 1 of part 0"


def test_a_parent_that_cannot_save_now_gives_its_older_state_after_a_while(bench: Bench) -> None:
    parent = parent_that_trains(bench)
    save(bench, parent, 1)
    child = child_of(bench, parent)
    bench.tick(int(SAVE_SECONDS) - 10, seconds=1.0)
    assert bench.store.replicas(trial_id=child) == []
    bench.tick(20, seconds=1.0)
    assert state_of(bench, child) == "state 1 of part 0"


def test_on_one_machine_a_child_starts_while_its_parent_saves(bench: Bench) -> None:
    bench.shares_files = True
    bench.loop = bench.new_loop()
    parent = parent_that_trains(bench)
    child = child_of(bench, parent)
    bench.tick(2)
    assert len(bench.store.replicas(trial_id=child)) == 1
    assert bench.loop.inheritance.asked == {parent: "after none"}
    save(bench, parent, 1)
    bench.tick()
    assert state_of(bench, child) == "state 1 of part 0"
    waits = bench.submit(2, min_replicas=4)
    grandchild = child_of(bench, waits, 3)
    bench.tick(3)
    assert bench.store.replicas(trial_id=grandchild) == [], "it takes no slots from a parent that waits for them"


def test_all_parts_of_one_step_are_handed_on(bench: Bench) -> None:
    parent = parent_that_trains(bench)
    save(bench, parent, 1, parts=2)
    child = child_of(bench, parent)
    bench.tick(2)
    save(bench, parent, 2, parts=2)
    (bench.folder / "checkpoints" / parent / "part-1" / "checkpoint-00000002" / "manifest.json").unlink()
    bench.tick(2)
    assert bench.store.replicas(trial_id=child) == [], "a part of the newest one is still on its way"
    bench.tick(int(SAVE_SECONDS) + 5, seconds=1.0)
    assert state_of(bench, child) == "state 1 of part 0"
    assert state_of(bench, child, "part-1") == "state 1 of part 1"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_parent_that_ends_meanwhile_leaves_its_state(bench: Bench, restarts: bool) -> None:
    parent = parent_that_trains(bench)
    save(bench, parent, 1)
    child = child_of(bench, parent)
    bench.tick(2)
    if restarts:
        bench.loop = bench.new_loop()
    bench.store.set_outcome(parent, Outcome(kind="value", value=1.0))
    bench.tick(3)
    assert bench.trial(parent).state is TrialState.SUCCEEDED
    assert not (bench.folder / "checkpoints" / parent).exists()
    assert state_of(bench, child) == "state 1 of part 0"
    assert len(bench.store.replicas(trial_id=child)) == 1


def test_a_kept_state_outlives_its_trial_and_the_one_at_its_end_is_taken(bench: Bench) -> None:
    parent = parent_that_trains(bench, keep_state=True)
    save(bench, parent, 1)
    save(bench, parent, 7, folder="ended")
    bench.store.set_outcome(parent, Outcome(kind="value", value=1.0))
    bench.tick(2)
    assert bench.loop.files.has_state(parent)
    child = child_of(bench, parent)
    bench.tick(2)
    assert state_of(bench, child) == "state 7 of part 0"
    bench.loop.forget_trial(parent)
    assert not bench.loop.files.has_state(parent)


@pytest.mark.parametrize(("ends", "words"), [(True, "no state of it was kept"), (False, "does not use dist_core")])
def test_a_child_of_a_parent_without_a_state_fails_and_says_so(bench: Bench, ends: bool, words: str) -> None:
    parent = bench.submit(max_replicas=1)
    bench.tick(2)
    bench.store.add_report(Report(parent, 0, 1.0, 0.0, bench.now))
    bench.tick(2)
    if ends:
        bench.store.set_outcome(parent, Outcome(kind="value", value=1.0))
        bench.tick(2)
    child = child_of(bench, parent)
    bench.tick(4)
    record = bench.trial(child)
    assert record.state is TrialState.FAILED
    assert words in record.reason.sentence
    assert parent in record.reason.sentence


def test_a_child_waits_for_a_parent_that_has_not_trained_yet(bench: Bench) -> None:
    parent = bench.submit(min_replicas=4)
    child = child_of(bench, parent)
    bench.tick(3)
    assert bench.trial(child).state is TrialState.PENDING
    assert bench.store.replicas(trial_id=child) == []


def branch_of(bench: Bench, parent: str, number: int = 1) -> str:
    return bench.submit(number, max_replicas=1, parent=parent, parent_epoch=3)


def test_a_branch_has_no_slots_until_the_epochs_that_it_shares_are_trained(bench: Bench) -> None:
    bench.shares_files = True
    bench.loop = bench.new_loop()
    parent = bench.submit(max_replicas=1, keep_after=(3,))
    bench.train(parent)
    save(bench, parent, 1)
    branch = branch_of(bench, parent)
    other = child_of(bench, parent, 2)
    bench.tick(3)
    assert bench.trial(branch).hold == f"waits until {parent} has trained the 3 epochs that they share"
    assert bench.store.replicas(trial_id=branch) == []
    assert bench.loop.observer.latest_views[branch].held
    assert bench.loop.inheritance.asked == {parent: "after checkpoint-00000001"}, (
        "the other one begins where it stands now"
    )
    save(bench, parent, 1, folder="after-3")
    bench.tick()
    assert bench.trial(branch).hold is None
    assert state_of(bench, branch) == "state 1 of part 0"
    assert len(bench.store.replicas(trial_id=branch)) == 1
    assert not (bench.folder / "checkpoints" / other).exists()


def test_a_state_on_the_way_outlives_its_trial_and_nothing_else_does(bench: Bench) -> None:
    parent = bench.submit(max_replicas=1, keep_after=(3, 5))
    bench.train(parent)
    save(bench, parent, 2)
    save(bench, parent, 1, folder="after-3")
    bench.store.set_outcome(parent, Outcome(kind="pruned", message=""))
    bench.tick(2)
    assert [path.name for path in (bench.folder / "checkpoints" / parent).iterdir()] == ["after-3"]
    assert bench.loop.files.kept_after(bench.trial(parent)) == [3]
    assert not bench.loop.files.has_state(parent)
    bench.loop = bench.new_loop()
    bench.loop.start()
    bench.loop.stop()
    branch = branch_of(bench, parent)
    bench.tick(2)
    assert state_of(bench, branch) == "state 1 of part 0"


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_branch_trains_all_epochs_itself_where_nobody_else_did(bench: Bench, is_removed: bool) -> None:
    parent = bench.submit(max_replicas=1, keep_after=(3,))
    bench.train(parent)
    branch = branch_of(bench, parent)
    bench.tick(2)
    assert bench.trial(branch).hold is not None
    if is_removed:
        bench.store.forget_trials([parent])
    else:
        bench.store.set_outcome(parent, Outcome(kind="value", value=1.0))
    bench.tick(3)
    assert bench.trial(branch).hold is None
    (replica,) = bench.store.replicas(trial_id=branch)
    assert "ELASTUNE_PARENT" not in bench.launcher.running[replica.replica_id].environ


def test_a_branch_that_people_have_paused_stays_paused(bench: Bench) -> None:
    parent = bench.submit(max_replicas=1, keep_after=(3,))
    bench.train(parent)
    branch = branch_of(bench, parent)
    bench.store.hold([branch], "paused by its owner")
    save(bench, parent, 1, folder="after-3")
    bench.tick(2)
    assert bench.trial(branch).hold == "paused by its owner"
    assert state_of(bench, branch) == "state 1 of part 0"


# ---------------------------------------------------------------------- what people ask for


def test_an_extension_trains_more_epochs_each_time(tmp_path: Path) -> None:
    site = Site(tmp_path)
    trial_id = site.submit(study="jobs", driven=False)["trial_id"]
    for more in (2, 5):
        made = site.call("POST", f"/trials/{trial_id}/clone", {"forks": True, "more_epochs": more}).json()
        parent, trial_id = trial_id, made["trial_id"]
        assert site.store.trial(trial_id).spec.parent == parent
    assert site.store.trial(trial_id).spec.more_epochs == 7
    refused = site.call("POST", f"/trials/{trial_id}/clone", {"more_epochs": 2})
    assert "set forks too" in refused.json()["detail"]
    anew = site.call("POST", f"/trials/{trial_id}/clone", {}).json()
    assert (site.store.trial(anew["trial_id"]).spec.parent, anew["parent"]) == ("", "")


def test_a_fork_begins_where_its_trial_stands_with_what_is_changed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    payload = {"command": ["train", "--lr", "0.1"]}
    trial_id = site.submit(study="jobs", driven=False, payload=payload)["trial_id"]
    made = site.call("POST", f"/trials/{trial_id}/clone", {"parameters": {"lr": 0.2}, "forks": True}).json()
    spec = site.store.trial(made["trial_id"]).spec
    assert (spec.parent, spec.payload["command"]) == (trial_id, ["train", "--lr", "0.2"])
    assert made["parent"] == trial_id
    rows = site.call("GET", "/rows").json()["trials"]
    assert [row.get("parent") for row in rows] == [None, trial_id]


def test_a_parent_that_cannot_be_one_is_refused_in_a_sentence(tmp_path: Path) -> None:
    site = Site(tmp_path)
    other = site.submit(study="another")["trial_id"]
    ended = site.submit(number=1)["trial_id"]
    record = site.store.trial(ended)
    site.store.save_trial(replace(record, state=TrialState.SUCCEEDED, finished_at=1.0))
    for parent, status, words in (
        ("t0123456789", 404, "no trial is called 't0123456789'"),
        (other, 422, "a trial of study 'another', not of 's'"),
        (ended, 422, "is over (succeeded) and its state was not kept"),
    ):
        refused = site.call("POST", "/trials", {"study": "s", "number": 2, "entrypoint": "m:f", "parent": parent})
        assert (refused.status_code, words in refused.json()["detail"]) == (status, True), refused.text
    refused = site.call("POST", f"/trials/{ended}/clone", {"forks": True})
    assert "its state was not kept" in refused.json()["detail"]


def test_a_replica_hears_once_that_it_is_to_save(tmp_path: Path) -> None:
    site = Site(tmp_path)
    name = site.with_replica()
    parent = name.partition("-")[0]
    record = site.store.trial(parent)
    site.store.save_trial(replace(record, state=TrialState.RUNNING, members=(name,), published=1, generation=1))
    site.store.note_entered(parent, 1)
    child = site.submit(1, parent=parent)["trial_id"]
    site.loop.tick()
    assert site.store.replicas(trial_id=child) == []
    told = site.replica("GET", "/watch?after=1&wait=0", name=name).json()
    assert told["save"]
    again = site.replica("GET", f"/watch?after=1&wait=0&saves={told['save']}", name=name).json()
    assert "save" not in again
    assert site.replica("POST", "/saved", {}, name=name).status_code == 200
