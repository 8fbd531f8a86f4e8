"""The API over a real store, with the control loop asleep: facts in, facts out, and who may do what."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest

from dist_core.goodput import BatchBounds, Hints
from scheduler.api.replica_side import CROWD, MOST_WARNINGS, Allowance
from scheduler.runtime import runtime
from tests.support.site import TOKENS, Site
from trials.record import ReplicaRecord, ReplicaState, Study
from trials.terms import StudyTerms


def test_without_the_owners_token_nothing_is_told(site: Site) -> None:
    assert site.http.get("/trials").status_code == 401
    assert site.call("GET", "/trials", token="wrong").status_code == 401
    assert site.call("GET", "/trials", token=TOKENS.for_replica(site.with_replica())).status_code == 401
    assert site.call("GET", "/trials").status_code == 200


def test_a_submission_is_checked_and_repeatable(site: Site) -> None:
    first = site.submit()
    assert site.submit()["trial_id"] == first["trial_id"]
    for changes, words in (
        ({"min_replicas": 3, "max_replicas": 3}, "min_replicas is 3, which needs 3 slots, but the cluster has 2"),
        ({"min_replicas": 2, "max_replicas": 1}, "must not exceed max_replicas"),
        ({"entrypoint": "rm -rf"}, "package.module:function"),
        ({"unknown": 1}, "not a valid trial"),
    ):
        answer = site.call("POST", "/trials", {"study": "s", "number": 5, "entrypoint": "m:f", **changes})
        assert answer.status_code == 422
        assert words in answer.json()["detail"]


def test_why_tells_the_last_decision_and_what_went_into_it(site: Site) -> None:
    trial_id = site.submit()["trial_id"]
    assert site.call("GET", f"/trials/{trial_id}/why").json()["grant"] is None
    site.loop.tick()
    answer = site.call("GET", f"/trials/{trial_id}/why").json()
    assert answer["policy"] == "goodput"
    assert answer["policy_error"] is None
    assert answer["held_slots"] == 1
    assert answer["grant"]["placement"] == {"n0": 1}
    assert answer["grant"]["reason"]["sentence"] == "starts on 1 slot"
    assert answer["grant"]["numbers"]["promise"] == 0.5
    assert site.call("GET", "/trials/nope/why").status_code == 404


def test_unknown_names_are_told(site: Site) -> None:
    assert "no trial is called" in site.call("GET", "/trials/nope").json()["detail"]
    assert site.call("POST", "/studies/nope/detach", {"owner": "me"}).status_code == 404


def test_one_driver_at_a_time(site: Site) -> None:
    assert site.call("PUT", "/studies/s", {"owner": "one"}).json() == {
        "warnings": [],
        "slots": 2,
        "runs_elsewhere": False,
        "runtime": runtime(),
        "emulated": "",
    }
    assert site.call("PUT", "/studies/s", {"owner": "one"}).status_code == 200
    taken = site.call("PUT", "/studies/s", {"owner": "two"})
    assert taken.status_code == 409
    assert "driven by another process" in taken.json()["detail"]
    site.call("POST", "/studies/s/detach", {"owner": "one"})
    assert site.call("PUT", "/studies/s", {"owner": "two"}).status_code == 200
    gone = site.call("POST", "/studies/s/news", {"owner": "one", "wait": 0})
    assert gone.status_code == 409


def test_of_drivers_that_come_at_once_one_gets_the_study(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    look = site.store.studies

    def slow_look() -> list[Study]:
        found = look()
        time.sleep(0.05)
        return found

    monkeypatch.setattr(site.store, "studies", slow_look)
    with ThreadPoolExecutor(4) as drivers:
        answers = list(drivers.map(lambda name: site.call("PUT", "/studies/s", {"owner": name}), "abcd"))
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]


def test_a_driver_that_is_known_to_be_dead_is_followed_at_once(site: Site) -> None:
    site.call("PUT", "/studies/s", {"owner": "dead"})
    assert site.call("PUT", "/studies/s", {"owner": "b", "takes_over": "another"}).status_code == 409
    assert site.call("PUT", "/studies/s", {"owner": "b", "takes_over": "dead"}).status_code == 200
    # Of two that come for the same one, the second finds the first.
    assert site.call("PUT", "/studies/s", {"owner": "c", "takes_over": "dead"}).status_code == 409


def test_what_is_asked_for_a_study_can_be_changed_and_is_checked(site: Site) -> None:
    site.call("PUT", "/studies/s", {"owner": "one", "terms": {"weight": 2.0}})
    site.call("PUT", "/studies/other", {"owner": "one", "terms": {"yields_to": ["s"]}})
    changed = site.call("PATCH", "/studies/s", {"priority": 3, "quota": 1}).json()["terms"]
    assert (changed["weight"], changed["priority"], changed["quota"]) == (2.0, 3, 1)
    # A driver that comes back does not undo what was set.
    site.call("PUT", "/studies/s", {"owner": "one"})
    assert site.call("GET", "/studies").json()[0] == {"name": "s", "title": "", "driver": "one", **changed}
    for body, words in (
        ({"weight": -1.0}, "weight is -1.0; it must be from 1e-06"),
        ({"glory": 1}, "a study has no setting 'glory'; it has budget_slot_hours, deadline_at"),
        ({"yields_to": ["other"]}, "in a circle"),
        ({"weight": "much"}, "must be"),
    ):
        refused = site.call("PATCH", "/studies/s", body)
        assert refused.status_code == 422
        assert words in refused.json()["detail"]
    assert site.call("PATCH", "/studies/nope", {"weight": 1.0}).status_code == 404


def test_a_study_that_yields_to_nobody_is_warned_of(site: Site) -> None:
    asked = {"owner": "o", "title": "resnet", "terms": {"yields_to": ["net"]}}
    [warning] = site.call("PUT", "/studies/resnet-1", asked).json()["warnings"]
    assert warning.startswith("yields_to names 'net', but there is no such study here (there are: none).")
    site.call("PUT", "/studies/net-7", {"owner": "o", "title": "net"})
    assert site.call("PUT", "/studies/resnet-1", asked).json()["warnings"] == []
    [warning] = site.call("PATCH", "/studies/resnet-1", {"yields_to": ["net", "nett"]}).json()["warnings"]
    assert "'nett'" in warning and "there are: net)" in warning
    assert site.call("PUT", "/studies/x", {"owner": "o", "title": "a\nb"}).status_code == 422


def test_a_study_begins_with_the_terms_that_were_there_beforehand_under_its_title(site: Site) -> None:
    site.store.put_study(Study(name="resnet", terms=StudyTerms(weight=3.0, quota=4)))
    site.call("PUT", "/studies/resnet-1", {"owner": "o", "title": "resnet", "terms": {"quota": 2}})
    found = {each["name"]: each for each in site.call("GET", "/studies").json()}["resnet-1"]
    assert (found["weight"], found["quota"]) == (3.0, 2)


def test_a_study_lives_where_the_scheduler_looks(site: Site) -> None:
    asked = {"owner": "o", "namespace": "team"}
    refused = site.call("PUT", "/studies/team.s", asked)
    assert refused.status_code == 422
    assert (
        "namespace 'team', which this scheduler does not manage; besides its own it manages: none"
        in refused.json()["detail"]
    )
    site.service.site.namespaces = ("team",)
    assert site.call("PUT", "/studies/team.s", asked).status_code == 200


def test_a_question_reaches_the_driver_and_its_answer_the_replica(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.api.replica_side.ANSWER_SECONDS", 0.05)
    name = site.with_replica()
    site.call("PUT", "/studies/s", {"owner": "one"})
    question = {"id": "q1", "method": "suggest_float", "arguments": {"name": "lr"}}
    assert site.replica("POST", "/call", question, name=name).json() == {"answer": None}
    unserved = site.call("POST", "/studies/s/news", {"owner": "one", "wait": 0}).json()
    assert unserved["questions"] == []
    waiting = {"owner": "one", "wait": 0, "trials": [name.rpartition("-")[0]]}
    news = site.call("POST", "/studies/s/news", waiting).json()
    [asked] = news["questions"]
    assert (asked["method"], asked["arguments"]) == ("suggest_float", {"name": "lr"})
    site.call("POST", "/studies/s/answers", {"id": asked["id"], "answer": {"value": 0.1}})
    # Another trial that asks under the same id has asked nothing that was answered.
    other = site.with_replica(number=1)
    assert site.replica("POST", "/call", question, name=other).json() == {"answer": None}
    assert site.replica("POST", "/call", question, name=name).json() == {"answer": {"value": 0.1}}


def test_a_driver_hears_how_its_trials_stand_once_a_second(site: Site) -> None:
    trial_id = site.with_replica().rpartition("-")[0]
    site.call("PUT", "/studies/s", {"owner": "one"})
    asked = {"owner": "one", "wait": 0, "trials": [trial_id], "seen": {trial_id: ""}}
    first, second = (site.call("POST", "/studies/s/news", asked).json()["live"] for _ in range(2))
    assert [trial["trial_id"] for trial in first] == [trial_id]
    assert second == []
    # A poll that waits hears of it when its turn has come.
    third = site.call("POST", "/studies/s/news", {**asked, "wait": 5.0}).json()["live"]
    assert [trial["trial_id"] for trial in third] == [trial_id]


def test_nobody_learns_of_the_api_without_a_token(site: Site) -> None:
    for path in ("/docs", "/redoc", "/openapi.json", "/nothing"):
        assert site.http.get(path).status_code == 401
    assert site.http.get("/healthz").status_code == 200
    assert "/trials" in site.call("GET", "/openapi.json", token=TOKENS.for_reading()).json()["paths"]


def test_a_poke_that_comes_before_the_poll_it_is_meant_for_is_not_lost(site: Site) -> None:
    site.call("PUT", "/studies/s", {"owner": "one"})
    heard = site.call("POST", "/studies/s/news", {"owner": "one", "wait": 0}).json()["heard"]
    site.call("POST", "/studies/s/poke")
    began = time.monotonic()
    told = site.call("POST", "/studies/s/news", {"owner": "one", "wait": 100.0, "heard": heard}).json()
    assert time.monotonic() - began < 50.0
    assert told["heard"] > heard


def test_watch_tells_of_a_generation_once_published(site: Site) -> None:
    name = site.with_replica()
    assert site.replica("GET", "/watch", name=name, params={"wait": 0}).json() == {"generation": None}
    [replica] = site.store.replicas()
    assert replica.contact_at is not None
    site.replica("POST", "/ready", {"join_epoch": None}, name=name)
    assert site.store.replicas()[0].state is ReplicaState.READY
    site.loop.tick()
    site.loop.tick()
    told = site.replica("GET", "/watch", name=name, params={"wait": 0}).json()["generation"]
    assert told == {"number": 1, "members": [name], "nodes": ["n0"], "join_epoch": None, "member": False}
    assert site.replica("GET", "/watch", name=name, params={"wait": 0, "after": 1}).json() == {"generation": None}


def test_watch_tells_of_losses_in_the_generation_that_trains(site: Site) -> None:
    name = site.with_replica()
    [replica] = site.store.replicas()
    other = replace(replica, replica_id="other", launch_index=1, slot=1)
    site.store.add_replica(other)
    trial = site.store.trial(replica.trial_id)
    site.store.save_trial(replace(trial, generation=1, members=(name, "other")))

    def heard(known: str) -> Any:
        return site.replica("GET", "/watch", name=name, params={"wait": 0, "after": 1, "known_lost": known}).json()

    assert heard("") == {"generation": None}
    site.store.update_replica("other", state=ReplicaState.GONE, gone_at=1.0)
    assert heard("") == {"generation": None, "lost": ["other"]}
    # Once is enough.
    assert heard("other") == {"generation": None}
    # One that is to join is waited for by those that hand it their state.
    trial = site.store.trial(replica.trial_id)
    site.store.save_trial(replace(trial, published=2, published_members=(name, "joiner")))
    told = site.replica("GET", "/watch", name=name, params={"wait": 0, "after": 2, "known_lost": "other"}).json()
    assert told == {"generation": None, "lost": ["other", "joiner"]}


def test_watch_tells_a_replica_once_that_it_is_to_end(site: Site) -> None:
    """What its process is sent as a signal may not be heard there."""
    name = site.with_replica()

    def heard(**known: Any) -> Any:
        return site.replica("GET", "/watch", name=name, params={"wait": 0, **known}).json()

    assert heard(told=False) == {"generation": None}
    site.store.update_replica(name, stop_requested_at=5.0)
    assert heard(told=False) == {"leave": True, "generation": None}
    assert heard(told=True) == heard() == {"generation": None}


def test_hints_and_reports_are_checked(site: Site) -> None:
    name = site.with_replica()
    bounds = {"init_batch": 8, "max_batch": 16, "min_atomic": 1, "max_atomic": None, "accumulation": False}
    good = {"generation": 1, "hints": {"bounds": bounds, "progress": 5.0}}
    assert site.replica("POST", "/hints", good, name=name).status_code == 200
    bad = {"generation": 1, "hints": {"bounds": bounds, "progress": -5.0}}
    refused = site.replica("POST", "/hints", bad, name=name)
    assert refused.status_code == 422
    assert "progress is -5.0" in refused.json()["detail"]
    for progress, status in ((1.0, 200), (-1.0, 422)):
        body = {"reports": [{"step": 0, "value": None, "progress": progress}]}
        assert site.replica("POST", "/reports", body, name=name).status_code == status


def test_several_reports_come_at_once_and_each_is_checked(site: Site) -> None:
    name = site.with_replica()
    good = [{"step": step, "value": step / 2, "progress": 0.0} for step in range(3)]
    assert site.replica("POST", "/reports", {"reports": good}, name=name).status_code == 200
    assert [(each.step, each.value) for each in site.store.reports("s")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    bad = {"step": 9, "value": 1.0, "progress": -1.0}
    assert site.replica("POST", "/reports", {"reports": [*good, bad]}, name=name).status_code == 422
    assert site.replica("POST", "/reports", {"reports": good * 400}, name=name).status_code == 422
    assert len(site.store.reports("s")) == 3


def offer(site: Site, trial_id: str, generation: int) -> None:
    site.store.save_trial(replace(site.store.trial(trial_id), published=generation))


def test_rendezvous_keys_belong_to_a_trial_and_a_generation(site: Site) -> None:
    name = site.with_replica()
    trial_id = name.rpartition("-")[0]
    offer(site, trial_id, 2)
    body = {"generation": 2, "key": "k", "value": "dg=="}
    assert site.replica("PUT", "/rendezvous", body, name=name).status_code == 200

    def get(generation: int) -> Any:
        params = {"generation": generation, "key": "k", "wait": 0}
        return site.replica("GET", "/rendezvous", name=name, params=params).json()["value"]

    assert get(2) == "dg=="
    assert get(3) is None
    offer(site, trial_id, 4)
    site.replica("PUT", "/rendezvous", {**body, "generation": 4}, name=name)
    assert get(2) is None


def test_a_key_comes_with_the_others_of_its_group(site: Site) -> None:
    name = site.with_replica()
    offer(site, name.rpartition("-")[0], 1)
    values = {"control/0/0": "dg==", "control/0/1": "dw==", "data/0/0": "eA==", "control/0/2": "A" * 2000}
    for key, value in values.items():
        site.replica("PUT", "/rendezvous", {"generation": 1, "key": key, "value": value}, name=name)
    params = {"generation": 1, "key": "control/0/1", "wait": 0}
    answer = site.replica("GET", "/rendezvous", name=name, params=params).json()
    assert answer == {"value": "dw==", "beside": {"control/0/0": "dg==", "control/0/1": "dw=="}}
    answer = site.replica("GET", "/rendezvous", name=name, params={**params, "key": "control/0/3"}).json()
    assert answer == {"value": None, "beside": {}}


def test_keys_of_generations_that_are_not_on_offer_are_refused(site: Site) -> None:
    """Else a replica could fill the scheduler's memory with them."""
    name = site.with_replica()
    offer(site, name.rpartition("-")[0], 7)
    answers = [
        site.replica("PUT", "/rendezvous", {"generation": number, "key": "k", "value": "v"}, name=name).status_code
        for number in range(10, 0, -1)
    ]
    assert answers == [422, 422, 422, 200, 200, 422, 422, 422, 422, 422]
    assert len(site.service.rendezvous) == 2


