"""Objectives of nine shapes, sent by value to wherever a scheduler has its replicas.

Five are shapes of the code itself, which one trial holds at once; four are ways to start a driver: a script that has
changed its settings, ``python -m``, pytest, a notebook. Each trial adds 4 to 38 in every shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.support.scripts import run_python

SHAPES = """
import functools, json, optuna
from tuner_bridge import optimize

optuna.logging.set_verbosity(optuna.logging.ERROR)
FOUR = 4

def add(number, start):
    return start + number

def closed_over(number):
    def shape(start):
        return start + number
    return shape

class Adds:
    def __init__(self, number):
        self.number = number
    def to(self, start):
        return start + self.number
    def __call__(self, start):
        return start + self.number

shapes = {
    "lambda": lambda start: start + FOUR,
    "closure": closed_over(4),
    "method": Adds(4).to,
    "partial": functools.partial(add, 4),
    "object": Adds(4),
}

def objective(trial):
    found = {name: shape(38) for name, shape in shapes.items()}
    trial.set_user_attr("found", found)
    return float(sum(found.values()))

def sweep():
    study = optuna.create_study()
    optimize(study, objective, n_trials=1)
    return study.trials[0].user_attrs["found"]
"""
SCRIPT = """
import settings
shapes["settings"] = lambda start: start + settings.FOUR

if __name__ == "__main__":
    settings.FOUR = 4
    print(json.dumps(sweep()))
"""
MODULE = """
def relative(start):
    from .numbers_of_ours import FOUR
    return start + FOUR

shapes["relative import"] = relative
if __name__ == "__main__":
    print(json.dumps(sweep()))
"""
TEST = """
def test_sweep():
    print(json.dumps(sweep()))
"""
NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
for cell in (open("shapes.txt").read(), "print(json.dumps(sweep()))"):
    shell.run_cell(cell).raise_error()
"""
FILES = {
    "settings.py": "FOUR = 1\n",
    "tune.py": SHAPES + SCRIPT,
    "package/__init__.py": "",
    "package/numbers_of_ours.py": "FOUR = 4\n",
    "package/tune.py": SHAPES + MODULE,
    "test_tune.py": SHAPES + TEST,
    "shapes.txt": SHAPES,
    "notebook.py": NOTEBOOK,
}
WAYS = {
    "script": ["tune.py"],
    "module": ["-m", "package.tune"],
    "pytest": ["-m", "pytest", "-q", "-s", "--import-mode=importlib", "-p", "no:cacheprovider", "test_tune.py"],
    "notebook": ["notebook.py"],
}
ALWAYS = {"lambda": 42, "closure": 42, "method": 42, "partial": 42, "object": 42}
EXPECTED = {
    "script": {**ALWAYS, "settings": 42},
    "module": {**ALWAYS, "relative import": 42},
    "pytest": ALWAYS,
    "notebook": ALWAYS,
}


def found_in_replicas(folder: Path, environ: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Return what the trial of each way to start a driver has found; the environment names the scheduler."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    found = {}
    for way, words in WAYS.items():
        done = run_python(folder, *words, environ=environ)
        line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
        found[way] = json.loads(line)
    return found
