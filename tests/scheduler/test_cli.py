"""The command line against a real scheduler process."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

import dist_core
from scheduler.cli import main
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
        (("show", "t", "--state-dir", str(folder)), "2 trials are called 't': s/0, s/1; name one so"),
        (("ls", "--state-dir", str(tmp_path)), "no scheduler has run on"),
        (("up", "--state-dir", str(folder)), "belongs to a running scheduler (pid"),
        (("up", "--state-dir", str(tmp_path / "x"), "--policy", "nope"), "policy 'nope' is not known"),
        (("up", "--state-dir", str(tmp_path / "x"), "--emulate", "8"), "emulated devices are '8'; they are written"),
        (("up", "--state-dir", str(tmp_path / "x"), "--emulate", "1x8", "--slots", "3"), "leave one out"),
        (("logs", "nope", "--state-dir", str(folder)), "no trial is called 'nope'"),
    ):
        result = run(*arguments)
        assert result.returncode == 1, result.stdout
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
