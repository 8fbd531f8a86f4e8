"""Draw what the examples of the gallery do, for its page: who had which slots when, and how the values went.

    python -m scripts.draw_gallery [NAME ...]      writes docs/gallery/NAME.png

Each example runs as its first lines say.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.cli.connecting import client_of, opened
from scheduler.client import Client
from scheduler.dashboard.picture import bars

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES, TARGET = ROOT / "examples", ROOT / "docs" / "gallery"
ELASTUNE = (sys.executable, "-m", "scheduler.cli")
NNI_STATE = "nni-experiments/[!_]*/elastune"
GRAY = "#8a8f98"

KEEPING = """
import importlib, os

if "GALLERY" in os.environ:
    optimizing = importlib.import_module("tuner_bridge.optuna.optimize")
    original = optimizing.optimize
    optimizing.optimize = lambda *given, **options: original(*given, **{**options, "state_dir": os.environ["GALLERY"]})
"""
"""Run at the start of each Python: what a sweep's own scheduler knows outlives it."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Contents of a picture: above, who had which row from when for how long; below, lines of points."""

    rows: Sequence[str]
    held: Sequence[tuple[str, float, float, str]]
    """Row, seconds at which it begins, its length, color."""
    lines: Sequence[tuple[Sequence[Sequence[float]], str]]
    below: str = "reported value"
    along: str = "step"


# ------------------------------------------------------------------ how the examples run


def sweep(*words: str) -> Callable[[Path], Drawn]:
    """A script whose sweep has a scheduler of its own."""

    def run(scratch: Path) -> Drawn:
        _run(scratch, [sys.executable, str(EXAMPLES / words[0]), *words[1:]], GALLERY=str(scratch / "state"))
        return _of_trials(scratch / "state")

    return run


def two_studies(scratch: Path) -> Drawn:
    script = [sys.executable, str(EXAMPLES / "two_studies.py")]
    with _up(scratch, slots=2) as reached:
        patient = subprocess.Popen([*script, "patient"], cwd=scratch, env=_environ(scratch, **reached))
        time.sleep(4)
        _run(scratch, [*script, "hurried"], **reached)
        patient.wait()
    return _of_trials(scratch / "state")


def nni_experiment(scratch: Path) -> Drawn:
    environ = {"HOME": str(scratch), "NNI_CONFIG_DIR": str(scratch / "config")}
    environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    nnictl = [sys.executable, "-m", "nni.tools.nnictl.nnictl"]
    (scratch / "config").mkdir()
    _run(scratch, [*ELASTUNE, "nni", "register"], **environ)
    config = str(EXAMPLES / "nni_experiment" / "experiment.yml")
    _run(scratch, [*nnictl, "create", "--config", config, "--port", "18080"], **environ)
    try:
        while not _has_ended(scratch, trials=6):
            time.sleep(0.5)
    finally:
        _run(scratch, [*nnictl, "stop", "--all"], **environ)
    [state] = scratch.glob(NNI_STATE)
    return _of_trials(state)


def _has_ended(scratch: Path, trials: int) -> bool:
    for state in scratch.glob(NNI_STATE):
        with contextlib.suppress(Exception), Client.connect(state_dir=state) as client:
            return sum(each.is_over for each in client.trials()) == trials
    return False


