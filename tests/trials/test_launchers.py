"""The contract of every launcher, with real processes where there are any."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.agents import AgentInThread, until_there
from tests.support.waiting import until
from trials.agents.launcher import AgentLauncher
from trials.agents.roster import Roster
from trials.errors import LaunchFailed
from trials.inside.cgroups import Cgroups
from trials.launch import InMemoryLauncher, Launcher, LaunchRequest, LocalLauncher, local
from trials.launch.base import Exit, ReplicaProcess
from trials.launch.fork import client as fork_client
from trials.launch.gpus import Gpu, NoGpus
from trials.launch.slots import Slot, divide
from trials.record import ReplicaRecord

needs_groups = pytest.mark.skipif(Cgroups.find() is None, reason="this machine lets nobody make control groups")

SCRIPT = """
import os, signal, sys, time
def returns_seven():
    print("hello from", os.environ["NAME"], flush=True)
    return 7
def raises():
    raise ValueError("on purpose")
def exits():
    raise SystemExit(5)
def leaves_a_stray():
    if os.fork() == 0:
        os.setsid()
        print("stray", os.getpid(), flush=True)
        time.sleep(600)
    time.sleep(0.5)
def eats():
    eaten = bytearray(1024 * 2**20)
    for place in range(0, len(eaten), 4096):
        eaten[place] = 1
def tells_cores():
    return len(os.sched_getaffinity(0))
def computes():
    until = time.monotonic() + 600
    while time.monotonic() < until:
        pass
def sleeps():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.fork()
    # A signal that comes just before a sleep is handled behind it.
    for _ in range(6000):
        time.sleep(0.1)
"""


def started(
    launcher: Launcher,
    folder: Path,
    function: str,
    environ: Mapping[str, str] | None = None,
    **options: Any,
) -> ReplicaRecord:
    """A replica that runs a function of the folder's user_code.py, with options of ``request_for``."""
    request = request_for(folder, function, environ, **options)
    return record_of(request, until_started(launcher, request, launcher.launch(request)))


def until_started(launcher: Launcher, request: LaunchRequest, process: ReplicaProcess | None) -> ReplicaProcess:
    return process or until(lambda: launcher.started(request.replica_id), 60.0, "it has been started")


def record_of(request: LaunchRequest, process: ReplicaProcess) -> ReplicaRecord:
    return ReplicaRecord(
        replica_id=request.replica_id,
        trial_id="t",
        node="n",
        slot=0,
        launch_index=0,
        pid=process.pid,
        process_started=process.started,
    )


def request_for(
    folder: Path,
    function: str,
    environ: Mapping[str, str] | None = None,
    *,
    name: str = "r",
    log: Path | None = None,
    code: tuple[str, ...] = (),
    preload: tuple[str, ...] = (),
) -> LaunchRequest:
    return LaunchRequest(
        # Control groups are named after replicas, and other tests run on this machine at the same time.
        replica_id=f"{name}-{uuid.uuid4().hex[:8]}",
        trial_id="t",
        node="n",
        slot=0,
        entrypoint=f"user_code:{function}",
        environ={"NAME": name, "PATH": os.environ["PATH"], **(environ or {})},
        working_dir=str(folder),
        python_path=(str(folder),),
        preload=preload,
        code=code,
        log=log or folder / f"{name}.log",
    )


