"""Nothing that would make NNI's reader run code passes to where it is not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nni
import numpy as np
import pytest

from tuner_bridge.errors import InvalidValue
from tuner_bridge.nni.plain_json import check_metric, check_parameter


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_what_nni_would_unpickle_is_refused(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    evil = nni.dump({"parameters": {"lr": [1, Payload(proof)]}})
    with pytest.raises(InvalidValue, match="pickled bytes"):
        check_parameter(evil)
    for metric in ({"value": evil}, {"value": 1, "more": json.loads(evil)}):
        with pytest.raises(InvalidValue, match="__nni_obj__"):
            check_metric(json.dumps(metric))
    assert not proof.exists()
    nni.load(evil)
    assert proof.exists(), "the payload is a real one"


def test_a_result_names_no_code(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    evil = json.dumps({"__symbol__": "path:os.mkdir", "__args__": [str(proof)]})
    with pytest.raises(InvalidValue, match="__symbol__"):
        check_metric(json.dumps({"value": evil}))
    nni.load(evil)
    assert proof.exists(), "it would have run"


@pytest.mark.parametrize(
    "evil",
    [
        {"__nni_type__": "path:os.system"},
        {"__nni_type__": "bytes:gASV"},
        {"__instance_type__": "path:os.system"},
        {"__enum__": {"__enum_instance_type__": ["os", "x"], "name": "y"}},
        {"__ndarray__": "/etc/passwd", "dtype": "loadtxt", "shape": []},
        {"__ndarray__": [1], "dtype": "object", "shape": [1]},
        [[{"deep": {"__nni_obj__": "gASV"}}]],
    ],
)
def test_objects_in_results_are_refused(evil: Any) -> None:
    with pytest.raises(InvalidValue, match="would run code"):
        check_metric(json.dumps({"value": json.dumps(evil)}))


def test_a_parameter_may_name_code_and_not_bring_it() -> None:
    named = nni.dump({"activation": Path})
    assert nni.load(check_parameter(named)) == {"activation": Path}
    with pytest.raises(InvalidValue, match="pickled bytes"):
        check_parameter(json.dumps({"__nni_type__": "bytes:gASV"}))


@pytest.mark.parametrize(
    "value",
    [0.5, {"default": 0.5, "extra": [1, "bytes:"]}, float("nan"), "bytes:x", None, np.float64(0.5), np.ones(3)],
)
def test_numbers_texts_and_arrays_pass(value: Any) -> None:
    text = nni.dump({"value": nni.dump(value), "type": "FINAL"})
    check_metric(text)
    assert check_parameter(text) == text


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match="not valid JSON"):
        check_parameter(text)


@pytest.mark.parametrize("end", ["\n", "\x85", "\u2028"])
def test_nothing_is_hidden_by_what_nni_takes_for_a_comment(end: str) -> None:
    with pytest.raises(InvalidValue, match="several lines"):
        check_parameter(f'{{"a": "//{end}"}}')
