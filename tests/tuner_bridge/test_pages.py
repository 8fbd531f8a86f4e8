"""The pages that users of Optuna and NNI look at, opened in a real browser on elastic trials."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from tests.support import objectives
from tests.support.nni_experiment import NniExperiment
from tests.support.nni_scripts import REPORTS
from tests.support.ports import ReservedPort, until_it_answers
from tuner_bridge import optimize

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium; on Debian and Ubuntu: apt install chromium")


def browse(url: str, folder: Path, picture: str) -> str:
    """The page's text after its scripts have run; a picture of it lies in the folder."""
    assert BROWSER is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}"]
    options += ["--window-size=1500,1000", "--virtual-time-budget=20000", "--no-proxy-server"]
    done = subprocess.run(
        [BROWSER, *options, f"--screenshot={folder / picture}", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", " ", done.stdout, flags=re.DOTALL))


def page_with(words: str, url: str, folder: Path, picture: str) -> str:
    """The page once it shows the words: on a busy machine its data comes after the browser has looked."""
    deadline = time.monotonic() + 90.0
    while True:
        page = browse(url, folder, picture)
        if words in page:
            return page
        assert time.monotonic() < deadline, f"{words!r} is not on the page:\n{page}"


@pytest.fixture
def experiment(tmp_path: Path) -> Iterator[NniExperiment]:
    made = NniExperiment(tmp_path, REPORTS, {"maxTrialNumber": 2}, {})
    yield made
    made.close()


@needs_browser
def test_nnis_page_shows_elastic_trials(experiment: NniExperiment, tmp_path: Path) -> None:
    """NNI's manager and a browser start, and trials have to run meanwhile."""
    experiment.environ["STEP_SECONDS"] = "3"
    experiment.create()
    experiment.until(lambda: "RUNNING" in experiment.states(), "a trial to run")
    page_with("RUNNING", f"http://127.0.0.1:{experiment.port}/detail", tmp_path, "nni-running.png")
    experiment.until_done()
    page = page_with("SUCCEEDED", f"http://127.0.0.1:{experiment.port}/detail", tmp_path, "nni.png")
    for trial in experiment.trials():
        assert trial["trialJobId"] in page
    assert page.count("SUCCEEDED") >= 2
    overview = page_with("DONE", f"http://127.0.0.1:{experiment.port}/oview", tmp_path, "nni-overview.png")
    assert experiment.id in overview
    assert (tmp_path / "nni.png").stat().st_size > 20_000


@needs_browser
def test_optunas_dashboard_shows_replicas_and_goodput(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser starts, and trials have to run meanwhile."""
    monkeypatch.setenv("EPOCHS", "24")
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    study = optuna.create_study(study_name="shown", storage=storage)
    optimize(study, objectives.trains, n_trials=2, slots=2, state_dir=tmp_path / "state")
    attributes = study.trials[-1].user_attrs
    assert attributes["elastune:replicas"] >= 1
    assert attributes["elastune:goodput"] > 0
    port = ReservedPort()
    server = subprocess.Popen(
        [str(Path(sys.executable).with_name("optuna-dashboard")), storage, "--port", str(port.number), "--quiet"],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    try:
        url = f"http://127.0.0.1:{port.number}"
        until_it_answers(url)
        page = page_with("elastune:replicas", f"{url}/dashboard/studies/1/trials", tmp_path, "optuna.png")
        assert "elastune:goodput" in page
    finally:
        server.terminate()
        server.wait(timeout=20.0)
        port.release()
