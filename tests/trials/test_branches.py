"""Replicas forked from a process that has the user's code in memory, and codes that must not be shared so."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.trials.test_launchers import request_for, started, wait_for_exit
from trials.launch import LocalLauncher
from trials.launch.fork import client as fork_client
from trials.launch.fork.client import ForkServers
from trials.record import ReplicaRecord

PREAMBLE = "import os\nIMPORTED_BY = os.getpid()\n"
MAIN = "def main():\n    print('imported by', IMPORTED_BY, 'runs in', os.getpid(), flush=True)\n    return 7\n"


class Branches:
    """Starts replicas of one user's code and tells where it was imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launcher = LocalLauncher(slots=4)
        assert self.launcher._servers is not None
        self.servers: ForkServers = self.launcher._servers
        self.replicas: list[ReplicaRecord] = []

    def write(self, at_import: str, main: str = MAIN) -> None:
        (self.folder / "user_code.py").write_text(PREAMBLE + at_import + "\n" + main)

    def start(self, function: str = "main", preload: tuple[str, ...] = (), **environ: str) -> ReplicaRecord:
        name = f"r{len(self.replicas)}"
        replica = started(
            self.launcher,
            self.folder,
            function,
            {"NAME": name, **environ},
            name=name,
            user_code=("user_code",),
            preload=preload,
        )
        self.replicas.append(replica)
        return replica

    def run(self, preload: tuple[str, ...] = (), **environ: str) -> bool:
        """Run a replica to its end; True when it had the code in memory from its start."""
        replica = self.start(preload=preload, **environ)
        assert wait_for_exit(self.launcher, replica).status == 7, self.log(replica)
        words = self.log(replica).split("imported by ")[1].split()
        assert words[3] == str(replica.pid)
        return words[0] != words[3]

    def log(self, replica: ReplicaRecord) -> str:
        return (self.folder / f"{replica.replica_id.rpartition('-')[0]}.log").read_text()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.01)

    def until_settled(self) -> None:
        """The branch of the only code there is can serve, or never will."""
        self.until(lambda: all(each.ready or each.gone for each in self.servers._branches.values()), "no branch")

    def branch(self) -> psutil.Process:
        (branch,) = self.servers._branches.values()
        assert branch._pid is not None
        return psutil.Process(branch._pid)


@contextmanager
def opened(folder: Path) -> Iterator[Branches]:
    made = Branches(folder)
    yield made
    for replica in made.replicas:
        made.launcher.stop(replica, force=True)
    made.launcher.close()


@pytest.fixture
def branches(tmp_path: Path) -> Iterator[Branches]:
    with opened(tmp_path) as made:
        yield made


def test_after_the_first_replica_the_code_is_in_memory_and_what_it_prints_is_in_each_log(branches: Branches) -> None:
    branches.write("print('hello while imported')\nos.system('echo hello from a child')")
    assert not branches.run()
    branches.until_settled()
    assert branches.run()
    assert branches.run()
    for replica in branches.replicas:
        assert branches.log(replica).count("hello while imported\n") == 1
        assert branches.log(replica).count("hello from a child\n") == 1


def test_while_the_code_is_being_imported_the_launcher_is_not_ready_for_further_replicas(branches: Branches) -> None:
    news = []
    branches.launcher.on_change = lambda: news.append(branches.launcher.is_ready_for(request))
    branches.write("import time; time.sleep(0.5)")
    request = request_for(branches.folder, "main", {"NAME": "r1"}, user_code=("user_code",))
    other = request_for(branches.folder, "main", {"NAME": "r1"}, user_code=("other_code",))
    branches.until(lambda: branches.launcher.is_ready_for(request), "no fork server")
    branches.start()
    news.clear()
    assert not branches.launcher.is_ready_for(request)
    assert branches.launcher.is_ready_for(other)
    branches.until(lambda: news[-1:] == [True], "not told of it")
    assert branches.run()


def test_nobody_waits_for_an_import_for_ever(branches: Branches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "PREPARE_SECONDS", 0.3)
    branches.write("import time; time.sleep(5.0)")
    request = request_for(branches.folder, "main", user_code=("user_code",))
    branches.until(lambda: branches.launcher.is_ready_for(request), "no fork server")
    branches.start()
    assert not branches.launcher.is_ready_for(request)
    branches.until(lambda: branches.launcher.is_ready_for(request), "waits for ever")