def test_keys_of_trials_that_are_over_do_not_stay(site: Site) -> None:
    for number in range(CROWD + 10):
        site.service.rendezvous[f"gone-{number}", 1] = {"k": "v"}
    name = site.with_replica()
    offer(site, name.rpartition("-")[0], 1)
    site.replica("PUT", "/rendezvous", {"generation": 1, "key": "k", "value": "v"}, name=name)
    assert len(site.service.rendezvous) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/ready", {"join_epoch": 2**63}),
        ("/ready", {"join_epoch": -1}),
        ("/ready", {"join_epoch": 1, "seconds": -1.0}),
        ("/switched", {"generation": 2**63}),
        ("/abandoned", {"generation": 2**200}),
        ("/hints", {"generation": 2**63, "hints": {}}),
        ("/hints", {"generation": 1, "hints": {"bounds": [], "observations": {}}}),
        ("/hints", {"generation": 1, "hints": {"bounds": {"init_batch": 10**400, "max_batch": 1}, "observations": []}}),
        ("/reports", {"reports": [{"step": 2**63, "value": 1.0, "progress": 1.0}]}),
        ("/reports", {"reports": [{"step": 1, "value": 1.0, "progress": -1.0}]}),
        ("/outcome", {"kind": "error", "message": "x" * 20_001}),
        ("/warning", {"message": "x" * 4001}),
        ("/rendezvous", {"generation": 1, "key": "k" * 513, "value": "v"}),
    ],
)
def test_what_cannot_be_kept_is_refused_in_a_sentence(site: Site, path: str, body: Any) -> None:
    method = "PUT" if path == "/rendezvous" else "POST"
    refused = site.replica(method, path, body, name=site.with_replica())
    assert refused.status_code == 422
    assert refused.json()["detail"]


