"""The typed client over a real API, the schedulers that elastune.toml names, and a folder whose scheduler has ended."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.client import Client, SchedulerClient, Trial
from scheduler.client.connection import of_folder
from scheduler.client.finding import named_scheduler
from scheduler.client.rows import row_of
from scheduler.errors import NotRunning, RequestRefused, SchedulerError, SchedulerUnreachable
from scheduler.host.embedded import EmbeddedScheduler
from scheduler.host.recorded import recorded
from tests.support.waiting import until
from trials.errors import StoreUnavailable
from trials.record import ReplicaRecord
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store import sql_store

COMMAND = "tuner_bridge.in_replica.commands:run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a scheduler that runs, with a trial each of two studies, which wait for ever."""
    made = tmp_path_factory.mktemp("state")
    embedded = EmbeddedScheduler(made, emulate="1x2:bert-squad", fork_server=False)
    connection = embedded.start()
    for name, title in (("alpha-1", "alpha"), ("beta-2", "beta")):
        connection.request("PUT", f"/studies/{name}", {"owner": "me", "title": title, "user": "ada"})
        connection.request("POST", "/trials", {"study": name, "entrypoint": "no.such:main", "max_losses": 0})
    yield made
    connection.close()
    embedded.stop()


@pytest.fixture
def client(folder: Path) -> Iterator[Client]:
    with Client.connect(state_dir=folder) as made:
        yield made


def test_trials_go_by_study_and_number_id_or_what_is_theirs_alone(client: Client) -> None:
    first, second = client.trials()
    assert (first.label, second.label) == ("alpha/0", "beta/0")
    for wanted in (first, first.id, first.id[:9], "alpha/0", "alpha-1/0"):
        assert client.trial(wanted).id == first.id
    with pytest.raises(SchedulerError, match=r"2 trials are called '0': alpha/0, beta/0"):
        client.trial("0")
    with pytest.raises(SchedulerError, match="no trial is called 'gamma/0'"):
        client.trial("gamma/0")
    assert [trial.id for trial in client.trials(study="beta")] == [second.id]
    assert client.trials(state="running") == []
    assert client.study("al").title == "alpha"
    assert client.study("alpha-1").user == "ada"
    with pytest.raises(SchedulerError, match="no studies match 'nope'; there are: alpha-1, beta-2"):
        client.study("nope")


def test_what_is_changed_through_the_client_is_changed(client: Client) -> None:
    terms, warnings = client.set_terms("alpha", weight=2.5, yields_to=["beta"])
    assert (terms["weight"], warnings) == (2.5, [])
    with pytest.raises(RequestRefused, match="weight is -1"):
        client.set_terms("alpha", weight=-1)
    made = client.submit(
        {"study": "jobs", "entrypoint": COMMAND, "payload": {"command": ["true", "--lr", "0.1"]}, "driven": False}
    )
    assert made.parameters == {"lr": 0.1}
    again = client.clone(made, lr=0.5)
    assert again is not None and again.number == made.number + 1
    assert client.stop(again) or client.trial(again).is_over
    assert client.nodes()[0].slots == 2
    assert client.page_link().startswith(f"{client.url}/#code=")
    assert client.token("read").startswith("read.")


def test_a_newer_scheduler_may_tell_more() -> None:
    told = {
        "id": "t",
        "study": "s",
        "number": 1,
        "state": "paused",
        "code": "c",
        "why": "w",
        "replicas": 0,
        "min": 1,
        "max": 1,
        "submitted": 0.0,
        "of the future": 1,
    }
    trial = row_of(Trial, told)
    assert (trial.label, trial.is_waiting, trial.is_over, trial.score) == ("s/1", True, False, None)
    assert row_of(Trial, {**told, "value": [0.5, 1.0]}).score == 0.5


# ---------------------------------------------------------------------- names


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """The folder of the user's settings."""
    made = tmp_path / "settings" / "elastune"
    made.mkdir(parents=True)
    return made


def write(folder: Path, text: str) -> Path:
    path = folder / "elastune.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def environ_of(settings: Path, **others: str) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(settings.parent), **others}


