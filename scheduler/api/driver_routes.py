"""Routes for a study's driver while its trials run."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import HTTPException
from pydantic import BaseModel, Field

from scheduler.allocation.admission import BUDGET_USED
from scheduler.api.action_routes import is_paused_by_people
from scheduler.api.client_access import ClientAccess, identity_of
from scheduler.api.hot_routes import HotRoute, HotRoutes
from scheduler.api.page.rows import shown_parameters
from scheduler.api.service import Service
from scheduler.api.summaries import live, summary
from scheduler.api.tokens import Access, Identity
from scheduler.knowledge.coming import Plans
from trials.record import TrialRecord

LONGEST_WAIT_SECONDS = 8.0
RENEWED_SECONDS = 1.0
"""A driver's lease is not written down more often, however often it polls."""
SHOWN_SECONDS = 1.0
"""A driver hears of sizes and goodput no more often: only people look at them. All else that it waits for is looked up
as often, and at once where one of its study's trials ends."""


class PlansBody(BaseModel):
    at_a_time: int = Field(ge=0, le=100_000)
    left: int | None = Field(default=None, ge=0)


class Answer(BaseModel):
    id: str
    answer: dict[str, Any]


class Waiting(BaseModel):
    owner: str = Field(max_length=64)
    trials: list[str] = Field(default_factory=list)
    seen: dict[str, str] = Field(default_factory=dict)
    """State of each trial that the driver last heard, as this API gave it.

    Of others it hears nothing while they run.
    """
    known: list[str] = Field(default_factory=list)
    """Questions that the driver is working on."""
    answers: list[Answer] = Field(default_factory=list)
    """Answers to questions that it has been told of."""
    heard: int | None = None
    """Number of the latest news in the last answer: at any other one there is more. None: what comes from now on."""
    wait: float = 20.0
    plans: PlansBody | None = None
    """Trials that the driver is going to submit."""
    ends_when_spent: bool = False
    """It wants to hear when the study's budget is used."""
    parameters: dict[str, dict[str, Any]] = Field(default_factory=dict, max_length=10_000)
    """Parameters that the tuner tries with each trial, as far as that has not been told yet."""
    granted: dict[str, str] = Field(default_factory=dict, max_length=1000)
    """Answers to wishes for trials: why not, or an empty text where it will run one."""


