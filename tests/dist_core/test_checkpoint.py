from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_core.checkpoint import CheckpointWriter, load_checkpoint, newest_checkpoint, write_checkpoint
from dist_core.errors import InvalidTraining
from dist_core.hand_over import pack, unpack
from dist_core.registry import FunctionState, RandomState, StateRegistry

STATE = {"model": {"w": torch.arange(4.0), "n": 3}, "list": [1, (2.5, None)], "text": "x"}


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, STATE, {"epoch": 2})
    found = newest_checkpoint(tmp_path)
    assert found is not None
    path, manifest = found
    assert manifest["summary"] == {"epoch": 2}
    loaded = load_checkpoint(path)
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"])  # type: ignore[index]
    assert loaded["list"] == STATE["list"]


def test_the_previous_one_is_kept_and_older_ones_are_not(tmp_path: Path) -> None:
    for sequence in range(1, 5):
        write_checkpoint(tmp_path, sequence, STATE, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000003", "checkpoint-00000004"]


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
    found = newest_checkpoint(tmp_path)
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
    found = newest_checkpoint(tmp_path)
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
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found[1]["summary"] == {"epoch": 99}


WRITER = """
import sys, torch
from pathlib import Path
from dist_core.checkpoint import write_checkpoint
sequence = 1
while True:
    state = {"w": torch.full((40_000,), float(sequence)), "sequence": sequence}
    write_checkpoint(Path(sys.argv[1]), sequence, state, {"sequence": sequence})
    if sequence == 1:
        print("first", flush=True)
    sequence += 1
"""


def test_killed_at_random_points_there_is_always_a_loadable_one(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    chance = random.Random(5)
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)],
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        time.sleep(chance.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        found = newest_checkpoint(folder)
        assert found is not None
        state = load_checkpoint(found[0])
        assert (state["w"] == state["sequence"]).all()


def test_packing_is_undone_by_unpacking() -> None:
    value = {"a": [torch.ones(2), (np.int64(3), np.arange(3))], "b": {1: torch.zeros(0)}, "c": None}
    tensors: list[torch.Tensor] = []
    back = unpack(pack(value, tensors), tensors)
    assert len(tensors) == 3
    assert torch.equal(back["a"][0], torch.ones(2))
    assert back["a"][1][0] == 3
    assert back["a"][1][1].tolist() == [0, 1, 2]
    assert list(back["b"]) == [1]


def test_random_state_repeats_what_comes_next() -> None:
    state = RandomState()
    saved = state.state_dict()
    first = (random.random(), float(np.random.rand()), float(torch.rand(())))
    state.load_state_dict(saved)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == first


def test_states_are_named_once_and_may_be_claimed_late() -> None:
    registry = StateRegistry()
    registry.restore({"late": {"x": 1}})
    assert registry.capture() == {"late": {"x": 1}}
    received: list[Any] = []
    registry.register("late", FunctionState(lambda: {"x": 2}, received.append))
    assert received == [{"x": 1}]
    assert registry.capture() == {"late": {"x": 2}}
    with pytest.raises(InvalidTraining, match="'late' is registered already"):
        registry.register("late", FunctionState(dict, received.append))
