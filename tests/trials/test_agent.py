"""An agent and its scheduler, over a line that may be cut."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.agents import AgentInThread, until_there
from tests.support.waiting import until
from tests.trials.test_launchers import SCRIPT, record_of, request_for, started, until_started, wait_for_exit
from trials.agents.launcher import AgentLauncher
from trials.agents.node_files import NodeFiles
from trials.agents.own_slots import address_of, address_towards, emulating, of_one_kind, own_slots
from trials.agents.roster import Roster
from trials.agents.start import own_job, replica_environ
from trials.agents.words import Orders
from trials.errors import LaunchFailed
from trials.launch.gpus import Gpu
from trials.launch.local import LocalLauncher


@pytest.fixture
def roster() -> Roster:
    return Roster()


@pytest.fixture
def agent(roster: Roster, tmp_path: Path) -> Iterator[AgentInThread]:
    (tmp_path / "user_code.py").write_text(SCRIPT)
    made = AgentInThread(roster, "n", LocalLauncher(slots=2, node="n", fork_server=False), {"FOUND": "here"})
    until_there(roster)
    yield made
    made.end()


def test_an_agent_without_shared_files_does_not_wait_for_ever_for_a_scheduler_that_is_gone(
    roster: Roster, tmp_path: Path
) -> None:
    """What its replicas have printed and saved can go nowhere."""
    (tmp_path / "user_code.py").write_text(
        "import os, signal, time\n"
        "def says():\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (print('last words', flush=True), os._exit(0)))\n"
        "    open('ready', 'w').close()\n"
        "    time.sleep(60)\n"
    )
    files = NodeFiles(lambda *_: None, tmp_path)
    agent = AgentInThread(roster, "n", LocalLauncher(slots=1, node="n", fork_server=False), files=files)
    agent.agent._leave_seconds = 0.5
    until_there(roster)
    started(AgentLauncher(roster), tmp_path, "says")
    until((tmp_path / "ready").exists)
    agent.line.is_cut = True
    agent.end()
    assert not agent.thread.is_alive()
    assert not files.folder.exists()


def test_a_replica_that_ends_while_the_line_is_cut_is_told_of_afterwards(
    agent: AgentInThread, roster: Roster, tmp_path: Path
) -> None:
    launcher = AgentLauncher(roster)
    row = started(launcher, tmp_path, "sleeps")
    agent.line.is_cut = True
    agent.launcher.stop(row, force=True)
    time.sleep(0.2)
    assert launcher.exits([row]) == []
    agent.line.is_cut = False
    assert wait_for_exit(launcher, row).status == -9


def test_another_scheduler_finds_the_replicas_of_the_one_before(
    agent: AgentInThread, roster: Roster, tmp_path: Path
) -> None:
    launcher = AgentLauncher(roster)
    row = started(launcher, tmp_path, "sleeps")
    second = Roster()
    adopting = AgentLauncher(second)
    second.expect([row])
    agent.line._roster = second
    until_there(second)
    assert adopting.exits([row]) == []
    adopting.stop(row, force=True)
    assert wait_for_exit(adopting, row).status == -9


def test_on_a_node_that_shares_no_files_code_comes_packed_and_logs_go_back(roster: Roster, tmp_path: Path) -> None:
    arrived: dict[str, bytes] = {}
    fetched: list[str] = []

    def fetch(environ: Mapping[str, str], digest: str, folder: Path) -> None:
        fetched.append(digest)
        if digest == "b" * 64:
            raise OSError("its digest is wrong")
        time.sleep(0.2)
        folder.mkdir(parents=True)
        (folder / "user_code.py").write_text(
            "import os, pathlib\n"
            "def tells():\n"
            "    pathlib.Path(os.environ['ELASTUNE_CHECKPOINT_DIR']).mkdir(parents=True)\n"
            "    print(os.getcwd(), os.environ['ELASTUNE_CHECKPOINT_DIR'], 'ELASTUNE_SERVER_FILE' in os.environ)\n"
        )

    files = NodeFiles(fetch, tmp_path)
    launcher = LocalLauncher(slots=2, node="n", fork_server=False)
    agent = AgentInThread(roster, "n", launcher, files=files)

    def send(replica_id: str, at: int, part: bytes) -> int:
        assert at == len(arrived.get(replica_id, b""))
        arrived[replica_id] = arrived.get(replica_id, b"") + part
        return len(arrived[replica_id])

    agent.agent._logs._send = send  # type: ignore[union-attr]
    until_there(roster)
    remote = AgentLauncher(roster)
    environ = {"ELASTUNE_CHECKPOINT_DIR": "/of/the/scheduler", "ELASTUNE_SERVER_FILE": "/x"}
    folder = Path("/nowhere/else")
    try:
        for _ in range(2):
            request = replace(request_for(folder, "tells", environ, log=tmp_path / "no.log"), package="a" * 64)
            remote.launch(request)
            row = record_of(request, until_started(remote, request, None))
            assert wait_for_exit(remote, row).status == 0
            code, kept, has_server = arrived[request.replica_id].decode().split()
            assert (Path(code).name, has_server) == ("a" * 64, "False")
            assert kept == str(files.folder / "checkpoints" / "t")
            (files.folder / "checkpoints" / "t").rmdir()
        assert fetched == ["a" * 64], "it is unpacked once"
        request = replace(request_for(folder, "tells", environ), package="b" * 64)
        remote.launch(request)
        with pytest.raises(LaunchFailed, match="the packed working folder cannot be used on n: its digest is wrong"):
            until_started(remote, request, None)
    finally:
        agent.end()
    assert not files.folder.exists()


def test_an_answer_that_was_overtaken_changes_nothing(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an order would wait for the next answer, which comes when nothing more is to do."""
    agent.end()
    launch = {"replica_id": "r"}
    for orders, taken in (
        (Orders(roster="x", version=5, launch=(launch,)), 5),
        (Orders(roster="x", version=4), 5),
        (Orders(roster="y", version=1), 1),
    ):
        monkeypatch.setattr(agent.line, "say", lambda *_, orders=orders, **__: orders)
        agent.agent._say(wait=False)
        assert agent.agent._heard == taken
        assert agent.agent._orders is not None and agent.agent._orders.version == taken


