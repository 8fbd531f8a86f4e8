"""A real NNI experiment: `nnictl`, NNI's manager in Node, a tuner, and its trials on our platform."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import psutil
import yaml

from tests.support.ports import ReservedPort
from tests.support.project import ROOT
from tests.support.waiting import until

Started = TypeVar("Started")

STARTS = 5
"""NNI gives its web server 4 s and its tuner 10 s to start, which a busy machine may miss."""


_registered: dict[str, bytes] | None = None


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Start one NNI at a time, of all processes that test: two that start together miss their times on two cores."""
    with open(Path(tempfile.gettempdir()) / "elastune-tests-start-nni", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class NniExperiment:
    """``folder`` holds NNI's home, the trials' code and the configuration."""

    def __init__(self, folder: Path, code: str, config: dict[str, Any], service: dict[str, Any]) -> None:
        self.folder = folder
        self.code = folder / "code"
        self.code.mkdir()
        (self.code / "trial.py").write_text(code)
        self.notes = folder / "notes"
        self.notes.mkdir()
        self._reserved: ReservedPort | None = None
        # To read certificates, which nobody asks for here, takes twenty times as long as a question.
        one_each = httpx2.Limits(max_keepalive_connections=0)
        self._client = httpx2.Client(verify=False, trust_env=False, timeout=20.0, limits=one_each)
        self.id = ""
        self.environ = {
            **os.environ,
            "HOME": str(folder),
            "NNI_CONFIG_DIR": str(folder / "config"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "NOTES": str(self.notes),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        self.config = {
            "searchSpace": {"x": {"_type": "uniform", "_value": [0.0, 1.0]}},
            "trialCommand": "python trial.py",
            "trialCodeDirectory": str(self.code),
            "trialConcurrency": 2,
            "maxTrialNumber": 4,
            "tuner": {"name": "Random", "classArgs": {"seed": 1}},
            "trainingService": {
                "platform": "tuner_bridge",
                **({} if "ELASTUNE_URL" in os.environ else {"slots": 2}),
                **service,
            },
            **config,
        }
        self._register()

    def _register(self) -> None:
        """Make our platform known to this experiment's NNI, by our command; what it wrote serves the next ones."""
        global _registered
        config = self.folder / "config"
        if _registered is None:
            config.mkdir()
            self.run("-m", "scheduler.cli", "nni", "register")
            _registered = {path.name: path.read_bytes() for path in config.iterdir()}
            return
        config.mkdir()
        for name, content in _registered.items():
            (config / name).write_bytes(content)

    @property
    def port(self) -> int:
        assert self._reserved is not None
        return self._reserved.number

    def reserve_port(self) -> None:
        """Another one than any before."""
        before, self._reserved = self._reserved, ReservedPort()
        if before is not None:
            before.release()

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def nnictl(self, *arguments: str) -> str:
        return self.run("-m", "nni.tools.nnictl.nnictl", *arguments)

    def create(self) -> None:
        def started() -> None:
            self.nnictl(*self._creation())
            self.id = self._newest()
            self.until_started()

        self._in_some_attempt(started)

    def create_in_foreground(self) -> subprocess.Popen[bytes]:
        """The `nnictl` that stays until it is interrupted; what it says is part of the story."""

        def started() -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "nni.tools.nnictl.nnictl", *self._creation(), "--foreground"]
            with open(self._said, "wb") as words:
                process = subprocess.Popen(command, env=self.environ, stdout=words, stderr=words)

            def reached() -> bool:
                assert process.poll() is None, f"NNI did not start\n{self.story()}"
                return self.status() not in ("unreachable", "INITIALIZED")

            self.until(reached, "NNI to have taken the experiment", 60.0)
            self.id = self._newest()
            self.until_started()
            return process

        return self._in_some_attempt(started)

    def _creation(self) -> list[str]:
        path = self.folder / "config.yml"
        path.write_text(yaml.safe_dump(self.config))
        self.reserve_port()
        return ["create", "--config", str(path), "--port", str(self.port)]

    def _in_some_attempt(self, start: Callable[[], Started]) -> Started:
        for _ in range(STARTS - 1):
            try:
                with one_at_a_time():
                    return start()
            except AssertionError:
                self.close()
        with one_at_a_time():
            return start()

    def again(self, how: str = "resume") -> None:
        """``resume`` or ``view`` it on another port."""
        for attempt in range(STARTS):
            self.reserve_port()
            before = self._tuners_started()
            try:
                with one_at_a_time():
                    self.nnictl(how, self.id, "--port", str(self.port))
                    self.until_started()
                    if how == "resume":
                        self._until_tuner_started(before)
                return
            except AssertionError:
                if attempt == STARTS - 1:
                    raise
                self.nnictl("stop", self.id)

    def _tuners_started(self) -> int:
        log = self.root / "log" / "dispatcher.log"
        return log.read_text().count("Dispatcher started") if log.exists() else 0

    def _until_tuner_started(self, before: int) -> None:
        """It has trials of before, but NNI gives its tuner ten seconds, also on a busy machine."""

        def started() -> bool:
            assert self.status() != "ERROR", "NNI did not start"
            return self._tuners_started() > before

        self.until(started, "the tuner to start", 40.0)

    def _newest(self) -> str:
        manifest = json.loads((self.folder / "nni-experiments" / ".experiment").read_text())
        return str(max(manifest.values(), key=lambda each: each["startTime"] or 0)["id"])

    @property
    def root(self) -> Path:
        return self.folder / "nni-experiments" / self.id

    def rest(self, path: str, method: str = "GET", **options: Any) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/nni{path}"
        answer = self._client.request(method, url, **options)
        assert answer.status_code < 400, answer.text
        is_json = answer.content and "json" in answer.headers.get("content-type", "")
        return answer.json() if is_json else answer.text

    def status(self) -> str:
        try:
            found = self.rest("/check-status")
        except httpx2.TransportError:
            return "unreachable"
        # While the manager starts, it has a page for every address.
        return str(found["status"]) if isinstance(found, dict) else "unreachable"

    def trials(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.rest("/trial-jobs")
        return sorted(found, key=lambda trial: trial["sequenceId"])

    def states(self) -> list[str]:
        return [trial["status"] for trial in self.trials()]

    def results(self, trial_id: str) -> list[tuple[str, int, Any]]:
        """(type, sequence, value) in the order in which NNI took them."""
        found = self.rest(f"/metric-data/{trial_id}")
        return [(each["type"], each["sequence"], json.loads(json.loads(each["data"]))) for each in found]

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
        until(condition, seconds, lambda: f"{what}\n{self.story()}")

    def until_started(self) -> None:
        """Its tuner has made a trial; raises AssertionError when NNI has given up on the tuner."""

        def started() -> bool:
            assert self.status() != "ERROR", "NNI did not start"
            return self.status() == "VIEWED" or bool(self.trials())

        self.until(started, "the experiment to start", 40.0)

    def until_done(self, seconds: float = 120.0) -> None:
        self.until(lambda: self.status() == "DONE", "the experiment to be done", seconds)

    def manager(self) -> psutil.Process:
        manifest = json.loads((self.folder / "nni-experiments" / ".experiment").read_text())
        return psutil.Process(manifest[self.id]["pid"])

    def driver(self) -> psutil.Process:
        [found] = [each for each in self.manager().children() if "tuner_bridge.nni.experiment_driver" in each.cmdline()]
        return found

    def kill_manager(self) -> None:
        manager = self.manager()
        tuners = [child for child in manager.children() if "tuner_bridge.nni.experiment_driver" not in child.cmdline()]
        assert tuners
        manager.kill()
        manager.wait(timeout=10.0)
        # A tuner that stayed would disturb the manager that comes next.
        _, left = psutil.wait_procs(tuners, timeout=10.0)
        assert not left, "the driver ends the tuner of a manager that was killed"

    @property
    def _said(self) -> Path:
        return self.folder / "foreground.txt"

    def story(self) -> str:
        own = [self._said, self.root / "log" / "elastune.log", self.root / "log" / "nnimanager.log"]
        logs = [*own, *sorted((self.root / "elastune").glob("logs/*/*.log"))]
        return "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs if log.exists())

    def close(self) -> None:
        """End all that it has started. `nnictl stop`, which waits for each of them in turn, is for tests of it."""
        if self._reserved is not None:
            self._reserved.release()
        # Again for those that were started meanwhile.
        while mine := [each for each in psutil.process_iter() if self._started(each)]:
            for process in mine:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(mine, timeout=5.0)

    def _started(self, process: psutil.Process) -> bool:
        try:
            mine = process.environ().get("NNI_CONFIG_DIR") == self.environ["NNI_CONFIG_DIR"]
            return mine and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
