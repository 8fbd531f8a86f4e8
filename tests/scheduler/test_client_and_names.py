"""The typed client over a real API, the schedulers that elastune.toml names, and a folder whose scheduler has ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from trials.errors import StoreUnavailable

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


@pytest.fixture(params=[True, False], ids=["quick", "pooled"])
def client(request: pytest.FixtureRequest, folder: Path) -> Iterator[Client]:
    with Client.connect(state_dir=folder, quick=request.param) as made:
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
    with pytest.raises(SchedulerError, match="no studies are called 'nope'; there are: alpha-1, beta-2"):
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


def test_nobody_who_answers_is_one_sentence_either_way() -> None:
    for quick in (True, False):
        connection = SchedulerClient("http://127.0.0.1:9", "token", quick=quick)
        with pytest.raises(SchedulerUnreachable, match=r"no scheduler answers at http://127.0.0.1:9"):
            connection.check()
        connection.close()


# ---------------------------------------------------------------------- names


def write(folder: Path, text: str) -> Path:
    path = folder / "elastune.toml"
    path.write_text(text)
    return path


def test_schedulers_are_named_in_a_file_above_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    write(
        tmp_path,
        """
        default = "lab"
        [schedulers.lab]
        url = "http://lab:7300"
        token_file = "token"
        [schedulers.mine]
        state_dir = "state"
        [schedulers.other]
        url = "http://other:7300"
        token_env = "OTHER_TOKEN"
        """,
    )
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    lab = named_scheduler("", {}, below)
    assert lab is not None and (lab.url, lab.token) == ("http://lab:7300", "secret")
    mine = named_scheduler("mine", {}, below)
    assert mine is not None and mine.state_dir == tmp_path / "state"
    other = named_scheduler("other", {"OTHER_TOKEN": "t"}, below)
    assert other is not None and other.token == "t"
    with pytest.raises(SchedulerError, match="no token is known for 'other'"):
        named_scheduler("other", {}, below)
    with pytest.raises(SchedulerError, match="names no scheduler 'nope'; there are: lab, mine, other"):
        named_scheduler("nope", {}, below)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("default = ", "cannot be read"),
        ('default = "x"\n[schedulers.x]\nurl = "http://x"\nport = "1"', "has no 'port'"),
        ('default = "x"\n[schedulers.x]\nurl = 3', "has texts only"),
        ('default = "x"\n[schedulers.x]\ntoken_env = "A"', "needs either a url or a state_dir"),
        ('default = "x"\n[schedulers.x]\nurl = "http://x"\nstate_dir = "y"', "needs either a url or a state_dir"),
        ('default = "x"\n[schedulers.x]\nurl = "http://x"\ntoken_file = "missing"', "the token of 'x' cannot be read"),
        ('default = "x"\nschedulers = 3', "names no scheduler 'x'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path, text)
    with pytest.raises(SchedulerError, match=words):
        named_scheduler("", {}, tmp_path)


def test_without_a_file_nothing_is_named(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "settings")}
    assert named_scheduler("", environ, tmp_path) is None
    with pytest.raises(SchedulerError, match=r"no elastune\.toml is in this folder"):
        named_scheduler("lab", environ, tmp_path)
    (tmp_path / "settings" / "elastune").mkdir(parents=True)
    write(tmp_path / "settings" / "elastune", '[schedulers.lab]\nstate_dir = "/x"')
    named = named_scheduler("lab", environ, tmp_path)
    assert named is not None and named.state_dir == Path("/x")
    assert named_scheduler("", environ, tmp_path) is None, "it has no default"


def test_the_environment_comes_before_the_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, f'default = "mine"\n[schedulers.mine]\nstate_dir = "{folder}"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTUNE_URL", raising=False)
    found = SchedulerClient.from_environ()
    assert found is not None
    assert found.url == of_folder(folder, quick=True).url
    found.close()
    monkeypatch.setenv("ELASTUNE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("ELASTUNE_TOKEN", "x")
    with pytest.raises(SchedulerUnreachable):
        SchedulerClient.from_environ()


# ---------------------------------------------------------------------- what an ended one has kept


def test_what_an_ended_scheduler_has_kept_is_read_and_cannot_be_changed(tmp_path: Path) -> None:
    embedded = EmbeddedScheduler(tmp_path / "state", emulate="1x1:bert-squad", fork_server=False)
    connection = embedded.start()
    made = connection.request("POST", "/trials", {"study": "s", "entrypoint": "no.such:main", "max_losses": 0})
    connection.request("POST", f"/trials/{made['trial_id']}/cancel", {"why": "enough"})
    connection.close()
    embedded.stop()
    for quick in (True, False):
        with pytest.raises(NotRunning, match="is not running"):
            of_folder(tmp_path / "state", quick=quick)
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
            with pytest.raises(RequestRefused, match="nothing runs that could be changed"):
                change()
    with pytest.raises(SchedulerError, match=r"holds no trials\.db"), recorded(tmp_path):
        pass
    (tmp_path / "trials.db").write_text("not a database")
    with pytest.raises(StoreUnavailable), recorded(tmp_path):
        pass


def test_what_is_forgotten_is_gone(tmp_path: Path) -> None:
    embedded = EmbeddedScheduler(tmp_path / "state", emulate="1x1:bert-squad", fork_server=False)
    with Client(embedded.start()) as client:
        spec: dict[str, Any] = {"study": "s", "entrypoint": "no.such:main", "max_losses": 0}
        live, ended = client.submit(spec), client.submit(spec)
        client.stop(ended)
        while not client.trial(ended.id).is_over:
            pass
        with pytest.raises(RequestRefused, match="stop it first"):
            client.forget([live.id, ended.id] if not client.trial(live.id).is_over else ["nope"])
        assert client.forget([ended.id]) == 1
        while any(trial.id == ended.id for trial in client.trials()):
            pass
    embedded.stop()
    kept = json.loads((tmp_path / "state" / "server.json").read_text())
    assert kept["ending"] is True
