from __future__ import annotations

import enum
import json
import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tuner_bridge.errors import InvalidValue
from tuner_bridge.in_replica.wire import decode_value, encode_result, encode_value, is_nan

keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    keys | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner) | st.frozensets(keys),
    max_leaves=10,
)


def wired(value: Any) -> Any:
    return decode_value(json.loads(json.dumps(encode_value(value), allow_nan=False).encode()))


@given(values)
def test_values_survive_the_wire_bit_for_bit(value: Any) -> None:
    back = wired(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "array",
    [
        np.array([0.32242295, 0.42242295]),
        np.arange(6, dtype=np.int8).reshape(2, 3).T,
        np.array(3.5),
        np.float32(0.1),
        np.float64(0.1),
        np.bool_(True),
        np.array(["a", "bc"]),
        np.zeros((0, 4), dtype=np.float16),
        np.array([1 + 2j]),
        np.datetime64("2026-01-02"),
    ],
    ids=repr,
)
def test_arrays_and_scalars_keep_type_and_shape(array: Any) -> None:
    back = wired({"scores": [array]})["scores"][0]
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


class Act(str, enum.Enum):  # as scripts write it; StrEnum is its text already
    RELU = "relu"


def test_a_member_of_an_enumeration_of_texts_is_its_text() -> None:
    assert encode_value(Act.RELU) == "relu"
    assert type(encode_value(Act.RELU)) is str


def test_a_file_name_with_bytes_that_are_no_text_survives() -> None:
    name = os.fsdecode(b"caf\xe9.csv")
    assert os.fsencode(wired(name)) == b"caf\xe9.csv"


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (object(), "builtins.object cannot be sent"),
        ({"model": [torch.zeros(3)]}, "torch.Tensor cannot be sent.*tolist"),
        (np.array([object()]), "NumPy array of type object cannot be sent"),
        (nested(400), "nested more than 60 deep"),
        (np.zeros(3_000_000), "24000000 bytes is too large"),
    ],
)
def test_what_cannot_travel_is_refused(value: Any, match: str) -> None:
    with pytest.raises(InvalidValue, match=match):
        encode_value(value)
    assert isinstance(json.dumps(encode_value(value, lenient=True)), str)


def test_results_are_numbers_of_any_type() -> None:
    class Scalar:
        def __float__(self) -> float:
            return 0.25

    assert decode_value(encode_result(Scalar())) == 0.25
    assert decode_value(encode_result((torch.tensor(0.5), np.float32(0.25), 1))) == [0.5, 0.25, 1.0]
    assert math.isnan(decode_value(encode_result(float("nan"))))
    assert decode_value(encode_result(object())).startswith("<object")
    assert is_nan(torch.tensor(float("nan")))
    assert is_nan([0.0, float("nan")])
    assert not any(is_nan(each) for each in (1.0, None, "nan?", [1, 2], math.inf, object()))
