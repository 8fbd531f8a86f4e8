"""What tuners, the command line and dashboards call, with the owner's token."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, Field

from dist_core.goodput import Hints
from scheduler.api.callers import Client, allow, calling_client
from scheduler.api.metrics import metrics_text
from scheduler.api.packages import LARGEST_BYTES, PackageRefused
from scheduler.api.service import Service
from scheduler.api.tokens import Access, Identity
from scheduler.errors import RequestRefused
from scheduler.knowledge.coming import Plans
from scheduler.knowledge.priorities import effective_priorities, unknown_names
from scheduler.loop.happenings import OWNER_LEASE_SECONDS
from scheduler.runtime import runtime
from trials.checks import LONGEST_NAME, check_name
from trials.errors import InvalidStudyTerms, UnknownTrial
from trials.log_files import tail
from trials.plain_words import one_line
from trials.record import Study, TrialRecord
from trials.spec import TrialSpec
from trials.store.base import HistoryEntry
from trials.terms import StudyTerms

LONGEST_WAIT_SECONDS = 8.0
RENEWED_SECONDS = 1.0
"""A driver's lease is not written down more often, however often it polls."""
LOG_BYTES = 1024 * 1024
BRIEF = 500
"""Characters of an error in lists."""
OWNERS_TERMS = ("weight", "priority", "yields_to", "quota", "budget_slot_hours")
"""What a study may not take for itself."""
MOST_LOG_BYTES = 64 * 1024 * 1024


class PlansBody(BaseModel):
    at_a_time: int = Field(ge=0, le=100_000)
    left: int | None = Field(default=None, ge=0)


class StudyBody(BaseModel):
    direction: str = Field(default="minimize", pattern="^(minimize|maximize)$")
    owner: str = Field(max_length=64)
    title: str = Field(default="", max_length=LONGEST_NAME)
    """What people call it; empty: by its name."""
    namespace: str = Field(default="", max_length=LONGEST_NAME)
    """Where its trials are to live on a cluster; its name and title begin with it then."""
    terms: dict[str, Any] = Field(default_factory=dict)
    """Changes to the study's terms; what is not named stays."""


class TokenBody(BaseModel):
    access: str = Field(pattern="^(owner|study|read)$")
    study: str = Field(default="", max_length=LONGEST_NAME)
    replace: bool = False


class Detach(BaseModel):
    owner: str = Field(max_length=64)


class Answer(BaseModel):
    id: str
    answer: dict[str, Any]


class Waiting(BaseModel):
    owner: str = Field(max_length=64)
    trials: list[str] = Field(default_factory=list)
    seen: dict[str, str] = Field(default_factory=dict)
    """What the driver last heard of each trial, as this API gave it; of others it hears nothing while they run."""
    known: list[str] = Field(default_factory=list)
    """Questions that the driver is working on."""
    answers: list[Answer] = Field(default_factory=list)
    """To questions that it has been told of."""
    heard: int | None = None
    """Number of the latest news in the last answer: at any other one there is more. None: what comes from now on."""
    wait: float = 20.0
    plans: PlansBody | None = None
    """What the driver is going to submit."""


class Cancel(BaseModel):
    why: str = Field(default="cancelled by request", max_length=500)


