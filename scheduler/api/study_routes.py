"""Studies: their terms, and who drives them."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends, HTTPException
from pydantic import BaseModel, Field

from scheduler.api.client_access import Client, ClientAccess, allow, calling_client
from scheduler.api.service import Service
from scheduler.api.tokens import Access, Identity
from scheduler.knowledge.accounts import effective_priorities, unknown_names
from scheduler.loop.observations import is_driven
from scheduler.runtime import runtime
from trials.checks import LONGEST_NAME, check_name
from trials.errors import InvalidStudyTerms
from trials.plain_words import one_line
from trials.record import Study
from trials.terms import StudyTerms

OWNERS_TERMS = ("weight", "priority", "yields_to", "quota", "budget_slot_hours")
"""Terms that a study may not set for itself."""


class StudyBody(BaseModel):
    direction: str = Field(default="minimize", pattern="^(minimize|maximize)$")
    owner: str = Field(max_length=64)
    takes_over: str = Field(default="", max_length=64)
    """A driver that is known to be dead, whose lease need not run out."""
    title: str = Field(default="", max_length=LONGEST_NAME)
    """Name of the study for people; empty: its name."""
    namespace: str = Field(default="", max_length=LONGEST_NAME)
    """Namespace of its trials on a cluster; its name and title begin with it then."""
    user: str = Field(default="", max_length=LONGEST_NAME)
    """Name of who runs it, as the driver's machine has it."""
    terms: dict[str, Any] = Field(default_factory=dict)
    """Changes to the study's terms; what is not named stays."""


class Detach(BaseModel):
    owner: str = Field(max_length=64)


def study_routes(service: Service, access: ClientAccess) -> APIRouter:
    store = service.store
    changing = threading.Lock()
    """Held while terms are read, checked against the other studies', and written."""

    routes = APIRouter(dependencies=[Depends(calling_client)], tags=["clients"])

    def warnings_about(study: Study) -> list[str]:
        all_studies = store.studies()
        others = ", ".join(sorted({each.called for each in all_studies} - {study.called})) or "none"
        return [
            f"yields_to names {name!r}, but there is no such study here (there are: {others}). It takes effect once "
            "that study exists"
            for name in unknown_names(study, all_studies)
        ]

    def changed_terms(client: Identity, wanted: Study, changes: dict[str, Any]) -> StudyTerms:
        everybody = {study.name: study for study in store.studies()}
        # One that was there beforehand under its title says what its sweeps begin with.
        before = everybody.get(wanted.name, everybody.get(wanted.title, wanted)).terms.to_json()
        unknown = set(changes) - set(before)
        if unknown:
            raise HTTPException(422, f"a study has no setting {min(unknown)!r}; it has {', '.join(sorted(before))}")
        try:
            terms = StudyTerms.from_json(before | changes)
            effective_priorities([*everybody.values(), replace(wanted, terms=terms)])
        except (InvalidStudyTerms, TypeError) as error:
            raise HTTPException(422, str(error)) from error
        unequal = [term for term in OWNERS_TERMS if terms.to_json()[term] != before[term]]
        if unequal and client.access is not Access.OWNER:
            raise HTTPException(403, f"a study's own token cannot change its {unequal[0]}; use the owner's token")
        return terms

    @routes.get("/where")
    def where(client: Client) -> dict[str, Any]:
        """Tell whether replicas run on another machine than those who submit, and with what."""
        return {
            "runs_elsewhere": service.site.runs_elsewhere,
            "runtime": None if service.site.runs_elsewhere else runtime(),
            "slots": service.slots,
        }

    @routes.get("/studies")
    def studies(client: Client) -> list[dict[str, Any]]:
        return [
            {"name": study.name, "title": study.title, "driver": study.owner, **study.terms.to_json()}
            for study in access.seen_studies(client)
        ]

    @routes.patch("/studies/{name}")
    def change(client: Client, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Change what is asked for a study: weight, priority, quota, goal; also while it runs."""
        access.allow_study(client, name)
        study = access.known_study(name)
        with changing:
            terms = changed_terms(client, study, body)
            store.set_terms(name, terms)
        service.loop.wake()
        return {"terms": terms.to_json(), "warnings": warnings_about(replace(study, terms=terms))}

    @routes.put("/studies/{name}")
    def attach(client: Client, name: str, body: StudyBody) -> dict[str, Any]:
        """Register a study with its driver. One driver at a time; the lease of one that may live has to run out."""
        check_name("the study's name", name)
        if one_line(body.title) != body.title:
            raise HTTPException(422, f"the study's title is {body.title!r:.80}; it must be one line")
        if body.namespace and body.namespace not in service.site.namespaces:
            others = ", ".join(service.site.namespaces) or "none"
            raise HTTPException(
                422,
                f"the study asks for namespace {body.namespace!r}, which this scheduler does not manage; besides its "
                f"own it manages: {others}. Leave ELASTUNE_NAMESPACE unset to use the scheduler's own",
            )
        if access.find_study(name) is not None or (client.access is Access.STUDY and access.has_trials(name)):
            access.allow_study(client, name)
        allow(client, study=body.title or name)
        # Of two drivers that come at once, the later one has to see the earlier.
        with changing:
            now = service.clock()
            for study in store.studies():
                followed = study.owner in (body.owner, body.takes_over)
                if study.name == name and not followed and is_driven(study, now):
                    raise HTTPException(
                        409,
                        f"study {name!r} is being driven by another process; wait for it to end, or use another name",
                    )
            study = Study(
                name=name,
                title=body.title,
                direction=body.direction,
                owner=body.owner,
                owner_seen_at=now,
                user=one_line(body.user),
            )
            study = replace(study, terms=changed_terms(client, study, body.terms))
            store.put_study(study)
        service.loop.wake()
        return {
            "warnings": warnings_about(study),
            "slots": service.slots,
            "runs_elsewhere": service.site.runs_elsewhere,
            "runtime": None if service.site.runs_elsewhere else runtime(),
            "emulated": service.site.emulated,
        }

    @routes.post("/studies/{name}/detach")
    def detach(client: Client, name: str, body: Detach) -> None:
        """Let the driver go: the study's trials save their state and give their slots back."""
        access.allow_study(client, name)
        access.known_study(name)
        store.disown_study(name, body.owner)
        service.loop.wake()
        service.announce()

    return routes
