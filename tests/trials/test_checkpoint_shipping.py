"""A node's checkpoints reach its scheduler, the newest ones, and before the end of who wrote them is told."""

from __future__ import annotations

import shutil
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import until
from trials.agents.archives import newest, packed, unpack
from trials.agents.shipping import MOST_FAILURES, CheckpointShipping


def checkpoint(folder: Path, name: str, content: bytes = b"state") -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "state.pt").write_bytes(content)
    (folder / name / "manifest.json").write_text("{}")
    return folder / name


def written(path: Path, parts: Iterator[bytes]) -> Path:
    path.write_bytes(b"".join(parts))
    return path


@given(content=st.binary(max_size=3000))
def test_what_is_packed_comes_back(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("archives")
    sent = checkpoint(folder, "checkpoint-00000001", content)
    target = folder / "there" / "checkpoint-00000001"
    unpack(written(folder / "archive", packed(sent)), target)
    assert {each.name: each.read_bytes() for each in target.iterdir()} == {
        "state.pt": content,
        "manifest.json": b"{}",
    }


def test_the_newest_of_each_writer_is_found(tmp_path: Path) -> None:
    for name in ("checkpoint-00000002", "checkpoint-00000010", "part-1/checkpoint-00000009"):
        checkpoint(tmp_path, name)
    (tmp_path / "checkpoint-00000011").mkdir()
    (tmp_path / "partial-12-1").mkdir()
    assert newest(tmp_path) == {"": "checkpoint-00000010", "part-1": "part-1/checkpoint-00000009"}
    assert newest(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("what", ["cut", "without a manifest", "a link", "a path"])
def test_what_is_no_checkpoint_leaves_nothing(tmp_path: Path, what: str) -> None:
    archive = tmp_path / "archive"
    if what == "cut":
        whole = b"".join(packed(checkpoint(tmp_path, "checkpoint-00000001", b"s" * 5000)))
        archive.write_bytes(whole[:3000])
    else:
        name = {"a link": "manifest.json", "without a manifest": "state.pt", "a path": "../manifest.json"}[what]
        about = tarfile.TarInfo(name)
        if what == "a link":
            about.type, about.linkname = tarfile.SYMTYPE, "/etc/passwd"
        with tarfile.open(archive, "w") as made:
            made.addfile(about)
    (tmp_path / "there").mkdir()
    with pytest.raises((tarfile.TarError, OSError)):
        unpack(archive, tmp_path / "there" / "checkpoint-00000001")
    assert not list((tmp_path / "there").iterdir())
    assert not (tmp_path / "manifest.json").exists()


class Scheduler:
    """Where checkpoints are sent."""

    def __init__(self) -> None:
        self.answer: bool | None = True
        self.asked = 0
        self.kept: list[tuple[str, str]] = []
        self.arrived = threading.Event()

    def send(self, trial_id: str, name: str, folder: Path) -> bool | None:
        assert (folder / "manifest.json").exists()
        self.asked += 1
        if self.answer:
            self.kept.append((trial_id, name))
        return self.answer


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def shipping(tmp_path: Path, scheduler: Scheduler) -> Iterator[CheckpointShipping]:
    made = CheckpointShipping(tmp_path, scheduler.send, scheduler.arrived.set)
    yield made
    made.close()


def test_the_end_of_a_replica_waits_for_what_it_had_saved(
    shipping: CheckpointShipping, scheduler: Scheduler, tmp_path: Path
) -> None:
    assert shipping.has_arrived("t-a", "t"), "nothing was saved"
    shipping.forget("t-a")
    scheduler.answer = None
    checkpoint(tmp_path / "t", "checkpoint-00000003")
    assert not shipping.has_arrived("t-a", "t")
    until(lambda: scheduler.asked > 0)
    assert not shipping.has_arrived("t-a", "t"), "nobody has answered"
    scheduler.answer = True
    until(lambda: shipping.has_arrived("t-a", "t"))
    assert scheduler.arrived.is_set()
    assert scheduler.kept == [("t", "checkpoint-00000003")]
    # Others of the trial go on and save: that is not this one's.
    checkpoint(tmp_path / "t", "checkpoint-00000004")
    assert shipping.has_arrived("t-a", "t")
    until(lambda: scheduler.kept[-1] == ("t", "checkpoint-00000004"))
    until(lambda: shipping.has_arrived("t-b", "t"))


def test_what_the_scheduler_cannot_keep_holds_nobody_up(
    shipping: CheckpointShipping, scheduler: Scheduler, tmp_path: Path
) -> None:
    scheduler.answer = False
    checkpoint(tmp_path / "t", "checkpoint-00000001")
    until(lambda: shipping.has_arrived("t-a", "t"))
    assert scheduler.asked == MOST_FAILURES


def test_what_came_from_there_is_not_sent_back(
    shipping: CheckpointShipping, scheduler: Scheduler, tmp_path: Path
) -> None:
    shipping.note_fetched("t", "part-1/checkpoint-00000002")
    checkpoint(tmp_path / "t", "part-1/checkpoint-00000002")
    assert shipping.has_arrived("t-a", "t")
    assert scheduler.kept == []


def test_folders_that_are_removed_while_it_looks_end_nothing(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial's folder goes when the trial is over, all of them when the agent ends."""

    def removed_just_now(folder: Path) -> dict[str, str]:
        if folder.name == "a-over":
            shutil.rmtree(folder)
            raise FileNotFoundError(folder)
        return newest(folder)

    monkeypatch.setattr("trials.agents.shipping.newest", removed_just_now)
    checkpoint(tmp_path / "a-over", "checkpoint-00000001")
    checkpoint(tmp_path / "t", "checkpoint-00000001")
    shipping = CheckpointShipping(tmp_path, scheduler.send, scheduler.arrived.set)
    until(lambda: scheduler.kept == [("t", "checkpoint-00000001")])
    shutil.rmtree(tmp_path)
    shipping.ship()
    shipping.close()
