"""The scheduler in a cluster serves the page, and takes jobs from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from scheduler.api.client_side import FOLDER
from scheduler.client import Client
from tests.support.cluster.rig import Installed, until


def test_the_page_opens_with_a_link_and_shows_a_job_that_was_submitted(cluster: Installed, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('trained in a pod with', sys.argv[1:])\n")
    command = [sys.executable, "-m", "scheduler.cli", "submit", "--follow", "--", "python", "train.py", "--lr", "0.25"]
    done = subprocess.run(
        command, cwd=tmp_path, env=cluster.environ(), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "trained in a pod with ['--lr', '0.25']" in done.stdout
    with Client(cluster.client()) as client:
        [job] = client.trials(study="jobs")
        assert (job.state, job.parameters) == ("succeeded", {"lr": 0.25})
        assert any(used.title == "jobs" for used in client.usage())
        link = urlsplit(client.page_link())
        browser = httpx2.Client(base_url=cluster.url, headers={"X-Elastune-Page": "1"}, trust_env=False)
        page = browser.get("/")
        assert page.status_code == (200 if (FOLDER / "index.html").is_file() else 503)
        assert browser.get("/page/story").status_code == 401
        begun = browser.post("/page/session", json={"code": link.fragment.partition("=")[2]})
        assert begun.json() == {"access": "owner"}
        assert any(entry["trial"] == job.id for entry in browser.get("/page/story").json())
        with browser.stream("GET", "/page/events") as events:
            first = next(line for line in events.iter_lines() if line.startswith("data: "))
        assert job.id in first
        browser.close()
        again = client.clone(job, lr=0.5)
        assert again is not None
        until(lambda: client.trial(again.id).is_over, 60.0, "the clone ends")
        assert client.trial(again.id).parameters == {"lr": 0.5}
