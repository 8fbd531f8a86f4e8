"""Draw what the examples of the gallery do, for its page: who had which slots when, and how the values went.

    python -m scripts.draw_gallery [NAME ...]      writes docs/gallery/NAME.png

Each example runs as its first lines say.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scheduler.cli.connecting import client_of, opened
from scheduler.dashboard.picture import bars

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "gallery"
EXAMPLES = {
    "moons": ["examples/moons/elastic.py"],
    "vision": ["examples/vision.py"],
    "text_classification": ["examples/text_classification.py"],
    "lora": ["examples/lora.py"],
    "lightning_digits": ["examples/lightning_digits.py"],
    "tabular": ["examples/tabular.py"],
    "gpt": ["examples/gpt.py"],
    "deadline": ["examples/deadline.py"],
    "kubernetes": ["examples/kubernetes/sweep.py"],
}


KEEPING = """
import importlib, os

optimizing = importlib.import_module("tuner_bridge.optuna.optimize")
original = optimizing.optimize
optimizing.optimize = lambda *given, **options: original(*given, **{**options, "state_dir": os.environ["GALLERY"]})
"""
"""Run at the start of each Python: what a sweep's own scheduler knows outlives it."""


def drawn(name: str, words: list[str]) -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        state, site = Path(scratch) / "state", Path(scratch) / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(KEEPING)
        given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{site}", "GALLERY": str(state)}
        command = [sys.executable, str(ROOT / words[0]), *words[1:]]
        subprocess.run(command, cwd=scratch, env={**os.environ, **given}, check=True)
        client = client_of(state, "", also_ended=True)
        timeline = client.connection.request("GET", "/timeline")
        curves = {trial["trial_id"]: client.story(trial["trial_id"])["reports"] for trial in timeline["trials"]}
        opened.close()
    return _draw(name, timeline, curves)


def _draw(name: str, timeline: dict[str, Any], curves: dict[str, list[list[float]]]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    rows, slots = bars(timeline)
    colors = {bar.label: bar.color for bar in slots}
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(5.2, 3.1), dpi=100, height_ratios=(1, 2.2))
    for bar in slots:
        place, length = rows.index(bar.row), bar.ended - bar.began
        above.barh(place, length, left=bar.began, height=0.9, color=bar.color, edgecolor="white", linewidth=0.6)
    above.set_yticks(range(len(rows)), [row.rpartition("/")[2].strip() for row in rows], fontsize=7)
    above.set_ylabel("slot", fontsize=7)
    above.set_xlabel("seconds", fontsize=7, labelpad=1)
    above.invert_yaxis()
    for trial in timeline["trials"]:
        points = curves[trial["trial_id"]]
        color = colors.get(str(trial["number"]), "#8a8f98")
        below.plot(
            [point[0] for point in points], [point[1] for point in points], color=color, marker=".", markersize=3
        )
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set_xlabel("step", fontsize=7, labelpad=1)
    below.set_ylabel("reported value", fontsize=7)
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
    for chosen in sys.argv[1:] or EXAMPLES:
        print(drawn(chosen, EXAMPLES[chosen]))