def client_routes(service: Service) -> APIRouter:
    store = service.store
    changing = threading.Lock()
    """Held while terms are read, checked against the other studies', and written."""

    routes = APIRouter(dependencies=[Depends(calling_client)], tags=["clients"])

    def trial_for(client: Identity, trial_id: str, *, read: bool = False) -> TrialRecord:
        """Another study's trial is as unknown as one that never was."""
        record = store.trial(trial_id)
        if client.access is not Access.STUDY:
            allow(client, read=read)
        elif record.spec.study not in own_studies(client):
            raise UnknownTrial(f"no trial is called {trial_id!r}; `elastune ls` lists them")
        return record

    def own_studies(client: Identity) -> set[str]:
        """What a study's token opens: studies that are called so, and the one of that name that is to be made."""
        known = store.studies()
        new = {client.subject} - {study.name for study in known}
        return new | {study.name for study in known if study.called == client.subject}

    def allow_study(client: Identity, name: str) -> None:
        if client.access is not Access.STUDY:
            allow(client)
        elif name not in own_studies(client):
            raise HTTPException(403, f"this token is for study {client.subject!r}, not for {name!r}")

    def seen_studies(client: Identity) -> list[Study]:
        return [each for each in store.studies() if client.access is not Access.STUDY or each.called == client.subject]

    def seen_trials(client: Identity) -> list[TrialRecord]:
        if client.access is not Access.STUDY:
            return store.trials()
        mine = own_studies(client)
        return [record for record in store.trials() if record.spec.study in mine]

    def has_trials(name: str) -> bool:
        return any(record.spec.study == name for record in store.trials())

    def find_study(name: str) -> Study | None:
        return next((study for study in store.studies() if study.name == name), None)

    def known_study(name: str) -> Study:
        study = find_study(name)
        if study is None:
            raise HTTPException(404, f"no study is called {name!r}")
        return study

    def warnings_about(study: Study) -> list[str]:
        known = store.studies()
        others = ", ".join(sorted({each.called for each in known} - {study.called})) or "none"
        return [
            f"yields_to names {name!r}, and no study here is called that; there are: {others}. It has an effect once "
            "there is one"
            for name in unknown_names(study, known)
        ]

    def changed_terms(client: Identity, wanted: Study, changes: dict[str, Any]) -> StudyTerms:
        everybody = {study.name: study for study in store.studies()}
        # One that was there beforehand under its title says what its sweeps begin with.
        before = everybody.get(wanted.name, everybody.get(wanted.title, wanted)).terms.to_json()
        unknown = set(changes) - set(before)
        if unknown:
            raise HTTPException(422, f"a study has no {min(unknown)!r}; it has {', '.join(sorted(before))}")
        try:
            terms = StudyTerms.from_json(before | changes)
            effective_priorities([*everybody.values(), replace(wanted, terms=terms)])
        except (InvalidStudyTerms, TypeError) as error:
            raise HTTPException(422, str(error)) from error
        unequal = [term for term in OWNERS_TERMS if terms.to_json()[term] != before[term]]
        if unequal and client.access is not Access.OWNER:
            raise HTTPException(403, f"a study's own token cannot change its {unequal[0]}; the owner's is needed")
        return terms

    @routes.get("/whoami")
    def whoami(client: Client) -> dict[str, str]:
        """What the caller's token opens."""
        return {"access": client.access.value, "subject": client.subject}

    @routes.get("/metrics")
    def metrics(client: Client) -> Response:
        """For Prometheus."""
        allow(client, read=True)
        return Response(metrics_text(service), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/studies")
    def studies(client: Client) -> list[dict[str, Any]]:
        return [{"name": study.name, "title": study.title, **study.terms.to_json()} for study in seen_studies(client)]

    @routes.patch("/studies/{name}")
    def change(client: Client, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Change what is asked for a study: weight, priority, quota, goal; also while it runs."""
        allow_study(client, name)
        study = known_study(name)
        with changing:
            terms = changed_terms(client, study, body)
            store.set_terms(name, terms)
        service.loop.wake()
        return {"terms": terms.to_json(), "warnings": warnings_about(replace(study, terms=terms))}

    @routes.put("/studies/{name}")
    def attach(client: Client, name: str, body: StudyBody) -> dict[str, Any]:
        """Register a study with its driver. One driver at a time; a dead one's lease has to run out first."""
        check_name("the study's name", name)
        if one_line(body.title) != body.title:
            raise HTTPException(422, f"the study's title is {body.title!r:.80}; it must be one line")
        if body.namespace and body.namespace not in service.namespaces:
            others = ", ".join(service.namespaces) or "none"
            raise HTTPException(
                422,
                f"the study is to live in namespace {body.namespace!r}; beside its own this scheduler looks after: "
                f"{others}. Leave ELASTUNE_NAMESPACE out for its own",
            )
        if find_study(name) is not None or (client.access is Access.STUDY and has_trials(name)):
            allow_study(client, name)
        allow(client, study=body.title or name)
        # Of two drivers that come at once, the later one has to see the earlier.
        with changing:
            now = service.clock()
            for study in store.studies():
                fresh = study.owner_seen_at is not None and now - study.owner_seen_at < OWNER_LEASE_SECONDS
                if study.name == name and study.owner not in (None, body.owner) and fresh:
                    raise HTTPException(
                        409,
                        f"study {name!r} is being driven by another process; wait for it to end, or use another name",
                    )
            study = Study(name=name, title=body.title, direction=body.direction, owner=body.owner, owner_seen_at=now)
            study = replace(study, terms=changed_terms(client, study, body.terms))
            store.put_study(study)
        service.loop.wake()
        return {
            "warnings": warnings_about(study),
            "slots": sum(node.slots for node in service.nodes()),
            "runs_elsewhere": service.packages is not None,
            "runtime": runtime() if service.packages is None else None,
            "emulated": service.emulated,
        }

    @routes.post("/studies/{name}/detach")
    def detach(client: Client, name: str, body: Detach) -> None:
        """The driver leaves: the study's trials save their state and give their slots back."""
        allow_study(client, name)
        known_study(name)
        store.disown_study(name, body.owner)
        service.loop.wake()
        service.announce()

    @routes.post("/studies/{name}/news")
    async def news(client: Client, name: str, body: Waiting) -> dict[str, Any]:
        """Long poll of a driver: open questions of its trials, and how those it waits for ended. Renews its lease."""
        allow_study(client, name)
        if client.access is not Access.OWNER:
            await asyncio.to_thread(lambda: [trial_for(client, trial_id) for trial_id in {*body.trials, *body.seen}])
        await asyncio.to_thread(renew, name, body)
        for each in body.answers:
            service.mailbox.answer(name, each.id, each.answer)
        if body.plans is not None:
            service.loop.note_plans(name, Plans(body.plans.at_a_time, body.plans.left))
        deadline = service.clock() + min(body.wait, LONGEST_WAIT_SECONDS)
        known = set(body.known)
        heard = service.mailbox.news(name).number if body.heard is None else body.heard
        while True:
            changed, news = service.changed, service.mailbox.news(name)
            found = await asyncio.to_thread(_look, name, body)
            questions = [each for each in service.mailbox.open_questions(name, body.trials) if each["id"] not in known]
            left = deadline - service.clock()
            if any(found.values()) or questions or news.number != heard or left <= 0:
                return {**found, "questions": questions, "heard": news.number}
            waiting = {asyncio.ensure_future(event.wait()) for event in (news.more, changed)}
            _, pending = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()

    def _look(name: str, body: Waiting) -> dict[str, list[Any]]:
        if known_study(name).owner != body.owner:
            raise HTTPException(409, f"study {name!r} has been given to another driver, or let go")
        return {
            "finished": _finished(body.trials),
            "live": _news_of(body.seen),
            "missing_packages": _missing_packages(body.trials),
        }

    def renew(name: str, body: Waiting) -> None:
        study = find_study(name)
        seen_at = study.owner_seen_at if study is not None and study.owner == body.owner else None
        noted = seen_at is not None and service.clock() - seen_at < RENEWED_SECONDS
        if not noted and not store.touch_study(name, body.owner, service.clock()):
            known_study(name)
            raise HTTPException(409, f"study {name!r} has another driver now; this one's lease ran out")
        if any(record.hold is not None for record in map(store.trial, body.trials)):
            store.release(body.trials)
            service.loop.wake()

    def _finished(trial_ids: list[str]) -> list[dict[str, Any]]:
        records = [store.trial(trial_id) for trial_id in trial_ids]
        return [_summary(record) for record in records if record.state.is_final]

    def _missing_packages(trial_ids: list[str]) -> list[str]:
        """Packed working folders that the driver has to send again, because the scheduler has lost them."""
        if service.packages is None:
            return []
        wanted = {store.trial(trial_id).spec.package for trial_id in trial_ids} - {""}
        return [digest for digest in sorted(wanted) if service.packages.find(digest) is None]

    @routes.put("/packages/{digest}")
    async def put_package(client: Client, digest: str, request: Request) -> None:
        """Keep a packed working folder."""
        allow(client, study=client.subject)
        if service.packages is None:
            raise HTTPException(422, "this scheduler starts replicas where sweeps are started; it takes no packages")
        if int(request.headers.get("content-length", "0")) > LARGEST_BYTES:
            raise HTTPException(413, f"the package is larger than {LARGEST_BYTES} bytes")
        content = await request.body()
        try:
            await asyncio.to_thread(service.packages.put, digest, content)
        except PackageRefused as error:
            raise HTTPException(422, str(error)) from error
        except OSError as error:
            raise HTTPException(503, f"the package cannot be kept: {error}") from error

    @routes.get("/packages/{digest}")
    def has_package(client: Client, digest: str) -> dict[str, bool]:
        allow(client, study=client.subject)
        return {"here": service.packages is not None and service.packages.find(digest) is not None}

    def _news_of(seen: dict[str, str]) -> list[dict[str, Any]]:
        """Of running trials whose state, size or goodput is another one than the driver has seen."""
        records = {trial_id: store.trial(trial_id) for trial_id in seen}
        hints = store.hints([trial_id for trial_id, record in records.items() if not record.state.is_final])
        news = []
        for trial_id, record in records.items():
            if record.state.is_final:
                continue
            shown = {**_summary(record), **_live(service, record, hints)}
            goodput = shown.get("goodput")
            mark = f"{record.state.value} {shown['replicas']} {'' if goodput is None else f'{goodput:.2g}'}"
            if mark != seen[trial_id]:
                news.append({**shown, "seen": mark})
        return news

    @routes.post("/studies/{name}/poke")
    async def poke(client: Client, name: str) -> None:
        """Have the driver's poll return, so that it asks anew with what it waits for now."""
        allow_study(client, name)
        service.mailbox.notify(name)

    @routes.post("/studies/{name}/answers")
    async def answers(client: Client, name: str, body: Answer) -> None:
        allow_study(client, name)
        service.mailbox.answer(name, body.id, body.answer)

    @routes.post("/trials")
    def submit(client: Client, document: dict[str, Any]) -> dict[str, Any]:
        """Submit a trial; the same (study, number) again returns the one that is there."""
        try:
            spec = TrialSpec.from_json(document)
        except TypeError as error:
            raise HTTPException(422, f"not a trial: {error}") from error
        allow_study(client, spec.study)
        check_name("the study's name", spec.study)
        slots = sum(node.slots for node in service.nodes())
        if spec.min_replicas > slots and not service.grows:
            raise HTTPException(
                422,
                f"min_replicas is {spec.min_replicas} but the cluster has {slots} slots; lower it or add slots",
            )
        record = store.submit(spec, service.clock())
        store.release([record.trial_id])
        service.loop.decide_anew()
        service.loop.wake()
        return _summary(record)

    @routes.get("/trials")
    def trials(client: Client) -> list[dict[str, Any]]:
        return [_brief(record) for record in seen_trials(client)]

    @routes.get("/trials/{trial_id}")
    def trial(client: Client, trial_id: str) -> dict[str, Any]:
        record = trial_for(client, trial_id, read=True)
        reads_only = client.access is Access.READ
        return {
            **(_brief(record) if reads_only else _summary(record)),
            "emulated": service.emulated,
            # What code is run, with which arguments and secrets, is nothing for a display on the wall.
            "spec": None if reads_only else record.spec.to_json(),
            "history": [_entry(entry) for entry in store.history(trial_id)],
            "replicas": [
                {**asdict(replica), "state": replica.state.value}
                for replica in store.replicas(trial_id=trial_id, live_only=False)
            ],
        }

    @routes.get("/trials/{trial_id}/log")
    def log(client: Client, trial_id: str, most_bytes: int = LOG_BYTES) -> list[dict[str, Any]]:
        """What each of the trial's replicas printed, or the end of it."""
        trial_for(client, trial_id)
        most = max(0, min(most_bytes, MOST_LOG_BYTES))
        return [{"replica_id": path.stem, "words": tail(path, most)} for path in service.loop.logs(trial_id)]

    @routes.post("/trials/{trial_id}/cancel")
    def cancel(client: Client, trial_id: str, body: Cancel) -> None:
        trial_for(client, trial_id)
        store.request_cancel(trial_id, body.why)
        service.loop.wake()

    @routes.get("/overview")
    def overview(client: Client) -> dict[str, Any]:
        """Everything a live display shows."""
        records = seen_trials(client)
        mine = {record.trial_id for record in records}
        known = seen_studies(client)
        hints = store.hints([record.trial_id for record in records if not record.state.is_final])
        latest: dict[str, dict[str, Any]] = {}
        for study in known:
            for report in store.reports(study.name):
                latest[report.trial_id] = {"step": report.step, "value": report.value}
        return {
            "now": service.clock(),
            "nodes": [asdict(node) for node in service.nodes()],
            "emulated": service.emulated,
            "studies": [asdict(study) for study in known],
            "trials": [
                {**_brief(record), **_live(service, record, hints), "latest": latest.get(record.trial_id)}
                for record in records
            ],
            "changes": [_entry(entry) for entry in store.resizes() if entry.trial_id in mine],
        }

    @routes.get("/trials/{trial_id}/why")
    def why(client: Client, trial_id: str) -> dict[str, Any]:
        """The policy's last decision about a trial, and every change of size before it."""
        record = trial_for(client, trial_id, read=True)
        grant = service.loop.latest_grants.get(trial_id) if not record.state.is_final else None
        error = service.loop.policy_error
        return {
            "trial": _brief(record),
            "emulated": service.emulated,
            "policy": service.loop.policy_name,
            "policy_error": None if error is None else str(error),
            "held_slots": len(store.replicas(trial_id=trial_id)),
            "grant": None
            if grant is None
            else {
                "placement": dict(grant.placement),
                "reason": asdict(grant.reason),
                "numbers": dict(grant.numbers),
            },
            "changes": [_entry(entry) for entry in store.history(trial_id) if entry.resizes],
        }

    @routes.get("/timeline")
    def timeline(client: Client) -> dict[str, Any]:
        """Who held which slot when, and every change of size with its reason."""
        records = seen_trials(client)
        mine = {record.trial_id for record in records}
        return {
            "now": service.clock(),
            "emulated": service.emulated,
            "nodes": [asdict(node) for node in service.nodes()],
            "intervals": [asdict(each) for each in store.slot_intervals() if each.trial_id in mine],
            "trials": [_brief(record) for record in records],
            "changes": [_entry(entry) for entry in store.resizes() if entry.trial_id in mine],
        }

    @routes.get("/openapi.json", include_in_schema=False)
    def openapi(client: Client, request: Request) -> dict[str, Any]:
        """What this API offers."""
        allow(client, study=client.subject, read=True)
        app: FastAPI = request.app
        return app.openapi()

    @routes.post("/tokens")
    def give_token(client: Client, body: TokenBody) -> dict[str, str]:
        """A study's token or a reader's, or a new one in the place of any."""
        allow(client)
        access = Access(body.access)
        study = find_study(body.study)
        name = body.study if study is None else study.called
        if access is Access.STUDY and not name:
            raise HTTPException(422, "the study's name is empty; a study's token is for one study")
        if body.replace:
            try:
                return {"token": service.tokens.replace(access, name)}
            except RequestRefused as error:
                raise HTTPException(409, str(error)) from error
        if access is Access.OWNER:
            raise HTTPException(422, "the owner's token is the one that you came with")
        return {"token": service.tokens.for_reading() if access is Access.READ else service.tokens.for_study(name)}

    return routes


def _summary(record: TrialRecord) -> dict[str, Any]:
    return {
        "trial_id": record.trial_id,
        "study": record.spec.study,
        "number": record.spec.number,
        "state": record.state.value,
        "reason": asdict(record.reason),
        "replicas": len(record.members),
        "min_replicas": record.spec.min_replicas,
        "max_replicas": record.spec.max_replicas,
        "submitted_at": record.submitted_at,
        "finished_at": record.finished_at,
        "losses": record.losses,
        "outcome": asdict(record.outcome) if record.outcome is not None else None,
    }


def _brief(record: TrialRecord) -> dict[str, Any]:
    """For lists of all trials: how a trial ended, without all that it said."""
    summary = _summary(record)
    outcome = record.outcome
    if outcome is not None:
        value = outcome.value if outcome.kind == "value" and len(str(outcome.value)) <= BRIEF else None
        message = outcome.message[:BRIEF]
        summary["outcome"] = {
            "kind": outcome.kind,
            "value": value,
            "error_type": outcome.error_type,
            "message": message,
        }
    return summary


def _live(service: Service, record: TrialRecord, hints: dict[str, dict[str, Any]]) -> dict[str, Any]:
    view = service.loop.latest_views.get(record.trial_id)
    document = hints.get(record.trial_id)
    live: dict[str, Any] = {
        "slots": view.held_slots if view is not None else 0,
        "promise": view.promise if view is not None else None,
    }
    if document is not None:
        known = Hints.from_json(document)
        share = known.progress / known.target_progress if known.target_progress else None
        live |= {"batch": known.global_batch, "goodput": known.goodput, "epoch": known.epoch, "share_done": share}
    return live


def _entry(entry: HistoryEntry) -> dict[str, Any]:
    return asdict(entry)
