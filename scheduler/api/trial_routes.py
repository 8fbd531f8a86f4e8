"""Trials: submitted, looked at, ended."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, HTTPException
from pydantic import BaseModel, Field

from scheduler.api.action_routes import is_paused_by_people
from scheduler.api.client_access import Client, ClientAccess, calling_client
from scheduler.api.page.rows import shown_parameters
from scheduler.api.service import Service
from scheduler.api.summaries import brief, summary
from scheduler.api.tokens import Access, Identity
from scheduler.knowledge.command_lines import parameters_of
from trials.checks import LONGEST_NAME, check_name
from trials.log_files import following
from trials.plain_words import one_line
from trials.record import Study
from trials.spec import TrialSpec

LOG_BYTES = 1024 * 1024
MOST_LOG_BYTES = 64 * 1024 * 1024


class Cancel(BaseModel):
    why: str = Field(default="cancelled by request", max_length=500)


def trial_routes(service: Service, access: ClientAccess) -> APIRouter:
    store = service.store
    routes = APIRouter(dependencies=[Depends(calling_client)], tags=["clients"])

    @routes.post("/trials")
    def submit(client: Client, document: dict[str, Any]) -> dict[str, Any]:
        """Submit a trial; the same (study, number) again returns the one that is there. Without a number: the next.

        A trial without a driver may name its ``user``, and its study need not be there.
        """
        if "number" not in document:
            with service.numbering:
                taken = [each.spec.number for each in store.trials() if each.spec.study == document.get("study")]
                return submitted(client, {**document, "number": max(taken, default=-1) + 1})
        return submitted(client, document)

    def register(name: str, user: str) -> None:
        """Register the study of a job that has no tuner; raise HTTPException for one that a tuner has."""
        study = access.find_study(name)
        if study is None:
            store.put_study(Study(name=name, user=one_line(user)))
        elif study.owner is not None or any(
            record.spec.study == name and record.spec.driven for record in store.trials()
        ):
            raise HTTPException(409, f"study {name!r} belongs to a sweep; submit the job to a study of another name")

    def submitted(client: Identity, document: dict[str, Any]) -> dict[str, Any]:
        user = str(document.pop("user", ""))[:LONGEST_NAME]
        try:
            spec = TrialSpec.from_json(document)
        except TypeError as error:
            raise HTTPException(422, f"not a valid trial: {error}") from error
        access.allow_study(client, spec.study)
        check_name("the study's name", spec.study)
        if spec.parent:
            access.refuse_parent(client, spec.study, spec.parent, service.loop, needs_state=not spec.parent_epoch)
        if not spec.driven:
            register(spec.study, user)
        slots = sum(node.slots for node in service.site.nodes())
        if spec.min_slots > slots and not service.site.grows:
            raise HTTPException(
                422,
                f"min_replicas is {spec.min_replicas}, which needs {spec.min_slots} slots, but the cluster has "
                f"{slots}; lower it or add slots",
            )
        record = store.submit(spec, service.clock())
        if record.hold is not None and not is_paused_by_people(record):
            store.release([record.trial_id])
        command = spec.payload.get("command")
        if not spec.driven and isinstance(command, list) and not record.parameters:
            store.put_parameters(record.trial_id, shown_parameters(parameters_of(list(map(str, command)))))
        service.loop.decisions.decide_anew()
        service.loop.wake()
        return summary(record)

    @routes.get("/trials")
    def trials(client: Client) -> list[dict[str, Any]]:
        return [brief(record) for record in access.seen_trials(client)]

    @routes.get("/trials/{trial_id}")
    def trial(client: Client, trial_id: str) -> dict[str, Any]:
        record = access.trial_for(client, trial_id, read=True)
        reads_only = client.access is Access.READ
        return {
            **(brief(record) if reads_only else summary(record)),
            "emulated": service.site.emulated,
            "kept_after": service.loop.files.kept_after(record),
            # What code is run, with which arguments and secrets, is nothing for a display on the wall.
            "spec": None if reads_only else record.spec.to_json(),
            "history": [asdict(entry) for entry in store.history(trial_id)],
            "replicas": [
                {**asdict(replica), "state": replica.state.value}
                for replica in store.replicas(trial_id=trial_id, live_only=False)
            ],
        }

    @routes.get("/trials/{trial_id}/log")
    def log(client: Client, trial_id: str, most_bytes: int = LOG_BYTES) -> list[dict[str, Any]]:
        """Return what each of the trial's replicas printed, or the end of it."""
        access.trial_for(client, trial_id)
        most = max(0, min(most_bytes, MOST_LOG_BYTES))
        return [
            {"replica_id": path.stem, "words": following(path, -1, most)[0]}
            for path in service.loop.files.logs(trial_id)
        ]

    @routes.get("/trials/{trial_id}/log/{replica_id}")
    def replica_log(client: Client, trial_id: str, replica_id: str, after: int = -1) -> dict[str, Any]:
        """Return what one replica printed from the byte ``after`` on, or the end of it; ``next`` is where to go on."""
        record = access.trial_for(client, trial_id)
        for path in service.loop.files.logs(trial_id):
            if path.stem == replica_id:
                words, end = following(path, after, LOG_BYTES)
                return {"words": words, "next": end, "over": record.state.is_final}
        raise HTTPException(404, f"trial {trial_id} has no log of a replica {replica_id!r}")

    @routes.post("/trials/{trial_id}/cancel")
    def cancel(client: Client, trial_id: str, body: Cancel) -> None:
        access.trial_for(client, trial_id)
        store.request_cancel(trial_id, body.why)
        service.loop.wake()

    @routes.get("/trials/{trial_id}/why")
    def why(client: Client, trial_id: str) -> dict[str, Any]:
        """Return the policy's last decision about a trial, and every change of size before it."""
        record = access.trial_for(client, trial_id, read=True)
        grant = service.loop.decisions.grants.get(trial_id) if not record.state.is_final else None
        error = service.loop.decisions.error
        return {
            "trial": brief(record),
            "emulated": service.site.emulated,
            "policy": service.loop.decisions.policy.name,
            "policy_error": None if error is None else str(error),
            "held_slots": len(store.replicas(trial_id=trial_id)),
            "grant": None
            if grant is None
            else {
                "placement": dict(grant.placement),
                "reason": asdict(grant.reason),
                "numbers": dict(grant.numbers),
            },
            "changes": [asdict(entry) for entry in store.history(trial_id) if entry.resizes],
        }

    return routes
