"""Checkpoints in parts are gone on from by any number of processes, and only where all of their parts are there."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_core.errors import InvalidTraining
from dist_core.larger.divided_state import DividedState, Held
from dist_core.larger.schedules import divided
from dist_core.state.checkpoint import load_checkpoint, write_checkpoint
from dist_core.state.manifests import PARTS, checkpoints_of, part_folder
from dist_core.state.parts import Readers, merged, newest_in_parts

ROWS = 7
WHOLE = torch.arange(ROWS * 2.0).view(ROWS, 2)


def share_of(member: int, members: int, values: torch.Tensor = WHOLE) -> tuple[DividedState, nn.Parameter]:
    """A parameter's rows as one of several processes has them, with an optimizer that has stepped."""
    each = -(-ROWS // members)
    at = min(member * each, ROWS)
    parameter = nn.Parameter(values[at : at + each].clone())
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    parameter.grad = values[at : at + each].clone() / 100
    optimizer.step()
    # What Held tells of the whole is what a sharded parameter's own shape would be.
    state = DividedState({"w": Held(parameter, at, (ROWS, 2))}, [optimizer], [])
    return state, parameter


@pytest.mark.parametrize("members", [1, 2, 3, 4])
@pytest.mark.parametrize("into", [1, 2, 3, 5])
def test_rows_find_their_process(members: int, into: int) -> None:
    saved = [share_of(member, members) for member in range(members)]
    parts = merged([{"model": state.state_dict()} for state, _ in saved])["model"]
    whole = torch.cat([parameter.detach() for _, parameter in saved])
    for member in range(into):
        state, parameter = share_of(member, into, torch.zeros(ROWS, 2))
        state.load_state_dict(parts)
        at = min(member * -(-ROWS // into), ROWS)
        assert torch.equal(parameter.detach(), whole[at : at + len(parameter)])
        moments = state.state_dict()["optimizers"][0]["state"]["w"]["exp_avg"]["rows"]
        assert moments.shape == parameter.shape
        assert moments == pytest.approx(WHOLE[at : at + len(parameter)] / 1000)


@pytest.mark.parametrize("members", [1, 2])
def test_a_child_has_its_parents_rows_and_moments_and_a_rate_of_its_own(members: int) -> None:
    saved = [share_of(member, members)[0].state_dict() for member in range(members)]
    parent = merged([{"model": state} for state in saved])["model"]
    parameter = nn.Parameter(torch.zeros(ROWS, 2))
    optimizer = torch.optim.Adam([parameter], lr=0.004, weight_decay=0.5)
    DividedState({"w": Held(parameter, 0, (ROWS, 2))}, [optimizer], []).inherit(parent)
    assert torch.equal(parameter.detach(), torch.cat([state["weights"]["w"]["rows"] for state in saved]))
    assert optimizer.state[parameter]["exp_avg"] == pytest.approx(WHOLE / 1000)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.004, 0.5)


def test_what_is_missing_or_another_models_is_named() -> None:
    saved = [share_of(member, 2)[0].state_dict() for member in range(2)]
    state, _ = share_of(0, 1)
    with pytest.raises(InvalidTraining, match="lacks 3 rows of w"):
        state.load_state_dict({PARTS: saved[:1]})
    other = DividedState({"v": Held(nn.Parameter(torch.zeros(2)), 0, (2,))}, [], [])
    with pytest.raises(InvalidTraining, match="the trial's model has no v"):
        other.load_state_dict({PARTS: saved})
    smaller = DividedState({"w": Held(nn.Parameter(torch.zeros(2, 2)), 0, (2, 2))}, [], [])
    with pytest.raises(InvalidTraining, match="w has the shape"):
        smaller.load_state_dict({PARTS: saved})


def write(folder: Path, steps: int, *members: int) -> None:
    for member in members:
        place = part_folder(folder, member)
        place.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {"member": member, "steps": steps}
        write_checkpoint(place, len(checkpoints_of(place)) + 1, state, {"steps": steps, "epoch": 0, PARTS: 2})


def test_one_that_lacks_a_part_or_has_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 10, 0, 1)
    write(tmp_path, 20, 0)
    found = newest_in_parts(tmp_path)
    assert found is not None and found[1]["summary"]["steps"] == 10
    assert [load_checkpoint(path)["member"] for path in found[0]] == [0, 1]
    write(tmp_path, 20, 1)
    found = newest_in_parts(tmp_path)
    assert found is not None and found[1]["summary"]["steps"] == 20
    newest = checkpoints_of(part_folder(tmp_path, 1))[0]
    next(newest.glob("state*")).write_bytes(b"damaged")
    found = newest_in_parts(tmp_path)
    assert found is None or found[1]["summary"]["steps"] == 10


@pytest.mark.parametrize("most", [4, 8, 16])
@pytest.mark.parametrize("stages", [2, 4])
def test_microbatches_hold_every_example_once(most: int, stages: int) -> None:
    for examples in range(1, 70):
        parts = divided(examples, most, stages, 1)
        assert [part.first for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == examples
        assert all(part.count >= 1 and part.size >= 1 for part in parts)
        assert parts[0].count <= most
        small = divided(examples, most, stages, 1, largest=3)
        assert small[-1].stop == examples and all(part.size <= 3 for part in small)


def looking_together(folder: Path, members: int) -> list[tuple[list[Path], dict[str, Any]] | None]:
    """What as many processes find that look for a checkpoint together."""
    meeting = threading.Barrier(members, timeout=10.0)
    given: list[Any] = [None] * members

    def exchanged(member: int, value: Any) -> list[Any]:
        meeting.wait()
        given[member] = value
        meeting.wait()
        return list(given)

    def readers(member: int) -> Readers:
        return Readers(
            member,
            members,
            lambda numbers: [sum(each) for each in zip(*exchanged(member, numbers), strict=True)],
            lambda value: exchanged(member, value)[0],
        )

    with ThreadPoolExecutor(members) as pool:
        return list(pool.map(lambda member: newest_in_parts(folder, readers(member)), range(members)))


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("damaged", [0, 1])
def test_all_that_look_for_a_checkpoint_together_take_the_same_one(tmp_path: Path, members: int, damaged: int) -> None:
    write(tmp_path, 10, 0, 1)
    write(tmp_path, 20, 0, 1)
    newest = checkpoints_of(part_folder(tmp_path, damaged))[0]
    found = looking_together(tmp_path, members)
    assert all(each is not None and each[1]["summary"]["steps"] == 20 for each in found)
    next(newest.glob("state*")).write_bytes(b"damaged")
    found = looking_together(tmp_path, members)
    assert all(each is not None and each[1]["summary"]["steps"] == 10 for each in found)
    for each in found:
        assert each is not None and [load_checkpoint(path, in_place=True)["member"] for path in each[0]] == [0, 1]