SETTINGS = """
default = "lab"
[schedulers.lab]
url = "http://lab:7300"
token_file = "token"
[schedulers.mine]
state_dir = "state"
[schedulers.other]
url = "http://other:7300"
token_env = "OTHER_TOKEN"
"""


def test_settings_name_schedulers_and_a_folder_chooses_among_them(settings: Path, tmp_path: Path) -> None:
    (settings / "token").write_text("secret\n")
    write(settings, SETTINGS)
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    environ = environ_of(settings)
    lab = named_scheduler("", environ, below)
    assert lab is not None and (lab.url, lab.token) == ("http://lab:7300", "secret")
    mine = named_scheduler("mine", environ, below)
    assert mine is not None and mine.state_dir == settings / "state"
    other = named_scheduler("other", {**environ, "OTHER_TOKEN": "t"}, below)
    assert other is not None and other.token == "t"
    write(tmp_path, 'default = "mine"')
    chosen = named_scheduler("", environ, below)
    assert chosen is not None and chosen.name == "mine"
    with pytest.raises(SchedulerError, match="no token is known for 'other'"):
        named_scheduler("other", environ, below)
    with pytest.raises(SchedulerError, match="have no scheduler 'nope'; there are: lab, mine, other"):
        named_scheduler("nope", environ, below)