def without_a_tuner(scratch: Path) -> Drawn:
    """Nobody watches it: its processes' own words are drawn."""
    kept = {"ELASTUNE_CHECKPOINT_DIR": str(scratch / "checkpoints")}
    script = str(EXAMPLES / "without_a_tuner.py")
    began = time.monotonic()
    held, lines = [], []
    for launcher, color, more in (
        ((sys.executable,), "#1f77b4", {"KILLED_BEHIND": "12"}),
        ((str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2"), "#2ca02c", {}),
    ):
        process = subprocess.Popen(
            [*launcher, script], cwd=scratch, env=_environ(scratch, **kept, **more), stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        said = ((re.match(r"epoch (\d+)", line), time.monotonic() - began) for line in process.stdout)
        points = [(at, float(found.group(1))) for found, at in said if found]
        process.wait()
        length = time.monotonic() - began - points[0][0]
        held += [(f"process {place}", points[0][0], length, color) for place in range(1 if more else 2)]
        lines.append((points, color))
    return Drawn(["process 0", "process 1"], held, lines, below="epoch", along="seconds")


GALLERY: Mapping[str, Callable[[Path], Drawn]] = {
    "moons": sweep("moons/elastic.py"),
    "vision": sweep("vision.py"),
    "text_classification": sweep("text_classification.py"),
    "lora": sweep("lora.py"),
    "lightning_digits": sweep("lightning_digits.py"),
    "tabular": sweep("tabular.py"),
    "gpt": sweep("gpt.py"),
    "deadline": sweep("deadline.py"),
    "kubernetes": sweep("kubernetes/sweep.py"),
    "power_cut": sweep("power_cut.py"),
    "population": sweep("population.py"),
    "stage_tree": sweep("stage_tree.py"),
    "two_studies": two_studies,
    "nni_experiment": nni_experiment,
    "without_a_tuner": without_a_tuner,
}


def _environ(scratch: Path, **more: str) -> dict[str, str]:
    site = scratch / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(KEEPING)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{site}", **more}


def _run(scratch: Path, command: Sequence[str], **environ: str) -> None:
    subprocess.run(command, cwd=scratch, env=_environ(scratch, **environ), check=True)


@contextlib.contextmanager
def _up(scratch: Path, *, slots: int) -> Iterator[dict[str, str]]:
    """A scheduler; what its users have in their environment."""
    state = scratch / "state"
    command = [*ELASTUNE, "up", "--slots", str(slots), "--port", "0", "--state-dir", str(state)]
    up = subprocess.Popen(command, cwd=scratch, env=_environ(scratch), stdout=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(Exception), Client.connect(state_dir=state) as client:
                url = client.connection.url
                break
            assert up.poll() is None, "the scheduler has ended"
            time.sleep(0.1)
        yield {"ELASTUNE_URL": url, "ELASTUNE_TOKEN": (state / "token").read_text().strip()}
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait()


# ------------------------------------------------------------------ what is drawn of them


def _of_trials(state: Path) -> Drawn:
    client = client_of(state, "", also_ended=True)
    timeline: dict[str, Any] = client.connection.request("GET", "/timeline")
    curves = {trial["trial_id"]: client.story(trial["trial_id"])["reports"] for trial in timeline["trials"]}
    parents = {trial.id: trial.parent for trial in client.trials() if trial.parent}
    opened.close()
    for child, parent in parents.items():
        # A line from where it began.
        before = [point for point in curves[parent] if curves[child] and point[0] < curves[child][0][0]]
        curves[child] = [*before[-1:], *curves[child]]
    rows, slots = bars(timeline)
    colors = {bar.trial_id: bar.color for bar in slots}
    return Drawn(
        rows=rows,
        held=[(bar.row, bar.began, bar.ended - bar.began, bar.color) for bar in slots],
        lines=[(found, colors.get(trial_id, GRAY)) for trial_id, found in curves.items()],
    )


def draw(name: str) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    with tempfile.TemporaryDirectory() as scratch:
        drawn = GALLERY[name](Path(scratch))
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(5.2, 3.1), dpi=100, height_ratios=(1, 2.2))
    for row, began, length, color in drawn.held:
        place = drawn.rows.index(row)
        above.barh(place, length, left=began, height=0.9, color=color, edgecolor="white", linewidth=0.6)
    above.set_yticks(range(len(drawn.rows)), [row.rpartition("/")[2].strip() for row in drawn.rows], fontsize=7)
    above.set_ylabel("slot" if "/" in drawn.rows[0] else "", fontsize=7)
    above.set_xlabel("seconds", fontsize=7, labelpad=1)
    above.invert_yaxis()
    for points, color in drawn.lines:
        below.plot(
            [point[0] for point in points], [point[1] for point in points], color=color, marker=".", markersize=3
        )
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    if drawn.along == "seconds":
        below.set_xlim(0, above.get_xlim()[1])
    above.set_xlim(left=0)
    below.set_xlabel(drawn.along, fontsize=7, labelpad=1)
    below.set_ylabel(drawn.below, fontsize=7)
    for axes in (above, below):
        axes.tick_params(labelsize=7, length=2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(pad=0.4)
    TARGET.mkdir(exist_ok=True)
    path = TARGET / f"{name}.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    for chosen in sys.argv[1:] or GALLERY:
        print(draw(chosen))