@pytest.mark.parametrize(
    ("members", "published", "next_members", "counts"),
    [
        pytest.param((), 0, (), True, id="nobody trains"),
        pytest.param((), 1, ("mine",), True, id="it begins"),
        pytest.param(("mine",), 1, ("mine",), True, id="a member"),
        pytest.param(("a",), 1, ("a",), False, id="has yet to join"),
        pytest.param(("a",), 2, ("a", "mine"), True, id="is let in"),
        pytest.param(("a", "mine"), 2, ("a",), False, id="leaves"),
        pytest.param(("mine",), 2, (), False, id="pauses"),
    ],
)
def test_a_command_that_leaves_or_has_yet_to_join_does_not_say_how_the_trial_ended(
    site: Site, members: tuple[str, ...], published: int, next_members: tuple[str, ...], counts: bool
) -> None:
    replica = site.with_replica()
    trial_id = replica.rpartition("-")[0]
    named = [tuple(replica if name == "mine" else name for name in names) for names in (members, next_members)]
    site.store.save_trial(
        replace(
            site.store.trial(trial_id),
            generation=min(published, 1) if members else 0,
            published=published,
            members=named[0],
            published_members=named[1],
        )
    )
    ended = {"kind": "value", "value": None, "of_command": True}
    assert site.replica("POST", "/outcome", ended, name=replica).status_code == 200
    assert (site.store.trial(trial_id).outcome is not None) == counts


