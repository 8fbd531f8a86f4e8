"""What a page is told: everything once, then each change; who gets in, and what may be done there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from dist_core.goodput import BatchBounds, GradientStatistics, Hints
from scheduler.api import action_routes
from scheduler.api.client_access import ClientAccess
from scheduler.api.page.board import Board
from scheduler.api.page.feed import PageFeed
from scheduler.api.page.rows import number_of, shown_parameters
from scheduler.api.page.sessions import LINK_SECONDS, SESSION_SECONDS, Sessions
from scheduler.api.service import Wish
from scheduler.api.tokens import Access, Identity, Secrets, Tokens
from tests.support.site import TOKENS, Site
from trials.errors import StoreUnavailable
from trials.record import Outcome, Reason, ReplicaState, Report, Study
from trials.states import TrialState

OWNER = Identity(Access.OWNER)
PAGE = {"X-Elastune-Page": "1"}
BOUNDS = BatchBounds(init_batch=32, max_batch=64, min_atomic=8, max_atomic=64)


def board_of(site: Site, client: Identity = OWNER) -> Board:
    return Board(site.service, ClientAccess(site.store), client)


def told(change: str | None) -> dict[str, Any]:
    assert change is not None
    found: dict[str, Any] = json.loads(change)
    return found


# ---------------------------------------------------------------------- changes


def test_a_board_tells_everything_and_then_what_changes(site: Site) -> None:
    site.store.put_study(Study(name="s", title="my study", direction="maximize", user="ada"))
    first = site.submit()["trial_id"]
    board = board_of(site)
    everything = told(board.everything())
    assert [trial["id"] for trial in everything["trials"]] == [first]
    assert everything["studies"][0]["title"] == "my study"
    assert everything["nodes"] == [{"name": "n0", "slots": 2, "kind": "", "reserved_for": [], "given_by": ""}]
    assert everything["access"] == "owner"
    assert board.look() is None, "nothing has happened"
    second = site.submit(1)["trial_id"]
    site.store.put_parameters(first, {"lr": 0.1})
    change = told(board.look())
    assert {trial["id"] for trial in change["trials"]} == {first, second}
    assert board.look() is None
    report = Report(first, 3, 0.5, 64.0, 7.0)
    site.store.add_report(report)
    board.note_report(report)
    change = told(board.look())
    assert change["reports"] == [[first, 3, 0.5, 64.0, 7.0]]
    row = change["trials"][0]
    assert (row["latest"], row["step"], row["parameters"]) == (0.5, 3, {"lr": 0.1})


def test_slots_on_the_board_are_the_stores_intervals(site: Site) -> None:
    name = site.with_replica()
    board = board_of(site)
    trial_id = name.partition("-")[0]
    assert told(board.everything())["intervals"] == [[name, trial_id, "n0", 0, 1.0, None]]
    site.store.update_replica(name, state=ReplicaState.GONE, gone_at=9.0)
    assert told(board.look())["intervals"] == [[name, trial_id, "n0", 0, 1.0, 9.0]]
    assert told(board.everything())["intervals"] == [[name, trial_id, "n0", 0, 1.0, 9.0]]


def test_a_study_sees_others_slots_as_taken_and_nothing_more(site: Site) -> None:
    name = site.with_replica()
    mine = site.submit(0, study="mine")["trial_id"]
    board = board_of(site, Identity(Access.STUDY, "mine"))
    everything = told(board.everything())
    assert [trial["id"] for trial in everything["trials"]] == [mine]
    assert everything["intervals"] == [["n0 0 1.0", "", "n0", 0, 1.0, None]]
    assert name.partition("-")[0] not in json.dumps(everything)
    other = Report(name.partition("-")[0], 1, 1.0, 0.0)
    board.note_report(other)
    assert board.look() is None


def test_a_trial_that_is_forgotten_goes_from_the_board(site: Site) -> None:
    name = site.with_replica()
    trial_id = name.partition("-")[0]
    board = board_of(site)
    site.store.forget_trials([trial_id])
    assert told(board.look())["gone"] == [trial_id]
    everything = told(board.everything())
    assert (everything["trials"], everything["intervals"]) == ([], [])


def test_a_live_trials_row_shows_how_it_trains_and_an_ended_ones_what_it_gave(site: Site) -> None:
    trial_id = site.submit()["trial_id"]
    hints = Hints(bounds=BOUNDS, progress=50.0, target_progress=200.0, global_batch=48, goodput=12.5, learning_rate=0.2)
    site.store.put_hints(trial_id, hints.to_json())
    board = board_of(site)
    row = told(board.everything())["trials"][0]
    assert (row["batch"], row["goodput"], row["done"], row["rate"]) == (48, 12.5, 0.25, 0.2)
    ended = replace(
        site.store.trial(trial_id),
        state=TrialState.SUCCEEDED,
        finished_at=9.0,
        reason=Reason(code="finished", sentence="returned 0.5"),
    )
    site.store.set_outcome(trial_id, Outcome(kind="value", value={"float": 0.5}))
    site.store.save_trial(ended)
    row = told(board.look())["trials"][0]
    assert (row["value"], row["finished"], row["state"]) == (0.5, 9.0, "succeeded")
    assert "batch" not in row


def test_values_of_any_kind_become_numbers_or_nothing() -> None:
    assert [number_of(value) for value in (3, 0.5, True, {"float": 1.5}, [1, {"float": 2.0}])] == [
        3.0,
        0.5,
        1.0,
        1.5,
        [1.0, 2.0],
    ]
    for value in (None, "0.5", float("nan"), {"float": "nan"}, [], [1, "a"], {"a": 1, "b": 2}):
        assert number_of(value) is None
    shown = shown_parameters({"a": 1, "b": float("inf"), "c": "x" * 900, "d": None, "e": [1, 2]})
    assert shown == {"a": 1, "b": "inf", "c": "x" * 200, "d": None, "e": "[1, 2]"}


def test_open_pages_get_the_same_changes_and_a_slow_one_everything_anew(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.api.page.feed.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("scheduler.api.page.feed.LONGEST_QUEUE", 3)
    site.submit(0)

    async def run() -> None:
        feed = PageFeed()
        access = ClientAccess(site.store)

        def following() -> AsyncGenerator[str]:
            return feed.follow(site.service, access, OWNER)

        first, second = following(), following()
        begun = await asyncio.wait_for(anext(first), 5.0)
        assert len(told(begun)["trials"]) == 1
        await asyncio.wait_for(anext(second), 5.0)
        assert feed.pages == 2
        site.submit(1)
        change = await asyncio.wait_for(anext(first), 5.0)
        assert len(told(change)["trials"]) == 1
        # The second has not read meanwhile; in time it is told everything.
        for number in range(2, 9):
            site.submit(number)
            await asyncio.wait_for(anext(first), 5.0)
        caught_up: set[str] = set()
        while len(caught_up) < 9:
            caught_up |= {trial["id"] for trial in told(await asyncio.wait_for(anext(second), 5.0))["trials"]}
        await first.aclose()
        # Who comes back is told everything anew.
        again = following()
        assert len(told(await asyncio.wait_for(anext(again), 5.0))["trials"]) == 9
        await again.aclose()
        await second.aclose()
        assert feed.pages == 0

    asyncio.run(run())


# ---------------------------------------------------------------------- getting in


def test_a_link_opens_once_and_a_cookie_stays_until_its_token_is_replaced() -> None:
    now = 1000.0
    tokens = Tokens(Secrets(owner="the owner's own token", key="ab" * 32), save=lambda _: None)
    sessions = Sessions(tokens, lambda: now)
    code = sessions.link_code(OWNER)
    assert sessions.redeem(code) == OWNER
    assert sessions.redeem(code) is None
    assert sessions.redeem("nonsense") is None
    late, lasting = sessions.link_code(OWNER), sessions.link_code(Identity(Access.READ), lasting=True)
    now += LINK_SECONDS + 1.0
    assert sessions.redeem(late) is None
    assert sessions.redeem(lasting) == Identity(Access.READ)
    cookies = {who: sessions.cookie_for(who) for who in (OWNER, Identity(Access.READ), Identity(Access.STUDY, "ä b"))}
    for who, cookie in cookies.items():
        assert sessions.identify(cookie) == who
        assert Sessions(tokens, lambda: now).identify(cookie) == who, "another process of the same scheduler"
    forged = cookies[Identity(Access.READ)].replace("read", "owner", 1)
    for wrong in (forged, cookies[OWNER][:-1] + "x", "", "a.b.c.d", "owner..999999999999.", "replica.eA.9999999999.x"):
        assert sessions.identify(wrong) is None
    waiting = sessions.link_code(OWNER)
    tokens.replace(Access.OWNER)
    assert sessions.redeem(waiting) is None, "a link is worth no more than the token that it was made with"
    assert sessions.identify(cookies[OWNER]) is None
    assert sessions.identify(cookies[Identity(Access.READ)]) == Identity(Access.READ)
    now += SESSION_SECONDS + 1.0
    assert sessions.identify(cookies[Identity(Access.READ)]) is None


def test_a_browser_gets_in_by_a_link_or_a_token_and_reads_with_its_cookie(site: Site) -> None:
    assert site.http.get("/overview").status_code == 401
    assert site.http.post("/page/session", json={"code": "nonsense"}, headers=PAGE).status_code == 401
    assert site.http.post("/page/session", json={"token": "nonsense"}, headers=PAGE).status_code == 401
    assert site.http.post("/page/session", json={"token": TOKENS.for_replica("t-1")}, headers=PAGE).status_code == 401
    path = site.call("POST", "/page/links", {"access": "owner"}).json()["path"]
    code = path.removeprefix("/#code=")
    assert site.http.post("/page/session", json={"code": code}).status_code == 403, "another site cannot send this"
    answer = site.http.post("/page/session", json={"code": code}, headers=PAGE)
    assert answer.json() == {"access": "owner"}
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]
    assert site.http.get("/overview").status_code == 200
    trial_id = site.submit()["trial_id"]
    assert site.http.post(f"/trials/{trial_id}/cancel", json={}).status_code == 403
    other = {**PAGE, "Origin": "http://elsewhere"}
    assert site.http.post(f"/trials/{trial_id}/cancel", json={}, headers=other).status_code == 403
    assert site.http.post(f"/trials/{trial_id}/cancel", json={}, headers=PAGE).status_code == 200
    assert site.http.delete("/page/session", headers=PAGE).status_code == 200
    assert site.http.get("/overview").status_code == 401


def test_cookies_of_other_servers_on_the_host_are_no_matter(site: Site) -> None:
    cookie = site.service.sessions.cookie_for(OWNER)
    for other in ('a={"b":1}; ', "broken; =; x", ""):
        headers = {"Cookie": f"{other}; elastune_0={cookie}; z=1"}
        assert site.http.get("/overview", headers=headers).status_code == 200
    assert site.http.get("/overview", headers={"Cookie": "elastune_0=nonsense"}).status_code == 401


def test_a_readers_page_reads_only(site: Site) -> None:
    trial_id = site.submit(payload={"secret": "x"})["trial_id"]
    path = site.call("POST", "/page/links", {"access": "read"}).json()["path"]
    site.http.post("/page/session", json={"code": path.partition("=")[2]}, headers=PAGE)
    assert site.http.get(f"/page/trials/{trial_id}").status_code == 200
    assert site.http.get("/page/story").status_code == 200
    for method, refused in (
        ("POST", f"/trials/{trial_id}/cancel"),
        ("POST", f"/trials/{trial_id}/pause"),
        ("POST", "/page/what-if"),
    ):
        assert site.http.request(method, refused, json={}, headers=PAGE).status_code == 403
    link = site.http.post("/page/links", json={"access": "owner"}, headers=PAGE).json()["path"]
    site.http.post("/page/session", json={"code": link.partition("=")[2]}, headers=PAGE)
    assert site.http.get("/whoami").json()["access"] == "read", "a link is for no more than its maker may do"


def test_the_pages_files_are_open_and_nothing_else_is(site: Site) -> None:
    page = site.http.get("/")
    assert page.status_code in (200, 503)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    for path in ("/assets/nothing.js", "/assets/..%2findex.html", "/assets/%2e%2e"):
        assert site.http.get(path).status_code in (401, 404)
    for path in ("/page/story", "/page/usage", "/page/trials/x", "/page/what-if"):
        assert site.http.get(path).status_code == 401


# ---------------------------------------------------------------------- what views ask for


def test_a_trials_view_has_its_curves_and_what_was_weighed(site: Site) -> None:
    name = site.with_replica()
    trial_id = name.partition("-")[0]
    statistics = GradientStatistics(sqr=1.0, var=2.0)
    hints = Hints(bounds=BOUNDS, global_batch=64, goodput=8.0, statistics=statistics, learning_rate=0.4)
    body = {"generation": 0, "hints": hints.to_json()}
    now = time.time()
    site.service.clock = lambda: now
    assert site.replica("POST", "/hints", body, name=name).status_code == 200
    assert site.replica("POST", "/hints", body, name=name).status_code == 200
    site.service.clock = time.time
    for step in range(3):
        report = {"step": step, "value": step / 2, "progress": 32.0 * step}
        site.replica("POST", "/reports", {"reports": [report]}, name=name)
    waits = site.submit(7, min_replicas=2, max_replicas=2)["trial_id"]
    site.loop.tick()
    view = site.call("GET", f"/page/trials/{trial_id}").json()
    assert [point[:3] for point in view["reports"]] == [[0, 0.0, 0.0], [1, 0.5, 32.0], [2, 1.0, 64.0]]
    assert all(point[3] is not None for point in view["reports"])
    assert len(view["measurements"]) == 1, "moments closer together than a second are not kept"
    measured = view["measurements"][0]
    assert (measured["batch"], measured["noise_scale"], measured["learning_rate"]) == (64, 64.0, 0.4)
    # Twice the batch is worth 3 / (2/2 + 1) steps: 0.75 of its examples count.
    assert measured["step_seconds"] == pytest.approx(64 * 0.75 / 8.0)
    assert view["replicas"][0]["replica_id"] == name
    story = site.call("GET", "/page/story").json()
    mine = [entry for entry in story if entry["trial"] == waits]
    assert mine[0]["what"] == "waits"
    assert mine[0]["numbers"], "a reason comes with what was weighed"
    waiting = site.call("GET", "/page/waiting").json()
    assert set(waiting["reasons"]) >= {mine[0]["code"]}
    curves = site.call("GET", f"/page/curves?trial={trial_id}&trial=unknown").json()
    assert list(curves) == [trial_id]


def test_slot_hours_are_told_by_study_and_day(site: Site) -> None:
    name = site.with_replica()
    site.store.put_study(Study(name="s", title="mine", user="ada"))
    site.store.update_replica(name, state=ReplicaState.GONE, gone_at=3601.0)
    rows = site.call("GET", "/page/usage").json()
    assert [(row["title"], row["user"], row["hours"], row["trials"]) for row in rows] == [("mine", "ada", 1.0, 1)]


def test_studies_of_one_title_go_by_their_names(site: Site) -> None:
    for name, title in (("a-1", "same"), ("a-2", "same"), ("b-1", "other")):
        site.store.put_study(Study(name=name, title=title))
        site.submit(0, study=name)
    titles = [row["title"] for row in site.call("GET", "/rows").json()["trials"]]
    assert titles == ["a-1", "a-2", "other"]
    assert len(site.call("GET", "/rows?study=same").json()["trials"]) == 2


def test_importance_is_not_told_from_a_few_trials(site: Site) -> None:
    site.store.put_study(Study(name="s"))
    assert "there are 0" in site.call("GET", "/page/importance?study=s").json()["why"]
    assert site.call("GET", "/page/importance?study=nope").status_code == 404


# ---------------------------------------------------------------------- what may be done


def test_a_pause_lasts_until_somebody_lets_the_trial_go_on(site: Site) -> None:
    site.call("PUT", "/studies/s", {"owner": "me"})
    trial_id = site.submit()["trial_id"]
    assert site.call("POST", f"/trials/{trial_id}/resume").status_code == 409
    assert site.call("POST", f"/trials/{trial_id}/pause", {"why": "lunch"}).status_code == 200
    assert site.store.trial(trial_id).hold == "paused by request: lunch"
    # Its driver still waits for it, and a repeated submission is none of a hurry.
    site.call("POST", "/studies/s/news", {"owner": "me", "trials": [trial_id], "wait": 0})
    site.submit()
    assert site.store.trial(trial_id).hold is not None
    site.loop.tick()
    assert site.store.trial(trial_id).reason.sentence.startswith("paused by request")
    assert site.call("POST", f"/trials/{trial_id}/resume").status_code == 200
    assert site.store.trial(trial_id).hold is None
    site.store.hold([trial_id], "its driver is gone")
    refused = site.call("POST", f"/trials/{trial_id}/resume")
    assert refused.status_code == 409
    assert "its driver is gone" in refused.json()["detail"]


def test_a_command_runs_again_with_other_arguments(site: Site) -> None:
    command = ["python", "train.py", "--lr", "0.1", "--epochs=3"]
    trial_id = site.submit(driven=False, payload={"command": command})["trial_id"]
    assert site.store.trial(trial_id).parameters == {"lr": 0.1, "epochs": 3}
    made = site.call("POST", f"/trials/{trial_id}/clone", {"parameters": {"lr": 0.01}}).json()
    assert made["number"] == 1
    clone = site.store.trial(made["trial_id"])
    assert clone.spec.payload["command"] == ["python", "train.py", "--lr", "0.01", "--epochs=3"]
    assert clone.parameters == {"lr": 0.01, "epochs": 3}
    refused = site.call("POST", f"/trials/{trial_id}/clone", {"parameters": {"depth": 3}})
    assert refused.status_code == 422
    assert "it has lr, epochs" in refused.json()["detail"]


def test_readers_see_no_arguments_and_nobody_sees_inline_code(site: Site) -> None:
    command = ["python", "-c", "print(1)", "--api-key", "SECRET", "--lr", "0.1"]
    trial_id = site.submit(driven=False, payload={"command": command})["trial_id"]
    assert "c" not in site.store.trial(trial_id).parameters
    reader = TOKENS.for_reading()
    for path in ("/rows", f"/page/trials/{trial_id}"):
        assert "SECRET" in site.call("GET", path).text
        assert "SECRET" not in site.call("GET", path, token=reader).text
    assert "SECRET" not in board_of(site, Identity(Access.READ)).everything()


def test_clones_made_at_once_have_numbers_of_their_own(site: Site) -> None:
    trial_id = site.submit(study="jobs", driven=False, payload={"command": ["train", "--lr", "0.1"]})["trial_id"]

    def clone(lr: float) -> str:
        made = site.call("POST", f"/trials/{trial_id}/clone", {"parameters": {"lr": lr}})
        return str(made.json()["trial_id"])

    with ThreadPoolExecutor(4) as many:
        made = list(many.map(clone, (0.2, 0.3, 0.4, 0.5)))
    assert len(set(made)) == 4
    assert [site.store.trial(name).parameters["lr"] for name in made] == [0.2, 0.3, 0.4, 0.5]


def test_jobs_and_sweeps_keep_out_of_each_others_studies(site: Site) -> None:
    site.call("PUT", "/studies/s", {"owner": "me"})
    job = {"study": "s", "entrypoint": "m:f", "driven": False}
    refused = site.call("POST", "/trials", job)
    assert refused.status_code == 409
    assert "belongs to a sweep" in refused.json()["detail"]
    site.call("POST", "/studies/s/detach", {"owner": "me"})
    site.submit(0)
    assert site.call("POST", "/trials", job).status_code == 409
    made = site.call("POST", "/trials", {**job, "study": "jobs of mine", "user": "ada"})
    assert made.status_code == 200
    assert [study.user for study in site.store.studies() if study.name == "jobs of mine"] == ["ada"]


def test_what_is_still_needed_is_not_forgotten(site: Site) -> None:
    site.service.forget = lambda _: None
    name = site.with_replica()
    trial_id = name.partition("-")[0]
    body = {"trials": [trial_id]}
    assert "stop it first" in site.call("POST", "/trials/forget", body).json()["detail"]
    ended = replace(site.store.trial(trial_id), state=TrialState.SUCCEEDED, finished_at=1.0)
    site.store.save_trial(ended)
    assert "is ending" in site.call("POST", "/trials/forget", body).json()["detail"]
    site.store.update_replica(name, state=ReplicaState.GONE, gone_at=2.0)
    site.call("PUT", "/studies/s", {"owner": "me", "terms": {"budget_slot_hours": 5.0}})
    assert "has a running sweep" in site.call("POST", "/trials/forget", body).json()["detail"]
    site.call("POST", "/studies/s/detach", {"owner": "me"})
    of_study = site.call("POST", "/trials/forget", body, token=TOKENS.for_study("s"))
    assert (of_study.status_code, "has a budget" in of_study.json()["detail"]) == (403, True)
    assert site.call("POST", "/trials/forget", body).json() == {"forgotten": 1}


def test_what_a_failed_look_found_is_told_by_the_next(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    name = site.with_replica()
    board = board_of(site)
    site.submit(1)
    site.store.update_replica(name, state=ReplicaState.GONE, gone_at=2.0)
    read = site.store.replicas

    def away(**options: Any) -> Any:
        if not options.get("live_only", True):
            raise StoreUnavailable("the disk is away")
        return read(**options)

    with monkeypatch.context() as patch:
        patch.setattr(site.store, "replicas", away)
        with pytest.raises(StoreUnavailable):
            board.look()
    change = told(board.look())
    assert len(change["trials"]) == 2
    assert change["intervals"][0][-1] == 2.0


def test_a_tuners_trial_runs_again_if_its_driver_takes_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_routes, "DRIVER_SECONDS", 0.05)
    site.call("PUT", "/studies/s", {"owner": "me"})
    trial_id = site.submit()["trial_id"]
    told_so = {"owner": "me", "trials": [trial_id], "wait": 0, "parameters": {trial_id: {"lr": 0.1, "deep": True}}}
    assert site.call("POST", "/studies/s/news", told_so).status_code == 200
    assert site.store.trial(trial_id).parameters == {"lr": 0.1, "deep": True}
    refused = site.call("POST", f"/trials/{trial_id}/clone", {"parameters": {"momentum": 1}})
    assert "it has deep, lr" in refused.json()["detail"]
    silent = site.call("POST", f"/trials/{trial_id}/clone", {"parameters": {"lr": 0.2}})
    assert silent.status_code == 409
    assert "did not answer" in silent.json()["detail"]

    async def wish() -> tuple[str, str]:
        wishes = site.service.wishes
        asked = [asyncio.create_task(wishes.make("s", Wish({"lr": value}, None, 0), 5.0)) for value in (0.2, 0.3)]
        await asyncio.sleep(0)
        first, second = wishes.open_ones("s")
        assert first["parameters"] == {"lr": 0.2}
        wishes.answer("s", first["id"], "")
        wishes.answer("s", second["id"], "no room")
        wishes.answer("other", second["id"], "not mine")
        answers = (await asked[0], await asked[1])
        assert wishes.open_ones("s") == []
        return answers

    assert asyncio.run(wish()) == ("", "no room")
