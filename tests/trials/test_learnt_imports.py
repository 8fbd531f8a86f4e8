"""Replicas start with the installed packages in memory that others of their code have turned out to import."""

from __future__ import annotations

import os
import signal
import site
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import until
from tests.trials.test_launchers import request_for, started, wait_for_exit
from trials.inside.imports import forget_shadowed
from trials.launch import LocalLauncher
from trials.launch.fork import client as fork_client
from trials.launch.fork.client import ForkServers, _Server
from trials.record import ReplicaRecord

CODE = """
import os, pathlib, sys, time
def main():
    had = [name for name in ("heavy", "light", "threaded") if name in sys.modules]
    for name in os.environ.get("IMPORTS", "heavy").split(","):
        __import__(name)
    import heavy
    print("had", ",".join(had) or "nothing", heavy.MADE_BY, os.getpid(), flush=True)
    return 7
def waits_and_imports_nothing():
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    return 7
def waits():
    waits_and_imports_nothing()
    return main()
def tells_and_waits():
    import heavy
    from dist_core.hooks import first_step_begins
    first_step_begins()
    return waits()
"""
SAME = {"IMPORTS": "heavy"}


class Learning:
    def __init__(self, folder: Path, installed: Path) -> None:
        self.folder, self.installed = folder, installed
        self.install("heavy", "import os\nMADE_BY = os.getpid()\n")
        (folder / "user_code.py").write_text(CODE)
        self.launcher = LocalLauncher(slots=4)
        assert self.launcher.servers is not None
        self.servers: ForkServers = self.launcher.servers
        self.number = 0

    def install(self, name: str, content: str) -> None:
        (self.installed / f"{name}.py").write_text(content)

    def start(self, function: str = "main", **environ: str) -> ReplicaRecord:
        self.number += 1
        name = f"r{self.number}"
        variables = {**SAME, **environ}
        return started(self.launcher, self.folder, function, variables, name=name)

    def may_start(self) -> bool:
        request = request_for(self.folder, "main", SAME, name="r")
        return self.launcher.is_ready_for(request)

    def run(self, **environ: str) -> str:
        """Return what a replica had in memory from its start."""
        replica = self.start(**environ)
        assert wait_for_exit(self.launcher, replica).status == 7, self.log(replica)
        had, made_by, own = self.log(replica).split("had ")[1].split()
        assert ("heavy" in had) == (made_by != own)
        return had

    def log(self, replica: ReplicaRecord) -> str:
        return (self.folder / f"{replica.replica_id.rpartition('-')[0]}.log").read_text()

    def leaf(self) -> _Server:
        until(lambda: self.may_start() and bool(self.servers.leaves))
        (leaf,) = self.servers.leaves.values()
        until(lambda: not leaf.server.is_on_its_way)
        return leaf.server

    def until_learnt(self) -> None:
        until(self.may_start)


@pytest.fixture
def learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Learning]:
    base = tmp_path / "base"
    monkeypatch.setattr(site, "USER_SITE", None)
    monkeypatch.setattr(site, "USER_BASE", None)
    monkeypatch.setenv("PYTHONUSERBASE", str(base))
    installed = Path(site.getusersitepackages())
    installed.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    for name, value in SAME.items():
        monkeypatch.setenv(name, value)
    # The replicas' own variables beyond these are those of this process.
    monkeypatch.setenv("NAME", "r1")
    made = Learning(tmp_path, installed)
    made.servers._environ = {**made.servers._environ}
    yield made
    (tmp_path / "go").touch()
    made.launcher.close()