def test_hints_are_kept_as_they_were_understood(site: Site) -> None:
    name = site.with_replica()
    hints = Hints(bounds=BatchBounds(init_batch=64, max_batch=64), epoch=3).to_json()
    site.replica("POST", "/hints", {"generation": 1, "hints": {**hints, "more": "x" * 1000}}, name=name)
    trial_id = name.rpartition("-")[0]
    assert site.store.hints([trial_id]) == {trial_id: hints}


def test_a_trial_that_reports_and_warns_without_end_fills_no_disk(site: Site) -> None:
    name = site.with_replica()
    trial_id = name.rpartition("-")[0]
    for number in range(MOST_WARNINGS + 50):
        assert site.replica("POST", "/warning", {"message": str(number)}, name=name).status_code == 200
    warnings = [entry for entry in site.store.history(trial_id) if entry.what == "warning"]
    assert len(warnings) == MOST_WARNINGS
    assert "further ones are dropped" in warnings[-1].reason.sentence
    few = Allowance(3)
    assert [few.take("a") for _ in range(5)] == [2, 1, 0, -1, -2]
    assert few.take("b") == 2


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "nul\0", "..", "a/b", "x" * 256, ""])
def test_names_that_no_log_could_hold_are_refused(site: Site, name: str) -> None:
    assert site.call("POST", "/trials", {"study": name, "number": 0, "entrypoint": "m:f"}).status_code == 422
    if "/" not in name and name not in ("", ".."):
        assert site.call("PUT", f"/studies/{quote(name)}", {"owner": "o"}).status_code == 422


