"""What each kind of token opens, and that one that was replaced opens nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.api.tokens import Access, Identity, Secrets, Tokens
from scheduler.errors import RequestRefused
from scheduler.host.secret_files import keep_private, secrets_in_folder
from tests.support.site import TOKENS, Site

KEPT = Secrets(owner="a token of the owner", key="ab" * 32)


@pytest.fixture
def site(site: Site) -> Site:
    site.submit(0, study="mine", environ={"SECRET": "s"})
    site.submit(0, study="other")
    return site


def ids(site: Site) -> dict[str, str]:
    return {record.spec.study: record.trial_id for record in site.store.trials()}


def status(site: Site, token: str, method: str, path: str, body: Any = None) -> int:
    answered: int = site.call(method, path, body, token=token).status_code
    return answered


MINE = TOKENS.for_study("mine")
READ = TOKENS.for_reading()
SPEC = {"number": 1, "entrypoint": "m:f"}


@pytest.mark.parametrize(
    ("method", "path", "body", "owner", "own_study", "others_study", "reader"),
    [
        ("GET", "/whoami", None, 200, 200, 200, 200),
        ("GET", "/metrics", None, 200, 403, 403, 200),
        ("GET", "/trials", None, 200, 200, 200, 200),
        ("GET", "/overview", None, 200, 200, 200, 200),
        ("GET", "/timeline", None, 200, 200, 200, 200),
        ("GET", "/studies", None, 200, 200, 200, 200),
        ("GET", "/openapi.json", None, 200, 200, 200, 200),
        ("GET", "/trials/{id}", None, 200, 200, 404, 200),
        ("GET", "/trials/{id}/why", None, 200, 200, 404, 200),
        ("GET", "/trials/{id}/log", None, 200, 200, 404, 403),
        ("POST", "/trials/{id}/cancel", {}, 200, 200, 404, 403),
        ("POST", "/trials", {"study": "{study}", **SPEC}, 200, 200, 403, 403),
        ("PUT", "/studies/{study}", {"owner": "o"}, 200, 200, 403, 403),
        ("POST", "/studies/{study}/news", {"owner": "o", "wait": 0}, 404, 404, 403, 403),
        ("POST", "/studies/{study}/poke", None, 200, 200, 403, 403),
        ("POST", "/studies/{study}/answers", {"id": "q", "answer": {}}, 200, 200, 403, 403),
        ("POST", "/studies/{study}/detach", {"owner": "o"}, 404, 404, 403, 403),
        ("PATCH", "/studies/{study}", {"goal": "fair"}, 404, 404, 403, 403),
        ("POST", "/tokens", {"access": "read"}, 200, 403, 403, 403),
        ("GET", "/packages/" + "0" * 64, None, 200, 200, 200, 403),
    ],
)
def test_each_token_opens_what_it_is_for(
    site: Site, method: str, path: str, body: Any, owner: int, own_study: int, others_study: int, reader: int
) -> None:
    def answered(token: str, study: str) -> int:
        filled = path.format(id=ids(site)[study], study=study)
        document = None if body is None else json.loads(json.dumps(body).replace("{study}", study))
        return status(site, token, method, filled, document)

    assert answered(READ, "mine") == reader
    assert answered(MINE, "other") == others_study
    assert answered(MINE, "mine") == own_study
    assert answered(TOKENS.owner, "other") == owner
    assert answered("study.bWluZQ." + "0" * 64, "mine") == 401
    assert answered("read." + "0" * 64, "mine") == 401


def test_a_study_is_shown_its_own_trials_only(site: Site) -> None:
    for path in ("/trials", "/overview", "/timeline"):
        shown = site.call("GET", path, token=MINE).json()
        trials = shown if isinstance(shown, list) else shown["trials"]
        assert [trial["study"] for trial in trials] == ["mine"]
    news = {"owner": "o", "wait": 0, "trials": [ids(site)["other"]]}
    site.call("PUT", "/studies/mine", {"owner": "o"}, token=MINE)
    assert status(site, MINE, "POST", "/studies/mine/news", news) == 404


def test_a_studys_token_opens_the_sweeps_that_are_called_so(site: Site) -> None:
    """Front ends add letters of their own to the name that they go by."""
    assert status(site, MINE, "PUT", "/studies/mine-1", {"owner": "o", "title": "mine"}) == 200
    assert status(site, MINE, "POST", "/studies/mine-1/poke") == 200
    submitted = site.call("POST", "/trials", {**SPEC, "study": "mine-1"}, token=MINE).json()
    assert {trial["study"] for trial in site.call("GET", "/trials", token=MINE).json()} == {"mine", "mine-1"}
    assert status(site, MINE, "POST", f"/trials/{submitted['trial_id']}/cancel", {}) == 200
    # Another title is another study, and so is a study of that name that is called otherwise.
    for name, title in (("mine-2", "other"), ("mine-2", ""), ("other", "mine")):
        assert status(site, MINE, "PUT", f"/studies/{name}", {"owner": "o", "title": title}) == 403
    site.call("PUT", "/studies/other", {"owner": "o", "title": "another"})
    assert status(site, TOKENS.for_study("other"), "POST", "/studies/other/poke") == 403
    given = site.call("POST", "/tokens", {"access": "study", "study": "mine-1"}).json()["token"]
    assert given == MINE


def test_a_reader_is_not_shown_code_and_environment(site: Site) -> None:
    path = f"/trials/{ids(site)['mine']}"
    assert site.call("GET", path, token=MINE).json()["spec"]["environ"] == {"SECRET": "s"}
    assert site.call("GET", path, token=READ).json()["spec"] is None


@pytest.mark.parametrize("change", [{"weight": 9.0}, {"priority": 3}, {"quota": 64}, {"yields_to": []}])
def test_a_study_takes_no_larger_share_by_itself(site: Site, change: dict[str, Any]) -> None:
    site.call("PUT", "/studies/mine", {"owner": "o", "terms": {"yields_to": ["other"], "quota": 1}})
    refused = site.call("PATCH", "/studies/mine", change, token=MINE)
    assert refused.status_code == 403
    assert next(iter(change)) in refused.json()["detail"]
    assert status(site, MINE, "PUT", "/studies/mine", {"owner": "o", "terms": change}) == 403
    assert status(site, MINE, "PATCH", "/studies/mine", {"goal": "fair"}) in (200, 422)


def test_an_answer_to_anothers_question_is_not_heard(site: Site) -> None:
    name = f"{ids(site)['other']}-abc"
    mailbox = site.service.mailbox
    mailbox._questions["q"] = type("Q", (), {"study": "other", "answer": None, "answered": None})()
    assert status(site, MINE, "POST", "/studies/mine/answers", {"id": "q", "answer": {"value": 1}}) == 200
    assert mailbox._questions["q"].answer is None, name


def test_a_replica_opens_nothing_with_another_replicas_token(site: Site) -> None:
    name = site.with_replica(3)
    twin = f"{name.rpartition('-')[0]}-twin"
    headers = {"X-Elastune-Replica": name}
    of_another_trial = TOKENS.for_replica(f"{site.submit(1)['trial_id']}-abc")
    for token in (TOKENS.for_replica(twin), of_another_trial, TOKENS.owner, READ, TOKENS.for_study("s")):
        assert site.call("GET", "/replica/trial", token=token, headers=headers).status_code == 403
    assert site.replica("GET", "/trial", name=name).status_code == 200
    assert site.replica("GET", "/trial", name=twin).status_code == 410


def test_a_replaced_token_is_refused_at_once() -> None:
    saved: list[Secrets] = []
    tokens = Tokens(KEPT, save=saved.append)
    before = {
        Access.OWNER: tokens.owner,
        Access.READ: tokens.for_reading(),
        Access.STUDY: tokens.for_study("s"),
    }
    other, replica = tokens.for_study("t"), tokens.for_replica("r")
    for number, (access, old) in enumerate(before.items(), start=1):
        assert tokens.identify(old) is not None
        new = tokens.replace(access, "s")
        assert tokens.identify(old) is None
        assert tokens.identify(new) == Identity(access, "s" if access is Access.STUDY else "")
        assert len(saved) == number
    assert tokens.identify(other) == Identity(Access.STUDY, "t")
    assert tokens.identify(replica, "r") == Identity(Access.REPLICA, "r")
    assert Tokens(saved[-1]).identify(tokens.owner) == Identity(Access.OWNER)


def test_what_could_not_be_saved_was_not_replaced() -> None:
    def full(_: Secrets) -> None:
        raise OSError("no space left")

    tokens = Tokens(KEPT, save=full)
    with pytest.raises(OSError, match="no space"):
        tokens.replace(Access.OWNER)
    assert tokens.owner == KEPT.owner


def test_what_cannot_be_kept_is_not_replaced() -> None:
    """After a restart the old one would open again what it opened."""
    tokens = Tokens(KEPT)
    for access in (Access.OWNER, Access.READ, Access.STUDY):
        with pytest.raises(RequestRefused, match="cannot store which tokens were replaced"):
            tokens.replace(access, "s")


def test_a_token_from_outside_is_replaced_there(site: Site) -> None:
    with pytest.raises(RequestRefused, match="where it is set"):
        Tokens(KEPT, fixed=True).replace(Access.OWNER)
    answer = site.call("POST", "/tokens", {"access": "owner", "replace": True})
    assert answer.status_code == 409 and "where it is set" in answer.json()["detail"]


@given(st.text(), st.text())
def test_no_token_is_taken_for_another(presented: str, name: str) -> None:
    tokens = Tokens(KEPT)
    assert tokens.identify(presented) is None or presented == KEPT.owner
    assert tokens.identify(presented, name) is None
    assert tokens.identify(tokens.for_study(name)) == (Identity(Access.STUDY, name))
    assert tokens.identify(tokens.for_study(name), "r") == Identity(Access.STUDY, name)
    assert tokens.identify(tokens.for_replica("x" + name), name) is None
    assert len({tokens.for_study(name), tokens.for_replica(name), tokens.for_reading(), tokens.owner}) == 4


def test_short_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        Tokens("short")


# ---------------------------------------------------------------------- files


def test_the_files_are_the_owners_alone_and_made_once(tmp_path: Path) -> None:
    made = secrets_in_folder(tmp_path)
    assert secrets_in_folder(tmp_path) == made
    assert (tmp_path / "token").read_text() == made.owner
    for name in ("token", "tokens.json"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


def test_what_others_could_read_is_mended_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secrets_in_folder(tmp_path)
    (tmp_path / "token").chmod(0o644)
    tmp_path.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        keep_private(tmp_path)
        secrets_in_folder(tmp_path)
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0
    assert tmp_path.stat().st_mode & 0o077 == 0
    assert sum("other users of this machine could read" in message for message in caplog.messages) == 2
    caplog.clear()
    keep_private(tmp_path)
    assert caplog.messages == []
