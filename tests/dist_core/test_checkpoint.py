from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_core.errors import InvalidCheckpoint, InvalidTraining
from dist_core.state import manifests
from dist_core.state.checkpoint import (
    ABANDONED_SECONDS,
    CheckpointWriter,
    load_checkpoint,
    write_checkpoint,
)
from dist_core.state.copies import Copying
from dist_core.state.manifests import BOOT, CHECKSUM, present_boot, read_manifest
from dist_core.state.memory_limit import MemoryLimit
from dist_core.state.packing import pack, unpack
from dist_core.state.parts import newest_in_parts
from dist_core.state.states import FunctionState, StateRegistry
from dist_core.state.trial_checkpoints import TrialCheckpoints, checkpoint_interval, mean_time_to_failure
from tests.support.checkpoints import written_by
from tests.support.project import ROOT
from tests.support.scripts import forked, run_forked
from tests.support.waiting import until

STATE = {"model": {"w": torch.arange(4.0), "n": 3}, "list": [1, (2.5, None)], "text": "x"}


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, STATE, {"epoch": 2})
    found = newest_in_parts(tmp_path)
    assert found is not None
    [path], manifest = found
    assert manifest["summary"] == {"epoch": 2}
    loaded = load_checkpoint(path)
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"])  # type: ignore[index]
    assert loaded["list"] == STATE["list"]


