"""Callers, and what the token of each opens: studies, their trials, and what a reader may see of them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, HTTPException, Request

from scheduler.api.tokens import Access, Identity
from scheduler.loop.control_loop import ControlLoop
from trials.errors import UnknownTrial
from trials.record import Study, TrialRecord
from trials.store import TrialStore


class ClientAccess:
    def __init__(self, store: TrialStore) -> None:
        self._store = store

    def trial_for(self, client: Identity, trial_id: str, *, read: bool = False) -> TrialRecord:
        """Return the trial; another study's trial is as unknown as one that never was."""
        record = self._store.trial(trial_id)
        if client.access is not Access.STUDY:
            allow(client, read=read)
        elif record.spec.study not in self.own_studies(client):
            raise UnknownTrial(f"no trial is called {trial_id!r}; `elastune ls` lists them")
        return record

    def refuse_parent(
        self, client: Identity, study: str, parent_id: str, loop: ControlLoop, *, needs_state: bool = True
    ) -> None:
        """Raise HTTPException for a parent whose state no trial of this study can begin with."""
        parent = self.trial_for(client, parent_id)
        if parent.spec.study != study:
            raise HTTPException(
                422,
                f"parent {parent_id} is a trial of study {parent.spec.study!r}, not of {study!r}; a trial begins with "
                "the state of one of its own study",
            )
        if needs_state and parent.state.is_final and not loop.files.has_state(parent_id):
            raise HTTPException(
                422,
                f"parent {parent_id} is over ({parent.state.value}) and its state was not kept; keep it with "
                "optimize(..., keep_states=True) or `elastune submit --keep-state`",
            )

    def own_studies(self, client: Identity) -> set[str]:
        """Return the studies of a study's token: those of its name, and the one of that name that is to be made."""
        known = self._store.studies()
        new = {client.subject} - {study.name for study in known}
        return new | {study.name for study in known if study.called == client.subject}

    def allow_study(self, client: Identity, name: str) -> None:
        if client.access is not Access.STUDY:
            allow(client)
        elif name not in self.own_studies(client):
            raise HTTPException(403, f"this token is for study {client.subject!r}, not for {name!r}")

    def seen_studies(self, client: Identity) -> list[Study]:
        return [
            each for each in self._store.studies() if client.access is not Access.STUDY or each.called == client.subject
        ]

    def seen_trials(self, client: Identity) -> list[TrialRecord]:
        if client.access is not Access.STUDY:
            return self._store.trials()
        mine = self.own_studies(client)
        return [record for record in self._store.trials() if record.spec.study in mine]

    def has_trials(self, name: str) -> bool:
        return any(record.spec.study == name for record in self._store.trials())

    def find_study(self, name: str) -> Study | None:
        return next((study for study in self._store.studies() if study.name == name), None)

    def known_study(self, name: str) -> Study:
        study = self.find_study(name)
        if study is None:
            raise HTTPException(404, f"no study is called {name!r}")
        return study


async def calling_client(request: Request) -> Identity:
    """Return the calling client (a tuner, the command line, a dashboard), as the gate has found out.

    It runs in no thread of its own, because it waits for nothing.
    """
    return identity_of(request)


def identity_of(request: Request) -> Identity:
    identity: Identity = request.state.identity
    return identity


Client = Annotated[Identity, Depends(calling_client)]


def allow(client: Identity, *, study: str | None = None, read: bool = False) -> None:
    """Refuse unless the client is the owner, belongs to ``study``, or only reads where ``read`` says that it may."""
    mine = client.access is Access.STUDY and study is not None and client.subject == study
    if client.access is Access.OWNER or mine or (read and client.access is Access.READ):
        return
    if client.access is Access.READ:
        raise HTTPException(403, "this token is only for reading metrics, overviews and decisions")
    if study is None:
        raise HTTPException(403, f"this token is only for study {client.subject!r}; use the owner's token")
    raise HTTPException(403, f"this token is for study {client.subject!r}, not for {study!r}")