def test_a_script_is_run_under_the_name_that_spares_its_main_part(branches: Branches) -> None:
    script = branches.folder / "sweep.py"
    script.write_text(f"{PREAMBLE}{MAIN}if __name__ == '__main__':\n    raise SystemExit('ran as a script')\n")
    branches.write(f"from trials.inside.user_code import load\nload({str(script)!r})\n", "from __main__ import main\n")
    assert not branches.run()
    branches.until_settled()
    assert branches.run()


@pytest.mark.parametrize(
    ("at_import", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "threads"),
        ("import subprocess\nCHILD = subprocess.Popen(['sleep', '3'])", "processes"),
        ("FILE = open(__file__)", "opens"),
        ("import random\nrandom.seed(3)", "random numbers"),
        ("import numpy\nNOISE = numpy.random.rand(4)", "random numbers"),
        ("if not os.environ['ELASTUNE_API']: raise KeyError('no identity')", "could not be imported"),
        ("if not os.environ['ELASTUNE_API']: raise SystemExit(3)", "could not be imported"),
        ("if not os.environ['ELASTUNE_API']: os._exit(3)", "ended"),
        ("import numpy\nGENERATOR = numpy.random.default_rng()", "random numbers"),
        ("import uuid\nNAME = uuid.uuid4()", "random numbers"),
        ("import tempfile\nFOLDER = tempfile.mkdtemp()", "temporary"),
        ("import multiprocessing\nLOCK = multiprocessing.Lock()", "share"),
        ("import mmap\nSHARED = mmap.mmap(-1, 4096)", "share"),
        ("os.environ['SOME_LIBRARY'] = 'quiet'", "changes variables"),
        ("os.chdir('/')", "changes variables"),
        ("import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)", "changes variables"),
    ],
)
def test_code_that_cannot_be_shared_is_imported_by_each_replica(
    branches: Branches, caplog: pytest.LogCaptureFixture, at_import: str, why: str
) -> None:
    branches.write(at_import)
    with caplog.at_level("INFO"):
        for _ in range(3):
            assert not branches.run(ELASTUNE_API="http://127.0.0.1:1")
            branches.until_settled()
    (said,) = [each.message for each in caplog.records if "themselves" in each.message]
    assert why in said
    assert not branches.servers._branches


ARROW = """
import pyarrow.compute
TABLE = pyarrow.table({"number": list(range(100_000))})
"""
SUMS = "def main():\n    assert pyarrow.compute.sum(TABLE['number']).as_py() == 4_999_950_000\n    return shown()\n"


def test_arrow_is_shared_which_starts_a_thread_by_itself(branches: Branches) -> None:
    """And with it what trainers of Hugging Face's import."""
    pytest.importorskip("pyarrow")
    branches.write(ARROW, MAIN.replace("main", "shown") + SUMS)
    assert not branches.run()
    branches.until_settled()
    assert branches.run()


LIBRARY = "HOME = os.environ.get('LIBRARY_HOME', 'home')\n"
USES = """
def main():
    print('imported by', library.IMPORTED_BY, 'runs in', os.getpid(), library.HOME, flush=True)
    return 7
"""


