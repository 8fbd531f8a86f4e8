from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner_bridge.errors import RemoteTrialError
from tuner_bridge.wire import decode_exception, decode_value, encode_exception, encode_value

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(values)
def test_values_survive_the_wire_bit_for_bit(value: Any) -> None:
    wired = json.loads(json.dumps(encode_value(value), allow_nan=False))
    assert decode_value(wired) == value


def test_nan_and_foreign_numbers() -> None:
    assert math.isnan(decode_value(encode_value(float("nan"))))

    class Scalar:
        def __float__(self) -> float:
            return 0.25

    assert decode_value(encode_value(Scalar())) == 0.25
    assert decode_value(encode_value(object())).startswith("<object")


class OwnError(Exception):
    def __init__(self, number: int, *, words: str) -> None:
        super().__init__(number, words)
        raise AssertionError("constructors of users' classes must not run")


def test_exceptions_keep_type_and_words() -> None:
    error = decode_exception(json.loads(json.dumps(encode_exception(ValueError("bad", 3)))))
    assert type(error) is ValueError
    assert error.args == ("bad", 3)
    own = OwnError.__new__(OwnError)
    own.args = (1, "x")
    assert type(decode_exception(encode_exception(own))) is OwnError


@pytest.mark.parametrize(
    ("module", "name"),
    [("no.such.module", "Error"), ("builtins", "print"), ("builtins", "SystemExit"), ("os", "system")],
)
def test_nothing_but_known_exceptions_is_rebuilt(module: str, name: str) -> None:
    document = {"module": module, "name": name, "message": "m", "arguments": ["echo"]}
    error = decode_exception(document)
    assert type(error) is RemoteTrialError
    assert str(error) == f"{name}: m"
