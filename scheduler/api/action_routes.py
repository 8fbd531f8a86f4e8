"""Actions of people on a trial beside ending it: pause and resume, run once more, run with other parameters."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends, HTTPException
from pydantic import BaseModel, Field

from scheduler.api.client_access import Client, ClientAccess, calling_client
from scheduler.api.page.rows import shown_parameters
from scheduler.api.service import Service, Wish
from scheduler.api.summaries import summary
from scheduler.api.tokens import Access
from scheduler.knowledge.command_lines import parameters_of, with_parameters
from trials.record import TrialRecord
from trials.spec import TrialSpec

OWNERS_PAUSE = "paused by request"
"""Beginning of the reason of a trial that people hold; its driver does not let it go."""
DRIVER_SECONDS = 12.0
"""Seconds for a driver to say whether it runs a trial that people wish for."""


class Pause(BaseModel):
    why: str = Field(default="", max_length=300)


class Forget(BaseModel):
    trials: list[str] = Field(max_length=100_000)


class Clone(BaseModel):
    parameters: dict[str, Any] = Field(default_factory=dict, max_length=200)
    """Parameters to replace."""
    forks: bool = False
    """True to begin with the state of the trial, instead of at the start."""
    more_epochs: int = Field(default=0, ge=0, le=2**31 - 1)
    """Epochs to train beyond those of the trial, for one that begins with its state."""


def action_routes(service: Service, access: ClientAccess) -> APIRouter:
    store = service.store
    routes = APIRouter(dependencies=[Depends(calling_client)], tags=["clients"])

    @routes.post("/trials/{trial_id}/pause")
    def pause(client: Client, trial_id: str, body: Pause) -> dict[str, Any]:
        """Have a trial save its state and give its slots back until it is resumed."""
        record = access.trial_for(client, trial_id)
        if record.state.is_final:
            raise HTTPException(409, f"trial {trial_id} is {record.state.value}; a finished trial cannot be paused")
        store.hold([trial_id], OWNERS_PAUSE + (f": {body.why}" if body.why else "; `elastune resume` continues it"))
        service.loop.decisions.decide_anew()
        service.loop.wake()
        return summary(store.trial(trial_id))

    @routes.post("/trials/{trial_id}/resume")
    def resume(client: Client, trial_id: str) -> dict[str, Any]:
        record = access.trial_for(client, trial_id)
        if not is_paused_by_people(record):
            why = f"it is {record.state.value}" if record.hold is None else record.hold
            raise HTTPException(409, f"trial {trial_id} was not paused by a user: {why}")
        store.release([trial_id])
        service.loop.decisions.decide_anew()
        service.loop.wake()
        return summary(store.trial(trial_id))

    @routes.post("/trials/{trial_id}/clone")
    async def clone(client: Client, trial_id: str, body: Clone) -> dict[str, Any]:
        """Make a further trial like this one, with some parameters changed; its tuner is asked where it has one."""
        record = await asyncio.to_thread(access.trial_for, client, trial_id)
        if body.more_epochs and not body.forks:
            raise HTTPException(422, "more_epochs is for a trial that begins with another one's state: set forks too")
        if body.forks:
            await asyncio.to_thread(access.refuse_parent, client, record.spec.study, trial_id, service.loop)
        if record.spec.driven:
            return await ask_driver(record, body)
        return await asyncio.to_thread(submit_like, record, body)

    @routes.post("/trials/forget")
    def forget(client: Client, body: Forget) -> dict[str, int]:
        """Forget trials that are over, with their reports, histories and logs."""
        records = [access.trial_for(client, trial_id) for trial_id in body.trials]
        if service.forget is None:
            raise HTTPException(
                409, "this scheduler keeps its trials as Kubernetes objects; delete them with `kubectl delete`"
            )
        held = {row.trial_id for row in store.replicas()}
        studies = {study.name: study for study in store.studies()}
        for record in records:
            study = studies.get(record.spec.study)
            if not record.state.is_final or record.trial_id in held:
                said = record.state.value if not record.state.is_final else "ending"
                raise HTTPException(
                    409, f"trial {record.trial_id} is {said}; stop it first, and wait until it has ended"
                )
            if study is not None and study.owner is not None:
                raise HTTPException(
                    409,
                    f"study {study.called!r} has a running sweep, which may still compare its trials; wait until the "
                    "sweep has ended",
                )
            if study is not None and study.terms.budget_slot_hours is not None and client.access is not Access.OWNER:
                raise HTTPException(
                    403,
                    f"study {study.called!r} has a budget, which counts what its finished trials used; only the "
                    "owner's token can delete them",
                )
        service.forget(body.trials)
        return {"forgotten": len(records)}

    async def ask_driver(record: TrialRecord, body: Clone) -> dict[str, Any]:
        changed = body.parameters
        unknown = set(changed) - set(record.parameters)
        if unknown:
            known = ", ".join(sorted(record.parameters)) or "no known parameters"
            raise HTTPException(422, f"the trial has no parameter {min(unknown)!r}; it has {known}")
        study = record.spec.study
        service.mailbox.notify(study)
        try:
            parameters = {**record.parameters, **changed}
            wish = Wish(
                parameters,
                record.spec.number if body.forks else None,
                record.spec.more_epochs + body.more_epochs if body.forks else 0,
            )
            refusal = await service.wishes.make(study, wish, DRIVER_SECONDS)
        except asyncio.TimeoutError:
            raise HTTPException(
                409,
                f"the driver of study {study!r} did not answer; start its sweep again with resume=True, then retry",
            ) from None
        if refusal:
            raise HTTPException(422, refusal)
        return {"study": study, "parameters": {**record.parameters, **changed}, "queued": True}

    def submit_like(record: TrialRecord, body: Clone) -> dict[str, Any]:
        changed = body.parameters
        spec = replace(
            record.spec,
            parent=record.trial_id if body.forks else "",
            parent_epoch=0,
            more_epochs=record.spec.more_epochs + body.more_epochs,
        )
        command = spec.payload.get("command")
        if changed and not isinstance(command, list):
            raise HTTPException(422, "the trial does not run a command, so it has no arguments to change")
        payload = dict(spec.payload)
        if isinstance(command, list):
            try:
                payload["command"] = with_parameters(command, changed)
            except ValueError as error:
                raise HTTPException(422, str(error)) from error
        with service.numbering:
            made = store.submit(numbered(replace(spec, payload=payload)), service.clock())
        if "command" in payload:
            store.put_parameters(made.trial_id, shown_parameters(parameters_of(payload["command"])))
        service.loop.decisions.decide_anew()
        service.loop.wake()
        return summary(made)

    def numbered(spec: TrialSpec) -> TrialSpec:
        taken = [record.spec.number for record in store.trials() if record.spec.study == spec.study]
        return replace(spec, number=max(taken, default=-1) + 1)

    return routes


def is_paused_by_people(record: TrialRecord) -> bool:
    """Then nobody but people lets it go on."""
    return record.hold is not None and record.hold.startswith(OWNERS_PAUSE)
