"""The command line against a real scheduler process."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

import dist_core
from scheduler.cli import COMMANDS, main
from scheduler.client.connection import SchedulerClient
from scheduler.host.embedded import EmbeddedScheduler


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, SchedulerClient]]:
    folder = tmp_path_factory.mktemp("state")
    embedded = EmbeddedScheduler(folder, emulate="1x1:bert-squad", fork_server=False)
    client = embedded.start()
    for number in range(2):
        client.request("POST", "/trials", {"study": "s", "number": number, "entrypoint": "no.such.module:main"})
    yield folder, client
    client.close()
    embedded.stop()


@dataclass(frozen=True, slots=True)
class Answer:
    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str) -> Answer:
    """The command as its entry point calls it, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["elastune", *arguments])
        patch.setenv("COLUMNS", "200")
        patch.delenv("ELASTUNE_URL", raising=False)
        try:
            status = main()
        except SystemExit as leaving:
            status = leaving.code
    return Answer(int(status or 0), out.getvalue(), err.getvalue())


def test_the_command_is_installed() -> None:
    command = str(Path(sys.executable).with_name("elastune"))
    told = subprocess.run([command, "--version"], capture_output=True, text=True, check=False, timeout=60)
    assert (told.returncode, told.stdout) == (0, f"elastune {dist_core.__version__}\n"), told.stderr


def test_trials_are_listed_shown_and_stopped(site: tuple[Path, SchedulerClient], tmp_path: Path) -> None:
    folder, client = site
    first, second = (trial["trial_id"] for trial in client.request("GET", "/trials"))
    listed = run("ls", "--state-dir", str(folder))
    assert listed.returncode == 0
    assert first in listed.stdout
    for name in (second, second[:6], "1"):
        shown = run("show", name, "--state-dir", str(folder))
        assert f"trial {second}" in shown.stdout
    asked = run("why", second, "--state-dir", str(folder))
    assert asked.returncode == 0, asked.stderr
    assert f"trial {second}" in asked.stdout
    assert "why: " in asked.stdout
    for answer in (listed, shown, asked):
        assert "devices are emulated: 1 node of 1 slot, steps take as long as bert-squad says" in answer.stdout
    assert run("stop", second, "--state-dir", str(folder)).returncode == 0
    drawn = run("timeline", str(tmp_path / "slots"), "--state-dir", str(folder))
    assert (tmp_path / "slots.png").exists(), drawn.stderr


def test_mistakes_end_in_one_sentence(site: tuple[Path, SchedulerClient], tmp_path: Path) -> None:
    folder, _ = site
    for arguments, words in (
        (("show", "nope", "--state-dir", str(folder)), "no trial is called 'nope'"),
        (("show", "t", "--state-dir", str(folder)), "2 trials are called 't': s/0, s/1; use one of these"),
        (("ls", "--state-dir", str(tmp_path)), "no scheduler has run on"),
        (("up", "--state-dir", str(folder)), "belongs to a running scheduler (pid"),
        (("up", "--state-dir", str(tmp_path / "x"), "--policy", "nope"), "policy 'nope' is not known"),
        (
            ("up", "--state-dir", str(tmp_path / "x"), "--emulate", "8"),
            "emulated devices are '8'; they must have the form",
        ),
        (("up", "--state-dir", str(tmp_path / "x"), "--emulate", "1x8", "--slots", "3"), "leave one out"),
        (("logs", "nope", "--state-dir", str(folder)), "no trial is called 'nope'"),
    ):
        result = run(*arguments)
        assert result.returncode == 1, result.stdout
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_help_lists_each_command_with_its_sentence(tmp_path: Path) -> None:
    listed = run("--help").stdout
    for name in (*COMMANDS, "nni", "submit"):
        assert re.search(rf"^  {name} +[A-Z]", listed, re.MULTILINE), name
    assert run().returncode == 2
    assert "No such command 'nope'" in run("nope").stderr


def test_short_answers_load_little() -> None:
    heavy = "fastapi", "pydantic", "sqlalchemy", "rich", "numpy", "torch", "optuna", "uvicorn", "scipy"
    for words in (["--help"], ["ls", "--help"], ["completion", "bash"]):
        code = f"import sys; sys.argv[1:] = {words}\nfrom scheduler.cli import main\nmain()\nprint(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        loaded = set(done.stdout.splitlines()[-1].split())
        assert not loaded.intersection(heavy), words