def test_what_came_with_code_sends_nothing_anywhere(settings: Path, tmp_path: Path) -> None:
    for text in (
        'default = "x"\n[schedulers.x]\nurl = "http://evil"\ntoken_env = "SECRET"',
        'default = "x"\n[schedulers.x]\nstate_dir = "somewhere"',
    ):
        write(tmp_path, text)
        with pytest.raises(SchedulerError, match="it may only choose a scheduler"):
            named_scheduler("", environ_of(settings, SECRET="s"), tmp_path)
    write(tmp_path, 'default = "x"')
    with pytest.raises(SchedulerError, match=r"have no scheduler 'x' \(which .*elastune\.toml asks for\)"):
        named_scheduler("", environ_of(settings), tmp_path)
    (tmp_path / "elastune.toml").unlink()
    write(settings, SETTINGS).chmod(0o622)
    with pytest.raises(SchedulerError, match="can be written by others"):
        named_scheduler("", environ_of(settings), tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("default = ", "cannot be read"),
        ("default = 3", "must be the name of a scheduler"),
        ('default = "x"\n[schedulers.x]\nurl = "http://x"\nport = "1"', "has no 'port'"),
        ('default = "x"\n[schedulers.x]\nurl = 3', "takes only strings"),
        ('default = "x"\n[schedulers.x]\ntoken_env = "A"', "needs either a url or a state_dir"),
        ('default = "x"\n[schedulers.x]\nurl = "http://x"\nstate_dir = "y"', "needs either a url or a state_dir"),
        ('default = "x"\n[schedulers.x]\nurl = "http://x"\ntoken_file = "missing"', "the token of 'x' cannot be read"),
        ('default = "x"\nschedulers = 3', "have no scheduler 'x'"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings: Path, tmp_path: Path, text: str, words: str) -> None:
    write(settings, text)
    with pytest.raises(SchedulerError, match=words):
        named_scheduler("", environ_of(settings), tmp_path)


def test_without_settings_nothing_is_named(settings: Path, tmp_path: Path) -> None:
    assert named_scheduler("", environ_of(settings), tmp_path) is None
    with pytest.raises(SchedulerError, match="have no scheduler 'lab'; there are: none"):
        named_scheduler("lab", environ_of(settings), tmp_path)
    write(settings, '[schedulers.lab]\nstate_dir = "/x"')
    named = named_scheduler("lab", environ_of(settings), tmp_path)
    assert named is not None and named.state_dir == Path("/x")
    assert named_scheduler("", environ_of(settings), tmp_path) is None, "it has no default"


def test_the_environment_comes_before_the_settings(
    folder: Path, settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(settings, f'default = "mine"\n[schedulers.mine]\nstate_dir = "{folder}"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(settings.parent))
    monkeypatch.delenv("ELASTUNE_URL", raising=False)
    found = SchedulerClient.from_environ()
    assert found is not None
    with Client(of_folder(folder)) as same:
        assert found.url == same.url
    found.close()
    monkeypatch.setenv("ELASTUNE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("ELASTUNE_TOKEN", "x")
    with pytest.raises(SchedulerUnreachable):
        SchedulerClient.from_environ()


# ---------------------------------------------------------------------- what an ended one has kept


@pytest.mark.slow
def test_what_an_ended_scheduler_has_kept_is_read_and_cannot_be_changed(tmp_path: Path) -> None:
    embedded = EmbeddedScheduler(tmp_path / "state", emulate="1x1:bert-squad", fork_server=False)
    connection = embedded.start()
    made = connection.request("POST", "/trials", {"study": "s", "entrypoint": "no.such:main", "max_losses": 0})
    connection.request("POST", f"/trials/{made['trial_id']}/cancel", {"why": "enough"})
    connection.close()
    embedded.stop()
    with pytest.raises(NotRunning, match="is not running"):
        of_folder(tmp_path / "state")
    with recorded(tmp_path / "state") as reading:
        client = Client(reading)
        [trial] = client.trials()
        assert (trial.id, trial.state) == (made["trial_id"], "cancelled")
        assert client.story(trial)["history"]
        for change in (
            lambda: client.pause(trial),
            lambda: client.submit({"study": "s", "entrypoint": "m:f"}),
            lambda: client.forget([trial.id]),
        ):
            with pytest.raises(RequestRefused, match="nothing can be changed"):
                change()
    with pytest.raises(SchedulerError, match=r"holds no trials\.db"), recorded(tmp_path):
        pass
    (tmp_path / "trials.db").write_text("not a database")
    with pytest.raises(StoreUnavailable), recorded(tmp_path):
        pass


def test_looking_at_what_a_killed_scheduler_has_kept_changes_nothing(tmp_path: Path) -> None:
    """Replicas may train on, and another scheduler may come for them."""
    store = sql_store(f"sqlite:///{tmp_path / 'trials.db'}")
    record = store.submit(TrialSpec(study="s", number=0, entrypoint="m:f"), 1.0)
    running = replace(record, state=TrialState.RUNNING, generation=1, members=("r1",), losses=5)
    store.save_trial(running)
    place: dict[str, Any] = {"node": "n", "slot": 0, "launch_index": 0}
    store.add_replica(ReplicaRecord(replica_id="r1", trial_id=record.trial_id, pid=1, launched_at=1.0, **place))
    checkpoint = tmp_path / "checkpoints" / record.trial_id / "kept"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("x")
    with recorded(tmp_path) as reading:
        client = Client(reading)
        assert client.trials()[0].state == "running"
        time.sleep(1.5)
        assert client.trials()[0].state == "running"
    assert store.trial(record.trial_id) == running
    assert [row.replica_id for row in store.replicas()] == ["r1"]
    assert checkpoint.exists()
    store.close()


def test_a_post_is_sent_once_whatever_becomes_of_its_answer() -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    accepted, _ = server.accept()
                except OSError:
                    return
                with accepted:
                    heard.append(accepted.recv(65536))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        connection = SchedulerClient(f"http://127.0.0.1:{server.getsockname()[1]}", "t")
        with pytest.raises(SchedulerUnreachable):
            connection.request("POST", "/trials", {})
        connection.close()
        server.shutdown(socket.SHUT_RDWR)
    thread.join(timeout=5.0)
    assert len([each for each in heard if each.startswith(b"POST")]) == 1


def test_what_is_forgotten_is_gone(tmp_path: Path) -> None:
    embedded = EmbeddedScheduler(tmp_path / "state", emulate="1x1:bert-squad", fork_server=False)
    with Client(embedded.start()) as client:
        spec: dict[str, Any] = {"study": "s", "entrypoint": "no.such:main", "max_losses": 0}
        ended = client.submit(spec)
        client.stop(ended)

        def is_forgotten() -> bool:
            try:
                return client.forget([ended.id]) == 1
            except RequestRefused:
                # Its replica has not gone yet.
                return False

        until(is_forgotten, 30.0)
        until(lambda: all(trial.id != ended.id for trial in client.trials()), 30.0)
    embedded.stop()
    kept = json.loads((tmp_path / "state" / "server.json").read_text())
    assert kept["ending"] is True