def driver_routes(service: Service, access: ClientAccess) -> list[HotRoute]:
    store = service.store
    hot = HotRoutes(identity_of)
    shown_at: dict[str, float] = {}
    """When the driver of a study was last told how its running trials stand."""

    @hot.post("/studies/{name}/news", Waiting)
    async def news(client: Identity, body: Waiting, name: str) -> dict[str, Any]:
        """Long poll of a driver: open questions of its trials, and how those it waits for ended. Renews its lease."""
        access.allow_study(client, name)
        if client.access is not Access.OWNER:
            for trial_id in {*body.trials, *body.seen}:
                access.trial_for(client, trial_id)
        await renew(name, body)
        if body.parameters:
            await asyncio.to_thread(note_parameters, client, body.parameters)
        for each in body.answers:
            service.mailbox.answer(name, each.id, each.answer)
        if body.plans is not None:
            service.loop.decisions.note_plans(name, Plans(body.plans.at_a_time, body.plans.left))
        for wish, refusal in body.granted.items():
            service.wishes.answer(name, wish, refusal)
        deadline = service.clock() + min(body.wait, LONGEST_WAIT_SECONDS)
        known_ids = set(body.known)
        heard = service.mailbox.news(name).number if body.heard is None else body.heard
        while True:
            changed, news, now = service.study_news.of(name), service.mailbox.news(name), service.clock()
            next_shown = shown_at.get(name, 0.0) + SHOWN_SECONDS
            if now >= next_shown:
                shown_at[name], next_shown = now, now + SHOWN_SECONDS
            news_found = _look(name, body, shows=shown_at[name] == now)
            questions = [
                each for each in service.mailbox.open_questions(name, body.trials) if each["id"] not in known_ids
            ]
            wishes = service.wishes.open_ones(name)
            left = deadline - now
            if any(news_found.values()) or questions or wishes or news.number != heard or left <= 0:
                return {**news_found, "questions": questions, "wishes": wishes, "heard": news.number}
            waiting = {asyncio.ensure_future(event.wait()) for event in (news.more, changed)}
            longest = min(left, next_shown - now)
            _, pending = await asyncio.wait(waiting, timeout=longest, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()

    def _look(name: str, body: Waiting, *, shows: bool) -> dict[str, list[Any]]:
        if access.known_study(name).owner != body.owner:
            why = "its lease ran out, or another process took over; run the sweep again with resume=True"
            raise HTTPException(409, f"this process no longer drives study {name!r}: {why}")
        waited_for = [store.trial(trial_id) for trial_id in body.trials]
        return {
            "finished": [summary(record) for record in waited_for if record.state.is_final],
            "live": _news_of(body.seen) if shows else [],
            "missing_packages": _missing_packages(waited_for),
            "spent": [True] if body.ends_when_spent and _is_spent(waited_for) else [],
        }

    def _is_spent(records: list[TrialRecord]) -> bool:
        """Tell whether the study's budget is used up: all of these trials wait, and for that alone."""
        live_ones = [record for record in records if not record.state.is_final]
        return bool(live_ones) and all(
            not record.state.holds_slots and record.reason.sentence == BUDGET_USED for record in live_ones
        )

    async def renew(name: str, body: Waiting) -> None:
        study = access.find_study(name)
        seen_at = study.owner_seen_at if study is not None and study.owner == body.owner else None
        noted = seen_at is not None and service.clock() - seen_at < RENEWED_SECONDS
        if not noted and not await asyncio.to_thread(store.touch_study, name, body.owner, service.clock()):
            access.known_study(name)
            raise HTTPException(409, f"study {name!r} has another driver now, because this driver's lease ran out")
        # What people have paused, its driver does not let go on.
        held = [
            record.trial_id
            for record in map(store.trial, body.trials)
            if record.hold is not None and not is_paused_by_people(record)
        ]
        if held:
            await asyncio.to_thread(store.release, held)
            service.loop.wake()

    def note_parameters(client: Identity, told: dict[str, dict[str, Any]]) -> None:
        for trial_id, parameters in told.items():
            record = access.trial_for(client, trial_id)
            shown = shown_parameters(parameters)
            if {**record.parameters, **shown} != record.parameters:
                store.put_parameters(trial_id, shown)

    def _missing_packages(records: list[TrialRecord]) -> list[str]:
        """Digests of what the driver has to send again, because the scheduler has lost it."""
        wanted = {digest for record in records for digest in (record.spec.package, *record.spec.code)} - {""}
        return [digest for digest in sorted(wanted) if service.packages.find(digest) is None]

    def _news_of(seen: dict[str, str]) -> list[dict[str, Any]]:
        """Return running trials whose state, size or goodput differs from what the driver has seen."""
        records = {trial_id: store.trial(trial_id) for trial_id in seen}
        hints = store.hints([trial_id for trial_id, record in records.items() if not record.state.is_final])
        news = []
        for trial_id, record in records.items():
            if record.state.is_final:
                continue
            shown = {**summary(record), **live(service, record, hints)}
            goodput = shown.get("goodput")
            mark = f"{record.state.value} {shown['replicas']} {'' if goodput is None else f'{goodput:.2g}'}"
            if mark != seen[trial_id]:
                news.append({**shown, "seen": mark})
        return news

    @hot.post("/studies/{name}/poke")
    async def poke(client: Identity, name: str) -> None:
        """Have the driver's poll return, so that it asks anew with what it waits for now."""
        access.allow_study(client, name)
        service.mailbox.notify(name)

    @hot.post("/studies/{name}/answers", Answer)
    async def answers(client: Identity, body: Answer, name: str) -> None:
        access.allow_study(client, name)
        service.mailbox.answer(name, body.id, body.answer)

    return hot.routes