@pytest.fixture(params=["cold", "fork server", "agent"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    made = LocalLauncher(slots=2, node="n", fork_server=request.param != "cold")
    if request.param != "agent":
        yield made
        made.close()
        return
    roster = Roster()
    agent = AgentInThread(roster, "n", made)
    until_there(roster)
    yield AgentLauncher(roster)
    agent.end()


@pytest.fixture
def launch(launcher: Launcher, tmp_path: Path) -> Iterator[Callable[[str], ReplicaRecord]]:
    (tmp_path / "user_code.py").write_text(SCRIPT)
    replicas: list[ReplicaRecord] = []

    def start(function: str) -> ReplicaRecord:
        name = f"r{len(replicas)}"
        replicas.append(started(launcher, tmp_path, function, name=name, log=tmp_path / "logs" / f"{name}.log"))
        return replicas[-1]

    yield start
    for replica in replicas:
        launcher.stop(replica, force=True)


def wait_for_exit(launcher: Launcher, replica: ReplicaRecord, seconds: float = 20.0) -> Exit:
    return until(lambda: launcher.exits([replica]), seconds, f"{replica.replica_id} ends")[0]


@pytest.mark.parametrize(("function", "status"), [("returns_seven", 7), ("raises", 1), ("exits", 5)])
def test_the_end_of_a_replica_is_its_status_and_its_words_are_in_the_log(
    launcher: Launcher, launch: Callable[[str], ReplicaRecord], tmp_path: Path, function: str, status: int
) -> None:
    replica = launch(function)
    assert wait_for_exit(launcher, replica).status == status
    log = (tmp_path / "logs" / "r0.log").read_text()
    if function == "returns_seven":
        assert "hello from r0" in log
    if function == "raises":
        assert "ValueError: on purpose" in log


def test_a_process_that_computes_is_known_by_its_cpu_time(
    launcher: Launcher, launch: Callable[[str], ReplicaRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher itself says so, or its agent's last question for orders."""
    monkeypatch.setattr("trials.agents.line.WAIT_SECONDS", 0.2)
    busy, idle = launch("computes"), launch("sleeps")
    until(lambda: (launcher.cpu_seconds(busy) or 0.0) >= 0.4, 60.0, "somebody says that it computes")
    known = launcher.cpu_seconds(idle)
    assert known is not None
    assert known < 0.4
    launcher.stop(busy, force=True)
    wait_for_exit(launcher, busy)
    assert launcher.cpu_seconds(record_of_nobody(busy)) is None


def record_of_nobody(replica: ReplicaRecord) -> ReplicaRecord:
    return replace(replica, replica_id="nobody", pid=2**22 + 1)


def test_a_polite_stop_lets_the_replica_end_itself(launcher: Launcher, launch: Callable[[str], ReplicaRecord]) -> None:
    replica = launch("sleeps")
    assert replica.pid is not None
    child = wait_until_it_has_a_child(replica.pid)
    launcher.stop(replica, force=False)
    assert wait_for_exit(launcher, replica).status == 143
    child.wait(timeout=10.0)
    assert not child.is_running()
    launcher.stop(replica, force=False)


def test_a_forced_stop_takes_the_children_along(launcher: Launcher, launch: Callable[[str], ReplicaRecord]) -> None:
    replica = launch("sleeps")
    assert replica.pid is not None
    child = wait_until_it_has_a_child(replica.pid)
    launcher.stop(replica, force=True)
    assert wait_for_exit(launcher, replica).status == -9
    child.wait(timeout=10.0)
    assert not child.is_running()


def wait_until_it_has_a_child(pid: int) -> psutil.Process:
    return until(lambda: psutil.Process(pid).children(), 20.0, "a child appears")[0]


@needs_groups
def test_a_process_that_left_the_session_ends_with_its_replica(
    launcher: Launcher, launch: Callable[[str], ReplicaRecord], tmp_path: Path
) -> None:
    replica = launch("leaves_a_stray")
    assert wait_for_exit(launcher, replica).status == 0
    pid = int((tmp_path / "logs" / "r0.log").read_text().split()[-1])
    groups = Cgroups.find()
    assert groups is not None
    path = groups.unified
    until(lambda: not launcher.exits([]) and not list(path.glob(f"elastune-{replica.pid}")), 10.0)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@needs_groups
def test_groups_that_nobody_took_away_are_gone_with_the_next_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Cgroups.find()
    assert found is not None
    # In a group of this test's own: others run replicas here whose groups have just been made.
    groups = Cgroups(found.unified / f"test-{uuid.uuid4().hex[:8]}", None)
    groups.unified.mkdir()
    forgotten = groups.unified / "elastune-4194305"
    forgotten.mkdir()
    groups._remove_forgotten()
    assert forgotten.exists()
    monkeypatch.setattr("trials.inside.cgroups.FORGOTTEN_SECONDS", -1.0)
    groups._remove_forgotten()
    assert not forgotten.exists()
    groups.unified.rmdir()


@needs_groups
@pytest.mark.parametrize("fork_server", [False, True])
def test_a_replica_that_takes_more_memory_than_its_slot_has_says_so(tmp_path: Path, fork_server: bool) -> None:
    groups = Cgroups.find()
    if groups is None or groups.memory is None:
        pytest.skip("this machine lets nobody limit memory")
    launcher = LocalLauncher(slots=1, memory_bytes=512 * 2**20, fork_server=fork_server)
    (tmp_path / "user_code.py").write_text(SCRIPT)
    replica = started(launcher, tmp_path, "eats")
    gone = wait_for_exit(launcher, replica)
    assert (gone.status, gone.why) == (-9, "it ran out of memory (limit: 0.5 GiB per slot)")
    launcher.close()


@pytest.mark.parametrize("fork_server", [False, True])
def test_a_replica_runs_on_the_cores_of_its_slot(tmp_path: Path, fork_server: bool) -> None:
    core = min(os.sched_getaffinity(0))
    launcher = LocalLauncher(slots=[Slot(node="n", cores=(core,))], fork_server=fork_server)
    (tmp_path / "user_code.py").write_text(SCRIPT)
    replica = started(launcher, tmp_path, "tells_cores", launcher.slot_environ("n", 0))
    assert wait_for_exit(launcher, replica).status == 1
    launcher.close()


def test_a_gpu_that_a_stranger_works_on_is_closed_until_he_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trials.launch.local.STRANGERS_SECONDS", 0.0)
    gpus = NoGpus([Gpu(uuid=f"GPU-{number}", model="H100") for number in range(3)])
    launcher = LocalLauncher(slots=divide("n", gpus.gpus(), range(3), per_gpu=2), gpus=gpus, fork_server=False)
    stranger = psutil.Popen(["sleep", "60"], start_new_session=True)
    mine = psutil.Popen(["sleep", "60"], start_new_session=True)
    row = ReplicaRecord(replica_id="r", trial_id="t", node="n", slot=0, launch_index=0, pid=mine.pid)
    launcher.exits([row])
    gpus.in_use = {
        "GPU-0": frozenset({mine.pid}),
        "GPU-1": frozenset({stranger.pid}),
        "GPU-2": frozenset({os.getppid()}),
    }
    assert [node.in_use for node in launcher.nodes()] == [frozenset({2, 3})]
    for process in (stranger, mine):
        process.kill()
        process.wait()
    assert [node.in_use for node in launcher.nodes()] == [frozenset()]
    launcher.close()


def test_a_process_that_is_not_ours_any_more_is_seen_to_be_gone(launcher: Launcher) -> None:
    stranger = ReplicaRecord(
        replica_id="r", trial_id="t", node="n", slot=0, launch_index=0, pid=os.getpid(), process_started=1.0
    )
    (gone,) = launcher.exits([stranger])
    assert (gone.replica_id, gone.status) == ("r", None)


def test_a_fork_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    launcher = LocalLauncher(slots=1)
    (tmp_path / "user_code.py").write_text(SCRIPT)

    def run(name: str) -> int | None:
        return wait_for_exit(launcher, started(launcher, tmp_path, "returns_seven", name=name)).status

    assert run("before") == 7
    assert launcher.servers is not None
    launcher.servers.kill()
    trunk = launcher.servers.trunk
    until(lambda: trunk.gone, 5.0)
    assert run("after") == 7
    assert "hello from after" in (tmp_path / "after.log").read_text()
    launcher.close()


@pytest.mark.slow
def test_a_fork_server_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "FORK_SECONDS", 3.0)
    monkeypatch.setattr(local, "PATIENCE_SECONDS", 0.5)
    launcher = LocalLauncher(slots=2)
    (tmp_path / "user_code.py").write_text(SCRIPT)
    assert wait_for_exit(launcher, started(launcher, tmp_path, "returns_seven", name="before")).status == 7
    assert launcher.servers is not None
    server = launcher.servers.trunk.pid
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    hanging = request_for(tmp_path, "returns_seven", name="hanging")
    assert launcher.launch(hanging) is None
    # Others wait a moment for their turn, in case it is only slow.
    other = request_for(tmp_path, "returns_seven", name="other")
    assert not launcher.is_ready_for(other)
    until(lambda: launcher.is_ready_for(other))
    assert launcher.started(hanging.replica_id) is None
    gone_past = launcher.launch(other)
    assert gone_past is not None
    assert wait_for_exit(launcher, record_of(other, gone_past)).status == 7
    late = until_started(launcher, hanging, None)
    assert wait_for_exit(launcher, record_of(hanging, late)).status == 7
    assert wait_for_exit(launcher, started(launcher, tmp_path, "returns_seven", name="after")).status == 7
    launcher.close()


@pytest.mark.slow
def test_nothing_starts_while_the_launcher_closes(tmp_path: Path) -> None:
    """Ending the fork server ends the wait for it, and what waited would start cold."""
    launcher = LocalLauncher(slots=1)
    (tmp_path / "user_code.py").write_text(SCRIPT)
    assert wait_for_exit(launcher, started(launcher, tmp_path, "returns_seven", name="before")).status == 7
    assert launcher.servers is not None and launcher.servers.trunk.pid is not None
    os.kill(launcher.servers.trunk.pid, signal.SIGSTOP)
    hanging = request_for(tmp_path, "returns_seven", name="hanging")
    assert launcher.launch(hanging) is None
    launcher.close()
    with pytest.raises(LaunchFailed, match="the scheduler is shutting down"):
        until_started(launcher, hanging, None)
    assert not hanging.log.exists()


def test_a_changed_module_is_loaded_again_and_earlier_replicas_stay_children(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 3\n")
    (tmp_path / "user_code.py").write_text(
        "import sys, time\n"
        "def tells():\n    import helper\n    time.sleep(0.5)  # its parent is looked at\n    return helper.VALUE\n"
        "def ends_later():\n    time.sleep(3.0)\n    return 9\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        launcher = LocalLauncher(slots=1, preload=["helper"])
    assert launcher.servers is not None
    fork_server = launcher.servers.pid

    def start(name: str, function: str) -> ReplicaRecord:
        replica = started(launcher, tmp_path, function, name=name)
        assert psutil.Process(replica.pid).ppid() == fork_server
        return replica

    outlives = start("outlives", "ends_later")
    assert wait_for_exit(launcher, start("before", "tells")).status == 3
    (tmp_path / "helper.py").write_text("VALUE = 40 + 2\n")
    assert wait_for_exit(launcher, start("after", "tells")).status == 42
    assert wait_for_exit(launcher, outlives).status == 9
    launcher.close()


def test_the_in_memory_launcher_ends_replicas_when_told(tmp_path: Path) -> None:
    launcher = InMemoryLauncher({"n": 2})
    record = started(launcher, tmp_path, "anything")
    assert launcher.exits([record]) == []
    launcher.stop(record, force=True)
    assert launcher.exits([record]) == [Exit(record.replica_id, -9)]
