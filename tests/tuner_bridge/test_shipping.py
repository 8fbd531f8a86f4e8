from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.project import ROOT
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.in_replica.shipping import ShippedFunction, installed_modules_of, receive, ship


def objective(trial: Any) -> float:
    return 1.0


decorated = objective


class Holder:
    def method(self, trial: Any) -> float:
        return 1.0


def test_a_module_level_function_is_found_again() -> None:
    shipped = ship(objective)
    assert shipped == ShippedFunction(module=__name__, qualname="objective", main_path=None)
    assert receive(ShippedFunction.from_json(json.loads(json.dumps(shipped.to_json())))) is objective


def test_what_cannot_be_found_by_name_is_refused_with_advice() -> None:
    def local(trial: Any) -> float:
        return 1.0

    for wrong, words in (
        (None, "the objective is None"),
        (3, "pass a function"),
        (lambda trial: 1.0, "is a lambda"),
        (local, "defined inside another function"),
        (functools.partial(objective), "functools.partial"),
        (Holder().method, "bound method"),
        (Holder.method, "is a method"),
        (Holder, "object of type type"),
    ):
        with pytest.raises(InvalidSweep, match=words):
            ship(wrong)


def test_a_function_that_its_name_no_longer_stands_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "objective", Holder)
    with pytest.raises(InvalidSweep, match="is not the function that was passed"):
        ship(decorated)


SCRIPT = """
import json, sys
from tuner_bridge.in_replica.shipping import ship
def objective(trial):
    return 41 + trial
class OwnError(Exception):
    pass
if __name__ == "__main__":
    print(json.dumps(ship(objective).to_json()))
"""


def test_a_scripts_function_is_found_by_running_it_under_another_name(tmp_path: Path) -> None:
    script = tmp_path / "tune.py"
    script.write_text(SCRIPT)
    root = str(ROOT)
    printed = subprocess.run(
        [sys.executable, str(script)], env={"PYTHONPATH": root}, capture_output=True, text=True, check=True
    ).stdout
    code = (
        "import json, sys\nfrom tuner_bridge.in_replica.shipping import *\n"
        f"function = receive(ShippedFunction.from_json(json.loads({printed!r})))\n"
        "assert function(1) == 42\nassert sys.modules['__main__'].OwnError.__module__ == '__mp_main__'\n"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": root}, check=True)


def test_installed_modules_are_worth_preloading_but_not_ones_own() -> None:
    modules = installed_modules_of(objective)
    assert "pytest" in modules
    assert not [name for name in modules if name.startswith("tuner_bridge")]