@pytest.fixture(autouse=True)
def names_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests give each replica a name in a variable, which a scheduler does not."""
    monkeypatch.setattr(fork_client, "OURS", (*fork_client.OURS, "NAME"))


def test_what_a_replica_has_imported_the_next_one_has_from_its_start(learning: Learning) -> None:
    assert learning.run() == "nothing"
    learning.until_learnt()
    assert learning.run() == "heavy"


def test_it_is_learnt_at_the_first_step_and_the_next_waits_for_the_import(learning: Learning) -> None:
    learning.install("heavy", "import os, time\nMADE_BY = os.getpid()\ntime.sleep(1.0)\n")
    first = learning.start("tells_and_waits")
    until(lambda: bool(learning.servers.asked) and not learning.may_start())
    assert psutil.Process(first.pid).is_running()
    learning.until_learnt()
    assert learning.run() == "heavy"
    (learning.folder / "go").touch()
    assert wait_for_exit(learning.launcher, first).status == 7


def test_no_more_import_by_themselves_than_there_are_cores(learning: Learning, monkeypatch: pytest.MonkeyPatch) -> None:
    learning.servers.cores = 2
    monkeypatch.setattr(fork_client, "FIRST_SECONDS", 60.0)
    learning.until_learnt()
    first = learning.start("waits")
    assert learning.may_start()
    second = learning.start("waits")
    assert not learning.may_start()
    monkeypatch.setattr(fork_client, "FIRST_SECONDS", 0.0)
    assert learning.may_start()  # Nobody waits for ever.
    (learning.folder / "go").touch()
    assert {wait_for_exit(learning.launcher, each).status for each in (first, second)} == {7}
    learning.until_learnt()
    assert learning.run() == "heavy"


def test_a_package_that_starts_a_thread_is_imported_by_each(
    learning: Learning, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning.install(
        "threaded", "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    monkeypatch.setitem(learning.servers._environ, "IMPORTS", "threaded,heavy")
    both = {"IMPORTS": "threaded,heavy"}
    assert learning.run(**both) == "nothing"
    request = request_for(learning.folder, "main", both, name="r")
    until(lambda: learning.launcher.is_ready_for(request))
    assert learning.run(**both) == "heavy"
    assert learning.servers.unshareable >= {"threaded"}


@pytest.mark.parametrize(
    "looks", ['os.environ.get("CACHE_FOLDER")', '[v for n, v in os.environ.items() if n.startswith("CACHE_")]']
)
def test_a_replica_with_another_value_of_what_a_package_names_imports_by_itself(learning: Learning, looks: str) -> None:
    learning.install("heavy", f"import os\nMADE_BY = os.getpid()\nFOLDER = {looks}\n")
    assert learning.run() == "nothing"
    learning.leaf()
    assert learning.run(CACHE_FOLDER="elsewhere") == "nothing"
    assert learning.run(CACHE_FOLDER="elsewhere") == "nothing"
    assert learning.run() == "heavy"
    assert learning.run(EPOCHS="3", FOLDER_CACHE="here") == "heavy"
    assert learning.run(ELASTUNE_TRIAL_ID="t", CUDA_VISIBLE_DEVICES="3") == "heavy"


def test_one_with_another_value_of_what_torch_reads_starts_cold(learning: Learning) -> None:
    replica = learning.start("waits_and_imports_nothing", TORCH_LOGS="+dynamo")
    assert psutil.Process(replica.pid).ppid() == os.getpid()
    (learning.folder / "go").touch()
    assert wait_for_exit(learning.launcher, replica).status == 7


def test_a_module_beside_the_code_goes_before_an_installed_one(learning: Learning) -> None:
    assert learning.run() == "nothing"
    learning.leaf()
    (learning.folder / "heavy.py").write_text("import os\nMADE_BY = os.getpid()\nOWN = True\n")
    code = CODE.replace("import heavy\n    print", "import heavy\n    assert heavy.OWN\n    print")
    (learning.folder / "user_code.py").write_text(code)
    replica = learning.start()
    assert wait_for_exit(learning.launcher, replica).status == 7, learning.log(replica)
    assert learning.log(replica).split()[2] == learning.log(replica).split()[3]


def test_code_that_was_changed_is_what_runs(learning: Learning) -> None:
    assert learning.run() == "nothing"
    learning.leaf()
    (learning.folder / "user_code.py").write_text(CODE.replace("return 7", "return 17"))
    replica = learning.start()
    assert wait_for_exit(learning.launcher, replica).status == 17
    assert "had heavy" in learning.log(replica)


def test_a_process_that_was_killed_is_replaced(learning: Learning) -> None:
    assert learning.run() == "nothing"
    lost = learning.leaf()
    assert lost.pid is not None
    os.kill(lost.pid, signal.SIGKILL)
    until(lambda: lost.gone)
    assert learning.run() in ("nothing", "heavy")
    learning.until_learnt()
    assert learning.run() == "heavy"
    assert learning.leaf().pid != lost.pid


def test_an_installed_package_that_changes_is_loaded_again(learning: Learning) -> None:
    assert learning.run() == "nothing"
    learning.leaf()
    learning.install("heavy", "import os\nMADE_BY = os.getpid()\nCHANGED = 1\n")
    code = CODE.replace("import heavy\n    print", "import heavy\n    assert heavy.CHANGED\n    print")
    (learning.folder / "user_code.py").write_text(code)
    replica = learning.start()
    assert wait_for_exit(learning.launcher, replica).status == 7, learning.log(replica)


def test_a_package_before_whose_import_code_sets_a_variable_is_imported_by_each(learning: Learning) -> None:
    learning.install("heavy", "import os\nMADE_BY = os.getpid()\nMODE = os.environ.get('HEAVY_MODE', 'none')\n")
    learning.install("light", "import os\nos.environ.setdefault('LIGHT_SET', '1')\n")
    sets = "import os, pathlib, sys, time\nos.environ['HEAVY_MODE'] = 'mine'\n"
    code = CODE.replace("import os, pathlib, sys, time\n", sets).replace(
        "import heavy\n    print", "import heavy, light\n    assert heavy.MODE == 'mine', heavy.MODE\n    print"
    )
    (learning.folder / "user_code.py").write_text(code)
    assert learning.run() == "nothing"
    learning.until_learnt()
    assert learning.run() == "light"
    assert "heavy" in learning.servers.unshareable and "light" not in learning.servers.unshareable


def test_packages_that_lie_in_a_folder_of_the_path_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment's packages may be reached from another one's, where nobody knows them for installed."""
    monkeypatch.setattr("trials.inside.imports.installed_folders", lambda: ("/nowhere/",))
    import torch

    folder = str(Path(torch.__file__).parents[1])
    before = [name for name in sys.modules if name.partition(".")[0] == "torch"]
    forget_shadowed([folder])
    assert [name for name in sys.modules if name.partition(".")[0] == "torch"] == before