def test_an_agent_that_leaves_lets_its_replicas_leave_first(
    agent: AgentInThread, roster: Roster, tmp_path: Path
) -> None:
    launcher = AgentLauncher(roster)
    row = started(launcher, tmp_path, "sleeps")
    log = tmp_path / "r.log"
    # Its code has to be there to hear a signal.
    until(log.exists, 10.0)
    time.sleep(0.5)
    roster.dismiss("the test is over")
    assert wait_for_exit(launcher, row).status == 143
    agent.thread.join(10.0)
    assert not agent.thread.is_alive()
    assert roster.all_have_left


def test_a_replica_that_cannot_be_started_says_why(agent: AgentInThread, roster: Roster, tmp_path: Path) -> None:
    launcher = AgentLauncher(roster)
    request = request_for(tmp_path / "missing", "sleeps", log=tmp_path / "r.log")
    launcher.launch(request)
    with pytest.raises(LaunchFailed, match=r"could not be started in .*missing"):
        until_started(launcher, request, None)


def test_replicas_find_their_node_and_of_the_queue_only_which_job_it_is() -> None:
    found = replica_environ(
        {
            "PATH": "/bin",
            "SLURM_JOB_ID": "12",
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "0",
            "PMI_RANK": "0",
            "ELASTUNE_AGENT": "{}",
            "CUDA_HOME": "/cuda",
        }
    )
    assert found == {"PATH": "/bin", "SLURM_JOB_ID": "12", "CUDA_HOME": "/cuda"}
    assert own_job({"SLURM_JOB_ID": "12"}) == "12"
    assert own_job({"SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}) == "12_1"
    assert own_job({}) == ""


def test_slots_are_the_gpus_that_the_driver_tells_or_that_the_queue_has_set_aside_or_its_cores() -> None:
    queue = {"SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_CPUS_ON_NODE": "8"}
    known = [Gpu(uuid="GPU-a", model="H100"), Gpu(uuid="GPU-b", model="H100"), Gpu(uuid="GPU-c", model="A100")]
    assert [slot.gpus for slot in own_slots("n", queue, [], range(8))] == [("0",), ("1",)]
    assert [slot.threads for slot in own_slots("n", queue, [], range(8))] == [4, 4]
    assert [slot.gpus for slot in of_one_kind(own_slots("n", queue, known, range(8)))] == [("GPU-a",), ("GPU-b",)]
    assert len(own_slots("n", {"SLURM_CPUS_ON_NODE": "8"}, [], range(2))) == 8
    assert len(own_slots("n", {"SLURM_CPUS_ON_NODE": "8"}, [], range(2), most=3)) == 3
    amd = {"SLURM_JOB_GPUS": "4,5", "ROCR_VISIBLE_DEVICES": "4,5"}
    assert [slot.gpus for slot in own_slots("n", amd, [], range(8))] == [("0",), ("1",)]
    assert len(own_slots("n", {"CUDA_VISIBLE_DEVICES": "0,1"}, [], range(3))) == 3
    assert [bool(slot.emulates) for slot in emulating(own_slots("n", {}, [], range(2)), "bert-squad")] == [True, True]


def test_an_address_is_the_one_on_the_way_or_that_of_an_interface() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(OSError, match=r"no network interface 'ib7' with an address here; this machine has .*lo"):
        address_of("ib7")
    with pytest.raises(OSError, match=r"no network route from here to no-such-host\.invalid"):
        address_towards("no-such-host.invalid")
