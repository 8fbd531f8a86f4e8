"""Agents over HTTP: who may be one, how soon it hears, what becomes of its replicas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from scheduler.policy import policy_by_name
from tests.support.project import ROOT
from tests.support.served import OWNERS_TOKEN, ServedLoop
from tests.support.waiting import until
from trials.agents.launcher import AgentLauncher
from trials.agents.line import AgentLine, Refused
from trials.agents.node_files import NodeFiles
from trials.agents.roster import Roster
from trials.agents.start import AgentDescription
from trials.agents.words import AGENT_VARIABLE, AgentSlot, News, Orders
from trials.launch.base import LaunchRequest
from trials.log_files import LARGEST_LOG_BYTES
from trials.record import ReplicaRecord
from trials.spec import TrialSpec
from trials.store import sql_store

NEWS = News(agent="a", host="n1", version=1, slots=(AgentSlot(kind="H100"),))


@pytest.fixture
def roster() -> Roster:
    return Roster()


@pytest.fixture
def served(tmp_path: Path, roster: Roster) -> Iterator[ServedLoop]:
    store = sql_store(f"sqlite:///{tmp_path / 'trials.db'}")
    loop = ServedLoop(tmp_path, store, AgentLauncher(roster), policy_by_name("fifo"), roster=roster)
    loop.wait_until_it_answers()
    yield loop
    loop.close()
    store.close()


@contextmanager
def line_to(url: str, token: str, server_file: Path | None = None) -> Iterator[AgentLine]:
    line = AgentLine(url, token, server_file)
    yield line
    line.close()


def turn(served: ServedLoop, token: str, body: Any, path: str = "/agents/turn") -> httpx2.Response:
    with httpx2.Client(trust_env=False, timeout=20.0) as client:
        return client.post(served.url + path, json=body, headers={"Authorization": f"Bearer {token}"})


def document(**changes: Any) -> dict[str, Any]:
    return {"agent": "a", "host": "n1", "version": 1, "slots": [{"kind": "", "environ": {}}], **changes}


def test_agents_alone_may_speak_as_agents_and_may_do_nothing_else(served: ServedLoop, roster: Roster) -> None:
    token = served.tokens.for_agents()
    assert turn(served, token, document()).json()["numbers"] == [0]
    for other in (OWNERS_TOKEN, served.tokens.for_reading(), served.tokens.for_study("s"), "x" * 40):
        answer = turn(served, other, document(agent="b"))
        assert (answer.status_code, answer.json()["detail"]) == (
            403,
            "this token does not belong to an agent of this scheduler; agents are started by the scheduler itself",
        )
    for path in ("/trials", "/replica/ready", "/studies/s"):
        assert turn(served, token, {}, path).status_code in (401, 403)
    assert [news.agent for news in roster.agents()] == ["a"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"agent": ""},
        {"slots": [{"environ": 3}]},
        {"version": "x"},
        {"replicas": {"r": {"phase": "flies"}}},
        {"in_use": ["a"]},
        {"slots": [{}] * 5000},
    ],
)
def test_what_no_agent_says_is_refused(served: ServedLoop, roster: Roster, wrong: dict[str, Any]) -> None:
    assert turn(served, served.tokens.for_agents(), document(**wrong)).status_code == 422
    assert roster.agents() == []


def test_an_agent_that_waits_hears_at_once(served: ServedLoop, roster: Roster) -> None:
    heard: list[tuple[float, Orders | None]] = []
    with line_to(served.url, served.tokens.for_agents()) as line:
        first = line.say(NEWS, 0, wait=False)
        assert first is not None and first.numbers == (0,)
        version = first.version

        def listen() -> None:
            answer = line.say(NEWS, version, wait=True)
            heard.append((time.monotonic(), answer))

        thread = threading.Thread(target=listen)
        thread.start()
        time.sleep(0.3)
        assert heard == []
        asked = time.monotonic()
        roster.order("n1", 0, "r", {"replica_id": "r"})
        thread.join(10.0)
    at, orders = heard[0]
    assert orders is not None and orders.launch == ({"replica_id": "r"},)
    assert at - asked < 1.0


def test_the_line_follows_a_scheduler_that_has_moved_and_tells_a_stranger_from_a_refusal(
    served: ServedLoop, tmp_path: Path
) -> None:
    file = tmp_path / "server.json"
    file.write_text(json.dumps({"url": served.url}))
    with line_to("http://127.0.0.1:9", served.tokens.for_agents(), file) as moved:
        assert moved.say(NEWS, 0, wait=False) is None
        assert moved.say(NEWS, 0, wait=False) is not None
    with (
        line_to(served.url, "somebody else's", file) as wrong,
        pytest.raises(Refused, match="does not belong to an agent"),
    ):
        wrong.say(NEWS, 0, wait=False)


def test_an_agent_of_its_own_process_runs_a_trial_and_ends_with_its_scheduler(
    served: ServedLoop, roster: Roster, tmp_path: Path
) -> None:
    server_file = tmp_path / "server.json"
    server_file.write_text(json.dumps({"url": served.url}))
    description = AgentDescription(
        url=served.url, token=served.tokens.for_agents(), fork_server=False, server_file=str(server_file)
    )
    environ = {**os.environ, AGENT_VARIABLE: description.to_text(), "SLURMD_NODENAME": "n7"}
    (tmp_path / "code.py").write_text(
        "import os\n"
        "def run():\n"
        "    print('on', os.environ['ELASTUNE_NODE'], 'ELASTUNE_AGENT' in os.environ, os.environ['ELASTUNE_HOST'])\n"
    )
    process = subprocess.Popen([sys.executable, "-m", "trials.agents.start"], env=environ, cwd=ROOT)
    try:
        with closing(served.client()) as client:
            until(roster.agents, 30.0, "an agent has come")
            spec = {
                "study": "s",
                "number": 0,
                "entrypoint": "code:run",
                "driven": False,
                "working_dir": str(tmp_path),
                "python_path": [str(tmp_path)],
            }
            trial = client.request("POST", "/trials", spec)["trial_id"]
            said = until(
                lambda: "".join(path.read_text() for path in (tmp_path / "logs").rglob("*.log")),
                30.0,
                lambda: str(client.request("GET", f"/trials/{trial}")),
            )
            assert client.request("GET", f"/trials/{trial}")["replicas"][0]["node"] == "n7"
        assert said.split("\n")[0] == "on n7 False 127.0.0.1"
        roster.dismiss("the test is over")
        assert process.wait(20.0) == 0
    finally:
        process.kill()
        process.wait()


def test_parts_of_logs_are_kept_once_and_in_order(served: ServedLoop, tmp_path: Path) -> None:
    served.store.submit(TrialSpec(study="s", number=0, entrypoint="m:f"), 0.0)
    trial = served.store.trials()[0].trial_id
    served.store.add_replica(
        ReplicaRecord(replica_id=f"{trial}-a", trial_id=trial, node="n1", slot=0, launch_index=0, pid=1)
    )
    with line_to(served.url, served.tokens.for_agents()) as line:
        assert line.send_log(f"{trial}-a", 0, b"one ") == 4
        assert line.send_log(f"{trial}-a", 0, b"one ") == 4, "what was sent twice"
        assert line.send_log(f"{trial}-a", 9, b"three") == 4, "what comes too early"
        assert line.send_log(f"{trial}-a", 4, b"two") == 7
        assert line.send_log("t-unknown", 0, b"words") == 5
        assert line.send_log("../../etc/x", 0, b"words") == 5
    log = tmp_path / "logs" / trial / f"{trial}-a.log"
    assert log.read_text() == "one two"
    # Cut by an earlier scheduler: the agent knows how much has come.
    shortened = log.with_name(f"{trial}-b.log")
    shortened.write_bytes(b"x" * (LARGEST_LOG_BYTES // 2))
    served.store.add_replica(
        ReplicaRecord(replica_id=f"{trial}-b", trial_id=trial, node="n1", slot=1, launch_index=1, pid=2)
    )
    with line_to(served.url, served.tokens.for_agents()) as line:
        assert line.send_log(f"{trial}-b", 2 * LARGEST_LOG_BYTES, b"more") == 2 * LARGEST_LOG_BYTES + 4
    assert os.path.getsize(shortened) == LARGEST_LOG_BYTES // 2 + 4
    assert not list(tmp_path.rglob("*unknown*"))
    assert turn(served, OWNERS_TOKEN, {"replica": "r", "at": 0, "part": ""}, "/agents/logs").status_code == 403


def checkpoint(folder: Path, name: str, words: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "manifest.json").write_text("{}")
    (folder / name / "state.pt").write_text(words)
    return folder / name


def test_checkpoints_go_from_one_node_to_another(
    served: ServedLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.store.submit(TrialSpec(study="s", number=0, entrypoint="m:f"), 0.0)
    trial = served.store.trials()[0].trial_id
    here, there = tmp_path / "here", tmp_path / "there"
    kept = served.loop.checkpoints_of(trial)
    assert kept is not None
    with line_to(served.url, served.tokens.for_agents()) as line:
        assert line.checkpoints(trial) == []
        for number in range(1, 5):
            name = f"checkpoint-{number:08d}"
            assert line.send_checkpoint(trial, name, checkpoint(here, name, f"{number} " * 2_000_000))
        part = "part-1/checkpoint-00000004"
        assert line.send_checkpoint(trial, part, checkpoint(here, part, "of another process"))
        assert line.checkpoints(trial) == ["checkpoint-00000004", part]
        assert sorted(each.name for each in kept.iterdir()) == ["checkpoint-00000003", "checkpoint-00000004", "part-1"]
        there.mkdir()
        files = NodeFiles(lambda *_: None, there, line)
        request = request_of(trial, there)
        until(lambda: files.place(request) is not None)
        for name in line.checkpoints(trial):
            found, sent = files.checkpoints / trial / name, here / name
            assert {each.name: each.read_bytes() for each in found.iterdir()} == {
                each.name: each.read_bytes() for each in sent.iterdir()
            }
        # Who joins others that train gets the state from them.
        monkeypatch.setattr(served.loop, "trains", lambda trial: True)
        assert line.checkpoints(trial) == []
        # What is none, and what nobody wants.
        strange = tmp_path / "strange"
        strange.mkdir()
        assert line.send_checkpoint(trial, "checkpoint-00000009", strange) is False, "it has no manifest"
        assert line.send_checkpoint(trial, "checkpoint-9", strange) is False
        assert line.send_checkpoint(trial, "../checkpoint-00000009", strange) is False
        assert line.send_checkpoint("t-unknown", "checkpoint-00000009", strange) is True
        assert not list(tmp_path.rglob("*unknown*"))
        assert not list(kept.glob("checkpoint-00000009")) and not list(kept.glob("arriving-*"))
        files.remove()
    url = f"{served.url}/agents/checkpoints/{trial}"
    for method, path in (("GET", ""), ("GET", "/checkpoint-00000004"), ("PUT", "/checkpoint-00000005")):
        answer = httpx2.request(method, url + path, headers={"Authorization": f"Bearer {OWNERS_TOKEN}"}, content=b"")
        assert answer.status_code == 403


def request_of(trial: str, folder: Path) -> LaunchRequest:
    return LaunchRequest(
        replica_id=f"{trial}-b",
        trial_id=trial,
        node="n2",
        slot=0,
        entrypoint="m:f",
        environ={},
        working_dir=str(folder),
        python_path=(),
        preload=(),
        code=(),
        log=folder / "log",
    )


def test_an_agent_says_what_it_lacks() -> None:
    environ = {**os.environ, AGENT_VARIABLE: AgentDescription(url="http://x.invalid:1", token="t").to_text()}
    for changed, words in (
        ({AGENT_VARIABLE: ""}, "ELASTUNE_AGENT is not set; a scheduler starts agents, do not start them by hand"),
        ({}, "no network route from here to x.invalid"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "trials.agents.start"],
            env={**environ, **changed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert words in done.stderr and "Traceback" not in done.stderr