def test_rows_come_as_tables_and_as_json(site: tuple[Path, SchedulerClient]) -> None:
    folder, client = site
    where = ("--state-dir", str(folder))
    client.request("PUT", "/studies/s", {"owner": "me", "user": "ada"})
    assert [row["number"] for row in json.loads(run("ls", "--json", "--last", "0", *where).stdout)][:2] == [0, 1]
    assert json.loads(run("studies", "--json", *where).stdout)[0]["user"] == "ada"
    assert json.loads(run("nodes", "--json", *where).stdout)[0]["slots"] == 1
    assert "ada" in run("studies", *where).stdout
    assert "0/1" in run("nodes", *where).stdout or "1/1" in run("nodes", *where).stdout
    assert json.loads(run("show", "s/0", "--json", *where).stdout)["trial"]["number"] == 0
    assert json.loads(run("why", "s/0", "--json", *where).stdout)["trial"]["number"] == 0
    assert "slots" in run("top", "--once", *where).stdout
    assert run("page", *where).stdout.startswith(f"{client.url}/#code=")
    for by in ("study", "user", "day"):
        assert run("report", "--by", by, "--price", "2", *where).stdout.splitlines()[-1].startswith("all")
    assert "must be study, user or day" in run("report", "--by", "week", *where).stderr


def test_a_job_is_submitted_paused_cloned_exported_and_forgotten(
    site: tuple[Path, SchedulerClient], tmp_path: Path
) -> None:
    folder, client = site
    where = ("--state-dir", str(folder))
    submitted = run("submit", *where, "--replicas", "1:1", "--env", "A=b", "--", "sleep", "0", "--lr", "0.25")
    assert submitted.stdout.startswith("submitted as trial jobs/0 (t"), submitted.stderr
    assert "pauses" in run("pause", "jobs/0", "--why", "lunch", *where).stdout
    spec = client.request("GET", "/trials")[-1]["trial_id"]
    assert client.request("GET", f"/trials/{spec}")["spec"]["environ"]["A"] == "b"
    forked = run("fork", "jobs/0", "--set", "lr=0.4", *where)
    assert "submitted as trial jobs/1" in forked.stdout, forked.stderr
    extended = run("extend", "jobs/0", "3", *where)
    assert "submitted as trial jobs/2" in extended.stdout, extended.stderr
    assert "continues" in run("resume", "jobs/0", *where).stdout
    assert "was not paused by a user" in run("resume", "jobs/0", *where).stderr
    cloned = run("clone", "jobs/0", "--set", "lr=0.5", *where)
    assert "submitted as trial jobs/3" in cloned.stdout, cloned.stderr
    assert "no 'depth' to change" in run("clone", "jobs/0", "--set", "depth=5", *where).stderr
    assert "must be NAME=VALUE, such as lr=0.1" in run("clone", "jobs/0", "--set", "lr", *where).stderr
    assert "submitted as trial jobs/4" in run("retry", "jobs/0", *where).stdout
    assert re.search(r"\d trials? of jobs told to stop", run("stop", "--study", "jobs", *where).stdout)
    assert "name either a trial to stop" in run("stop", *where).stderr
    assert run("export", "--csv", str(tmp_path / "x.csv"), "--study", "jobs", *where).returncode == 0
    with open(tmp_path / "x.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["param_lr"] for row in rows] == ["0.25", "0.4", "0.25", "0.5", "0.25"]
    assert "trials were written to" in run("export", "--parquet", str(tmp_path / "x.parquet"), *where).stdout
    assert "name one with --csv or --parquet" in run("export", *where).stderr
    assert "no trial ended more than 3d ago" in run("rm", "--older-than", "3d", *where).stdout
    assert "must be a number with" in run("rm", "--older-than", "soon", *where).stderr
    assert "--replicas is 'x'" in run("submit", "--replicas", "x", *where, "--", "true").stderr
    assert "--env names 'NOT_SET_HERE'" in run("submit", "--env", "NOT_SET_HERE", *where, "--", "true").stderr


def test_a_scheduler_in_the_background_is_started_and_stopped(tmp_path: Path) -> None:
    where = ("--state-dir", str(tmp_path / "state"))
    command = [sys.executable, "-m", "scheduler.cli", "up", "--detach", "--port", "0", "--slots", "1", *where]
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "scheduler.log").write_text("ünïcödé words: " * 200, encoding="utf-8")
    started = subprocess.run([*command, "--no-fork-server"], capture_output=True, text=True, check=False, timeout=90)
    try:
        assert started.returncode == 0, started.stderr
        assert "runs in the background" in started.stdout and "#code=" in started.stdout
        assert run("nodes", *where).returncode == 0
        second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
        assert second.returncode == 1
        assert "belongs to a running scheduler" in second.stderr
    finally:
        stopped = run("down", *where)
    assert "has ended" in stopped.stdout
    assert "no scheduler runs" in run("down", *where).stdout
    listed = run("nodes", *where)
    assert listed.returncode == 0, "what it has kept is there still"


def test_the_doctor_looks_at_everything(tmp_path: Path) -> None:
    said = run("doctor", "--state-dir", str(tmp_path)).stdout
    for what in (
        "Python",
        "torch",
        "cores",
        "memory",
        "control groups",
        "state folder",
        "port",
        "open files",
        "web page",
    ):
        assert f" {what}: " in said
