"""The examples of the gallery run as their first lines say, and end where their plain versions do."""

from __future__ import annotations

import difflib
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.project import ROOT
from tests.support.scripts import run_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EXAMPLES = ROOT / "examples"


def said(folder: Path, name: str, *arguments: str, launcher: tuple[str, ...] = (), **environ: str) -> str:
    done = run(folder, name, *arguments, launcher=launcher, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(
    folder: Path, name: str, *arguments: str, launcher: tuple[str, ...] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    command = [*launcher, str(EXAMPLES / name), *arguments]
    return run_python(folder, *command, succeeds=False, environ={"TMPDIR": str(folder), **environ})


def best(text: str, name: str = "accuracy") -> float:
    found = re.search(rf"best: {name} ([0-9.]+)", text)
    assert found is not None, text
    return float(found.group(1))


def test_the_plain_sweep_and_the_elastic_one_find_the_same(tmp_path: Path) -> None:
    """Two whole sweeps."""
    plain, elastic = (said(tmp_path, f"moons/{name}.py", "8") for name in ("plain", "elastic"))
    assert best(elastic, "loss") == pytest.approx(best(plain, "loss"), abs=2e-4)
    texts = [
        (EXAMPLES / "moons" / f"{name}.py").read_text().partition("import sys")[2] for name in ("plain", "elastic")
    ]
    added = [line for line in difflib.ndiff(texts[0].splitlines(), texts[1].splitlines()) if re.match(r"\+ .*\S", line)]
    assert len(added) == 8, added
    """Three imports, the loader, the wrapper and its call, the epochs, the call of optimize."""


def test_images_are_made_once_and_told_apart(tmp_path: Path) -> None:
    """A sweep of four trials, which make their data first."""
    assert best(said(tmp_path, "vision.py", "--trials", "4")) > 0.7
    assert (tmp_path / "vision-slots.png").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_script_of_adaptdls_trains(tmp_path: Path, processes: int) -> None:
    """Two cold starts, and a training."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    assert best(said(tmp_path, "adaptdl_port.py", launcher=torchrun if processes == 2 else ())) > 0.8


def test_a_script_alone_goes_on_where_it_was_killed_on_two_processes(tmp_path: Path) -> None:
    """Three cold starts of a script."""
    kept = {"ELASTUNE_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    killed = run(tmp_path, "without_a_tuner.py", launcher=(), KILLED_BEHIND="12", **kept)
    assert killed.returncode < 0
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    text = said(tmp_path, "without_a_tuner.py", launcher=torchrun, **kept)
    epochs = sorted({int(each) for each in re.findall(r"epoch (\d+)", text)})
    assert 0 < epochs[0] <= 11 and epochs == list(range(epochs[0], 20))
    assert best(text) > 0.85


def test_a_population_goes_on_from_its_best(tmp_path: Path) -> None:
    """A population of real trainings."""
    text = said(tmp_path, "population.py", "--size", "4")
    assert best(text) > 0.85
    assert len(re.findall(r"trial +\d+, member \d, epochs", text)) >= 2


def test_a_stage_tree_trains_shared_epochs_once(tmp_path: Path) -> None:
    """A sweep of sixteen trials."""
    text = said(tmp_path, "stage_tree.py")
    assert "136 epochs trained of 256, best: loss 0." in text
    assert len(re.findall(r"behind trial \d+'s first 8 epochs", text)) == 15


def test_two_studies_share_a_scheduler(tmp_path: Path) -> None:
    """Two sweeps have to run beside each other for a while."""
    text = said(tmp_path, "two_studies.py", TRIALS="2")
    assert re.search(r"hurried: best: accuracy 0\.[89]", text) and re.search(r"patient: best: accuracy 0\.[89]", text)
    assert (tmp_path / "two-studies.png").exists()


def test_a_deadline_is_kept(tmp_path: Path) -> None:
    """The sweep has to come to its deadline."""
    text = said(tmp_path, "deadline.py", "--seconds", "12")
    taken = re.search(r"deadline: (\d+) trials, best: accuracy 0\.[5-9]\d* after (\d+) s", text)
    assert taken is not None and int(taken.group(1)) > 1 and int(taken.group(2)) < 60, text


def test_a_budget_ends_the_sweep(tmp_path: Path) -> None:
    """The sweep has to use its budget."""
    text = said(tmp_path, "deadline.py", "--budget", "0.012")
    taken = re.search(r"budget: (\d+) trials, best: accuracy 0\.[5-9]\d* after \d+ s", text)
    assert taken is not None and int(taken.group(1)) > 1, text


def test_a_sweep_goes_on_after_a_power_cut(tmp_path: Path) -> None:
    """Two sweeps, the first of which is killed within."""
    text = said(tmp_path, "power_cut.py")
    assert re.search(r"killed \d+ processes, with [1-9]\d* reports", text)
    assert "5 trials, best: accuracy 0." in text