def test_the_previous_one_is_kept_and_older_ones_are_not(tmp_path: Path) -> None:
    for sequence in range(1, 5):
        write_checkpoint(tmp_path, sequence, STATE, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000003", "checkpoint-00000004"]


def test_what_another_replica_is_writing_is_left_alone_and_what_a_killed_one_left_is_not(tmp_path: Path) -> None:
    """A replica that joined while the first one wrote a checkpoint took that away."""
    being_written, left = tmp_path / "partial-7-1", tmp_path / "partial-3-2"
    for folder in (being_written, left):
        folder.mkdir()
        (folder / "state.pt").write_bytes(b"half")
    for path in (left / "state.pt", left):
        os.utime(path, (0.0, time.time() - ABANDONED_SECONDS - 1.0))
    CheckpointWriter(tmp_path, on_error=pytest.fail)
    assert being_written.is_dir() and left.is_dir()
    write_checkpoint(tmp_path, 8, STATE, {})
    assert being_written.is_dir() and not left.exists()


@pytest.mark.parametrize("damage", ["truncate", "flip", "no manifest", "bad manifest", "other format"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path: Path, damage: str) -> None:
    write_checkpoint(tmp_path, 1, STATE, {"epoch": 1})
    newest = write_checkpoint(tmp_path, 2, STATE, {"epoch": 2})
    state, manifest = newest / "state.pt", newest / "manifest.json"
    if damage == "truncate":
        state.write_bytes(state.read_bytes()[:-10])
    elif damage == "flip":
        content = bytearray(state.read_bytes())
        content[len(content) // 2] ^= 1
        state.write_bytes(content)
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "bad manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    found = newest_in_parts(tmp_path)
    assert found is not None
    assert found[1]["summary"] == {"epoch": 1}


def test_a_write_that_fails_leaves_the_previous_one_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    writer = CheckpointWriter(tmp_path, on_error=said.append)
    writer.save(STATE, {"epoch": 1}, wait=True)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    writer.save(STATE, {"epoch": 2}, wait=True)
    assert "No space left on device" in said[0]
    found = newest_in_parts(tmp_path)
    assert found is not None
    assert found[1]["summary"] == {"epoch": 1}
    assert not list(tmp_path.glob("partial-*"))


def test_what_changes_after_saving_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, on_error=lambda words: None)
    weights = torch.zeros(3)
    writer.save({"w": weights, "lr": np.float64(0.5)}, {}, wait=False)
    weights += 1.0
    writer.save({"w": weights, "lr": np.float64(0.5)}, {}, wait=True)
    first, second = sorted(tmp_path.iterdir()) if len(list(tmp_path.iterdir())) == 2 else (None, None)
    if first is not None:
        assert float(load_checkpoint(first)["w"].sum()) == 0.0
    last = second or next(tmp_path.iterdir())
    assert float(load_checkpoint(last)["w"].sum()) == 3.0
    assert load_checkpoint(last)["lr"] == 0.5


def test_two_writers_in_turn_do_not_delete_each_others_newest(tmp_path: Path) -> None:
    """Rank 0 changes hands when a replica is lost; the new one's first checkpoint is the newest of all."""
    first, second = (CheckpointWriter(tmp_path, on_error=lambda words: None) for _ in range(2))
    for epoch in range(5):
        first.save(STATE, {"epoch": epoch}, wait=True)
    second.save(STATE, {"epoch": 99}, wait=True)
    found = newest_in_parts(tmp_path)
    assert found is not None
    assert found[1]["summary"] == {"epoch": 99}


def test_what_is_kept_is_copied_before_it_may_change(tmp_path: Path) -> None:
    """Large enough for the copy to take a while; the rest is copied within the call."""
    writer = CheckpointWriter(tmp_path, on_error=lambda words: None)
    weights, buffer = torch.zeros(3_000_000), torch.zeros(10)
    for number in range(1, 6):
        weights.fill_(number)
        buffer.fill_(number)
        writer.save(
            {"weights": weights, "buffer": buffer}, {}, keeps=lambda tensor: tensor is weights or len(tensor) > 10
        )
        buffer.fill_(-1.0)
        writer.settle()
        weights.fill_(-1.0)
        state = written_by(writer)
        assert (state["weights"] == number).all()
        assert (state["buffer"] == number).all()


def test_a_checkpoint_asked_for_while_another_is_copied_leaves_that_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_copy, finish = threading.Event(), Copying.finish

    def finish_late(copying: Copying) -> None:
        may_copy.wait()
        finish(copying)

    monkeypatch.setattr(Copying, "finish", finish_late)
    writer, weights = CheckpointWriter(tmp_path, on_error=pytest.fail), torch.full((100,), 1.0)
    writer.save({"weights": weights}, {"number": 1}, keeps=lambda tensor: True)
    until(lambda: writer._waiting is None)
    writer.save({"weights": weights + 1.0}, {"number": 2}, keeps=lambda tensor: True)
    may_copy.set()
    writer.settle()
    weights.fill_(-1.0)
    until(lambda: not writer.busy)
    for path in tmp_path.iterdir():
        number = read_manifest(path)["summary"]["number"]
        assert load_checkpoint(path)["weights"].unique().tolist() == [number]


def test_a_checkpoint_asked_for_while_another_is_written_is_written_too(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, on_error=lambda words: None)
    weights = torch.zeros(3_000_000)
    for number in range(1, 8):
        weights.fill_(number)
        writer.save({"weights": weights}, {}, keeps=lambda tensor: True, wait=number == 7)
        writer.settle()
    found = newest_in_parts(tmp_path)
    assert found is not None
    assert (load_checkpoint(found[0][0])["weights"] == 7).all()


def keep_writing(folder: Path, sequence: int, begun: Any) -> None:
    while True:
        state = {"w": torch.full((40_000,), float(sequence)), "sequence": sequence}
        write_checkpoint(folder, sequence, state, {"sequence": sequence})
        begun.set()
        sequence += 1


@pytest.mark.parametrize("kills", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_at_random_points_there_is_always_a_loadable_one(tmp_path: Path, kills: int) -> None:
    """Each writer goes on in the folder that the one killed before it left."""
    chance = random.Random(kills)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dist_core.replica_preload"])
    newest = 0
    for _ in range(kills):
        begun = context.Event()
        process = context.Process(target=keep_writing, args=(tmp_path, newest + 1, begun))
        process.start()
        assert begun.wait(30)
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.join()
        process.close()
        found = newest_in_parts(tmp_path)
        assert found is not None
        state = load_checkpoint(found[0][0])
        assert state["sequence"] > newest
        assert (state["w"] == state["sequence"]).all()
        newest = state["sequence"]


def test_the_interval_weighs_cost_against_failures() -> None:
    young = (2 * 0.05 * 4 * 3600) ** 0.5
    assert checkpoint_interval(cost_seconds=0.05, failures=0, trained_seconds=0.0) == pytest.approx(young, rel=0.01)
    intervals = [checkpoint_interval(cost_seconds=0.5, failures=n, trained_seconds=3600.0) for n in range(4)]
    assert intervals == sorted(intervals, reverse=True)
    assert mean_time_to_failure(failures=9, trained_seconds=9000.0) == pytest.approx(1362, rel=0.01)
    # The bounds hold for costs that are absurd on either side.
    assert checkpoint_interval(cost_seconds=0.0, failures=0, trained_seconds=0.0) == 1.0
    assert checkpoint_interval(cost_seconds=1e9, failures=0, trained_seconds=0.0) == 600.0


@pytest.mark.parametrize("cost", [0.01, 0.5, 5.0])
def test_the_interval_is_the_best_of_a_simulated_job(cost: float) -> None:
    """Expected time lost per second of work, as a function of the interval, has its minimum there."""
    mean = mean_time_to_failure(failures=2, trained_seconds=600.0)
    best = checkpoint_interval(cost_seconds=cost, failures=2, trained_seconds=600.0)

    def wall_per_work(interval: float) -> float:
        # Exponential failures, free restarts: mean time to get one interval and its checkpoint done.
        return mean * math.expm1((interval + cost) / mean) / interval

    for other in (0.5 * best, 0.8 * best, 1.25 * best, 2.0 * best):
        assert wall_per_work(best) <= wall_per_work(other)


SCRIPT = "tests.support.training_code"


class Fresh:
    """The same in a new interpreter."""

    def __init__(self, script: str, environ: dict[str, str]) -> None:
        command = [sys.executable, "-m", script]
        self._process = subprocess.Popen(command, env={**os.environ, **environ}, cwd=ROOT)
        self.pid = self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def join(self, timeout: float) -> None:
        self._process.wait(timeout)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_forked(SCRIPT, TRACE_DIR=str(folder))
    return json.loads((folder / "weights.json").read_text())


@pytest.mark.parametrize(
    ("number", "start"),
    [
        (signal.SIGTERM, forked),
        (signal.SIGINT, forked),
        pytest.param(signal.SIGTERM, Fresh, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, Fresh, marks=pytest.mark.slow),
    ],
)
def test_a_plain_script_saves_when_it_is_told_to_end_and_goes_on_when_started_again(
    tmp_path: Path, undisturbed: Any, number: signal.Signals, start: Callable[[str, dict[str, str]], Any]
) -> None:
    """Two cold starts of a script."""
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRACE_DIR": str(tmp_path)}
    environ |= {"ELASTUNE_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    trace = tmp_path / "alone.jsonl"
    process = start(SCRIPT, {**environ, "STEP_SECONDS": "0.02"})
    until(lambda: trace.exists() and trace.read_text().count("\n") >= 25, 60.0)
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == 143
    steps = trace.read_text().count("\n")
    process = start(SCRIPT, environ)
    process.join(60)
    assert process.exitcode == 0
    assert json.loads((tmp_path / "weights.json").read_text()) == undisturbed
    numbers = [json.loads(line)["step"] for line in trace.read_text().splitlines()]
    assert numbers == list(range(80))
    assert steps < 80


def test_a_memory_limit_is_found_again_and_never_half_written(tmp_path: Path) -> None:
    assert MemoryLimit(None).most_examples is None
    limit, another = MemoryLimit(tmp_path / "trial"), MemoryLimit(tmp_path / "trial")
    assert limit.lower(64, 1) == 48
    later = MemoryLimit(tmp_path / "trial")
    assert [each.most_examples for each in (limit, another, later)] == [48] * 3
    (tmp_path / "trial" / "memory-limit.json").write_text("{")
    assert [each.most_examples for each in (limit, another)] == [48, None]
    assert [MemoryLimit(None).lower(*bounds) for bounds in ((64, 1), (2, 1), (10, 9), (9, 9))] == [48, 1, 9, None]


def test_packing_is_undone_by_unpacking() -> None:
    value = {"a": [torch.ones(2), (np.int64(3), np.arange(3))], "b": {1: torch.zeros(0)}, "c": None}
    tensors: list[torch.Tensor] = []
    back = unpack(pack(value, tensors), tensors)
    assert len(tensors) == 3
    assert torch.equal(back["a"][0], torch.ones(2))
    assert back["a"][1][0] == 3
    assert back["a"][1][1].tolist() == [0, 1, 2]
    assert list(back["b"]) == [1]


def test_states_are_named_once_and_may_be_claimed_late() -> None:
    registry = StateRegistry()
    registry.restore({"late": {"x": 1}})
    assert registry.capture() == {"late": {"x": 1}}
    received: list[Any] = []
    registry.register("late", FunctionState(lambda: {"x": 2}, received.append))
    assert received == [{"x": 1}]
    assert registry.capture() == {"late": {"x": 2}}
    with pytest.raises(InvalidTraining, match="'late' is already registered"):
        registry.register("late", FunctionState(dict, received.append))


def test_a_checkpoint_can_be_read_before_it_is_flushed_and_outlives_the_machine_after(tmp_path: Path) -> None:
    seen: list[tuple[dict[str, Any], bool]] = []

    def look() -> None:
        manifest = read_manifest(tmp_path / "checkpoint-00000001")
        found = newest_in_parts(tmp_path)
        with pytest.raises(InvalidCheckpoint, match="was not on disk yet"):
            read_manifest(tmp_path / "checkpoint-00000001", flushed=True)
        seen.append((manifest, found is not None))

    path = write_checkpoint(tmp_path, 1, STATE, {}, readable=look)
    [(manifest, was_found)] = seen
    assert was_found and manifest[BOOT] == present_boot()
    assert BOOT not in read_manifest(path, flushed=True)


def test_a_state_that_came_from_memory_is_flushed_by_who_reads_it(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1, STATE, {"epoch": 1})
    manifest = {key: value for key, value in read_manifest(path).items() if key != CHECKSUM}
    (path / "manifest.json").write_text(json.dumps({**manifest, BOOT: present_boot()}))
    checkpoints = TrialCheckpoints(tmp_path, on_error=pytest.fail)
    loaded = checkpoints.load_newest()
    assert loaded is not None and torch.equal(loaded["model"]["w"], STATE["model"]["w"])  # type: ignore[index]
    checkpoints.step_ended()
    until(lambda: BOOT not in read_manifest(path))
    assert newest_in_parts(tmp_path) is not None


@pytest.mark.parametrize("boot", ["another one", ""])
def test_a_checkpoint_of_a_boot_that_is_over_or_unknown_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot: str
) -> None:
    monkeypatch.setattr(manifests, "present_boot", lambda: "" if boot == "" else "this one")
    write_checkpoint(tmp_path, 1, STATE, {"epoch": 1})
    newest = write_checkpoint(tmp_path, 2, STATE, {"epoch": 2})
    manifest = read_manifest(newest)
    (newest / "manifest.json").write_text(json.dumps({**manifest, BOOT: boot}))
    found = newest_in_parts(tmp_path)
    assert found is not None and found[1]["summary"] == {"epoch": 1}


def test_a_checkpoint_that_cannot_be_flushed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    write_checkpoint(tmp_path, 1, STATE, {"epoch": 1})
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path, 2, STATE, {"epoch": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001"]
