"""An agent and its scheduler, over a line that may be cut."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents import AgentInThread, until_there
from tests.trials.test_launchers import SCRIPT, record_of, request_for, until_started, wait_for_exit
from trials.agents.addresses import address_of, address_towards
from trials.agents.launcher import AgentLauncher
from trials.agents.own_slots import emulating, of_one_kind, own_slots
from trials.agents.roster import Roster
from trials.agents.start import own_job, replica_environ
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


def test_a_replica_that_ends_while_the_line_is_cut_is_told_of_afterwards(
    agent: AgentInThread, roster: Roster, tmp_path: Path
) -> None:
    launcher = AgentLauncher(roster)
    request = request_for(tmp_path, "sleeps")
    launcher.launch(request)
    row = record_of(request, until_started(launcher, request, None))
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
    request = request_for(tmp_path, "sleeps")
    launcher.launch(request)
    row = record_of(request, until_started(launcher, request, None))
    second = Roster()
    adopting = AgentLauncher(second)
    second.expect([row])
    agent.line._roster = second
    until_there(second)
    assert adopting.exits([row]) == []
    adopting.stop(row, force=True)
    assert wait_for_exit(adopting, row).status == -9


def test_an_agent_that_leaves_lets_its_replicas_leave_first(
    agent: AgentInThread, roster: Roster, tmp_path: Path
) -> None:
    launcher = AgentLauncher(roster)
    request = request_for(tmp_path, "sleeps")
    launcher.launch(request)
    row = record_of(request, until_started(launcher, request, None))
    deadline = time.monotonic() + 10.0
    # Its code has to be there to hear a signal.
    while not request.log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    roster.dismiss()
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
    assert len(own_slots("n", {"CUDA_VISIBLE_DEVICES": "0,1"}, [], range(3))) == 3
    assert [bool(slot.emulates) for slot in emulating(own_slots("n", {}, [], range(2)), "bert-squad")] == [True, True]


def test_an_address_is_the_one_on_the_way_or_that_of_an_interface() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(OSError, match=r"no network interface 'ib7' with an address here; there are .*lo"):
        address_of("ib7")
    with pytest.raises(OSError, match=r"no way leads from here to no-such-host\.invalid"):
        address_towards("no-such-host.invalid")