def test_a_library_that_has_read_another_value_is_imported_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stands in memory for everybody, and keeps its files where a variable says."""
    (tmp_path / "library.py").write_text(PREAMBLE + LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with opened(tmp_path) as branches:
        branches.write("import library", USES)

        def run(**environ: str) -> tuple[bool, str]:
            was_there = branches.run(preload=("library",), **environ)
            return was_there, branches.log(branches.replicas[-1]).split()[-1]

        assert run() == (True, "home")
        assert run(LIBRARY_HOME="elsewhere") == (False, "elsewhere")
        branches.until_settled()
        assert run() == (True, "home")
        assert run(LIBRARY_HOME="further") == (False, "further")


SETTINGS = "HOME = dict(item for item in os.environ.items() if item[0].startswith('LIBRARY_'))\n"


def test_a_library_that_has_gone_through_all_variables_is_shared_where_others_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a shell differ wherever a sweep was started from another one than the scheduler."""
    (tmp_path / "library.py").write_text(PREAMBLE + SETTINGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SHLVL", "1")
    monkeypatch.setenv("LIBRARY_HOME", "here")
    with opened(tmp_path) as branches:
        branches.write("import library", USES)
        assert branches.run(preload=("library",), SHLVL="2", LIBRARY_HOME="here")
        assert not branches.run(preload=("library",), SHLVL="2", LIBRARY_HOME="elsewhere")


def test_code_that_reads_a_variable_is_shared_by_replicas_that_agree_on_it(branches: Branches) -> None:
    branches.write("READ = os.environ.get('FLAVOUR')")
    assert not branches.run(FLAVOUR="sweet")
    branches.until_settled()
    assert branches.run(FLAVOUR="sweet", OTHER="x")
    assert not branches.run(FLAVOUR="sour")
    assert not branches.run()
    assert branches.run(FLAVOUR="sweet")


def test_code_that_asks_which_replica_it_is_in_is_imported_by_each(branches: Branches) -> None:
    branches.write("ME = os.getenv('ELASTUNE_REPLICA_ID')")
    for name in ("a", "b", "c"):
        assert not branches.run(ELASTUNE_REPLICA_ID=name)
        branches.until_settled()


def test_changed_code_is_loaded_again_and_earlier_replicas_still_tell_their_end(branches: Branches) -> None:
    branches.write("import time\ndef late():\n    time.sleep(2.0)\n    return 9")
    branches.run()
    branches.until_settled()
    before = branches.branch()
    outlives = branches.start("late")
    assert psutil.Process(outlives.pid).ppid() == before.pid
    branches.write("print('second edition')")
    assert not branches.run()
    assert "second edition" in branches.log(branches.replicas[-1])
    branches.until_settled()
    assert branches.run()
    assert branches.branch().pid != before.pid
    assert wait_for_exit(branches.launcher, outlives).status == 9
    before.wait(timeout=10.0)


def test_data_that_the_code_read_is_read_again_when_it_changes(branches: Branches) -> None:
    (branches.folder / "config.txt").write_text("first")
    branches.write(
        "CONFIG = open('config.txt').read()", MAIN.replace("    return 7", "    print(CONFIG)\n    return 7")
    )
    branches.run()
    branches.until_settled()
    assert branches.run()
    (branches.folder / "config.txt").write_text("second one")
    assert not branches.run()
    assert "second one" in branches.log(branches.replicas[-1])


def test_what_the_code_sees_of_its_process_is_what_each_replica_would_see(branches: Branches) -> None:
    branches.write("import sys\nSEEN = (sys.argv, os.getcwd())", MAIN.replace("return 7", "print(SEEN)\n    return 7"))
    for _ in range(3):
        branches.run()
        branches.until_settled()
    assert branches.run()
    assert len({branches.log(replica).splitlines()[-1] for replica in branches.replicas}) == 1


def test_a_process_that_the_import_left_behind_holds_up_nothing(
    branches: Branches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trials.launch.fork.client.FORK_SECONDS", 16.0)
    branches.write("os.system('sleep 20 > /dev/null 2>&1 &')")
    branches.run()
    branches.until_settled()
    branches.branch().send_signal(signal.SIGKILL)
    branches.until(lambda: all(each.gone for each in branches.servers._branches.values()), "its end is not seen")
    before = time.monotonic()
    branches.run()
    assert time.monotonic() - before < 8.0


def test_a_killed_branch_is_replaced(branches: Branches) -> None:
    branches.write("")
    branches.run()
    branches.until_settled()
    branches.branch().send_signal(signal.SIGKILL)
    branches.until_settled()
    assert not branches.run()
    branches.until_settled()
    assert branches.run()


def test_only_so_many_codes_stay_in_memory(branches: Branches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trials.launch.fork.client.MOST_BRANCHES", 1)
    branches.write("")
    branches.run()
    branches.until_settled()
    first = branches.branch()
    branches.folder = branches.folder / "other"
    branches.folder.mkdir()
    branches.write("")
    branches.run()
    first.wait(timeout=10.0)
    branches.until_settled()
    assert branches.run()


def test_an_import_that_hangs_delays_nobody_and_ends_with_the_launcher(branches: Branches) -> None:
    branches.write("import time\nif not os.environ['ELASTUNE_API']: time.sleep(600)")
    before = time.monotonic()
    for _ in range(3):
        assert not branches.run(ELASTUNE_API="http://127.0.0.1:1")
    assert time.monotonic() - before < 10.0
    # The one that imports, and perhaps a spare.
    children = psutil.Process(branches.servers.pid).children()
    assert 1 <= len(children) <= 2
    branches.launcher.close()
    for child in children:
        child.wait(timeout=10.0)