def test_a_process_that_waits_alone_is_told_to_run_again_with_the_other_one(site: Site) -> None:
    """Both make up one replica: where one runs its code again, it needs the other one for that."""
    trial_id = site.submit(max_replicas=2, slots_per_replica=2)["trial_id"]
    names = [f"{trial_id}-{letter}" for letter in "abcd"]
    for index, name in enumerate(names):
        site.store.add_replica(
            ReplicaRecord(replica_id=name, trial_id=trial_id, node="n0", slot=index, launch_index=index)
        )
    trial = site.store.trial(trial_id)
    site.store.save_trial(replace(trial, generation=1, published=1, members=tuple(names[:2])))
    for name in names[2:]:
        assert site.replica("GET", "/position?attempt=1", name=name).status_code == 200
        site.replica("POST", "/ready", {"join_epoch": 0, "attempt": 1}, name=name)
    assert not any(row.retry_join for row in site.store.replicas(trial_id=trial_id))
    # One of them has seen by itself that the offer is over.
    site.replica("GET", "/position?attempt=2", name=names[2])
    rows = {row.replica_id: row for row in site.store.replicas(trial_id=trial_id)}
    assert (rows[names[2]].retry_join, rows[names[3]].retry_join) == (True, True)
    news = site.replica("GET", "/watch?wait=0", name=names[3]).json()
    assert (news["retry_join"], news["attempt"]) == (True, 2)
    for name in names[2:]:
        site.replica("POST", "/ready", {"join_epoch": 0, "attempt": 2}, name=name)
    assert not any(row.retry_join for row in site.store.replicas(trial_id=trial_id))
