"""Trackers that an NNI experiment names; what they hear is tested with one that resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tuner_bridge.errors import InvalidSweep
from tuner_bridge.trackers import MLflow, TensorBoard, trackers_named

pytest.importorskip("nni")


def test_trackers_are_made_of_their_names(tmp_path: Path) -> None:
    one, other = trackers_named(
        [{"name": "MLflow", "classArgs": {"experiment": "e"}}, {"name": "TensorBoard", "classArgs": {"folder": "runs"}}]
    )
    assert isinstance(one, MLflow)
    assert isinstance(other, TensorBoard)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "Tensorboard"}, "a tracker's name is 'Tensorboard'; choose one of MLflow, TensorBoard, Weights"),
        ({"name": "TensorBoard"}, "the tracker TensorBoard cannot be created with {}: missing 1 required .* 'folder'"),
        ({"name": "MLflow", "classArgs": {"uri": "x"}}, "unexpected keyword argument 'uri'"),
        ({"name": "MLflow", "folder": "x"}, "it must have a name, may have classArgs"),
        ({"classArgs": {}}, "it must have a name, may have classArgs"),
    ],
)
def test_what_is_no_tracker_is_said(entry: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSweep, match=said):
        trackers_named([entry])
