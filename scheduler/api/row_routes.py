"""Trials, studies and nodes as short rows: what the command line and programs list."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Response

from scheduler.api.client_access import Client, ClientAccess, allow, calling_client
from scheduler.api.page.rows import node_row, queue_row, study_row, trial_row
from scheduler.api.service import Service
from scheduler.api.tokens import Access
from scheduler.knowledge.accounts import slot_seconds_by_trial
from scheduler.knowledge.waiting import expected_starts
from trials.plain_words import told_apart
from trials.record import TrialRecord
from trials.states import TrialState

WAITING = (TrialState.PENDING, TrialState.PAUSED)


MOST_TEXTS = 20_000


class _Texts:
    """Latest texts of finished trials: of thousands of them nothing changes any more."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[Any, ...], str]] = {}

    def of(self, trial_id: str, of_what: tuple[Any, ...], tell: Callable[[], str]) -> str:
        """Return the row's text, as it was if it is of the very same objects."""
        kept = self._kept.get(trial_id)
        if kept is not None and all(map(operator.is_, kept[0], of_what)):
            return kept[1]
        if len(self._kept) >= MOST_TEXTS:
            self._kept.clear()
        text = tell()
        self._kept[trial_id] = of_what, text
        return text


def row_routes(service: Service, access: ClientAccess) -> APIRouter:
    store, texts = service.store, _Texts()
    routes = APIRouter(prefix="/rows", dependencies=[Depends(calling_client)], tags=["clients"])

    @routes.get("")
    def rows(
        client: Client,
        study: str | None = None,
        state: str | None = None,
        last: int | None = None,
        trial: str | None = None,
        hours: bool = False,
    ) -> Response:
        """Trials by study, state, or a name; ``last``: so many of those that are over."""
        allow(client, study=client.subject, read=True)
        records = access.seen_trials(client)
        titles = {each.name: each.called for each in access.seen_studies(client)}
        apart = told_apart(titles)
        if study is not None:
            wanted = {name for name, title in titles.items() if study in (name, title)}
            wanted = wanted or {
                name for name, title in titles.items() if name.startswith(study) or title.startswith(study)
            }
            records = [record for record in records if record.spec.study in (wanted or {study})]
        if state is not None:
            records = [record for record in records if _is(record, state)]
        if trial is not None:
            records = _called(records, trial, titles)
        over = sum(record.state.is_final for record in records)
        if last is not None:
            records = _latest(records, max(0, last))
        live = [record.trial_id for record in records if not record.state.is_final]
        hints = store.hints(live)
        latest = {
            trial_id: report
            for name in {record.spec.study for record in records}
            for trial_id, report in store.latest_reports(name).items()
        }
        snapshot = service.loop.decisions.snapshot
        starts = {} if snapshot is None or not live else expected_starts(snapshot)
        seconds = slot_seconds_by_trial(store.slot_intervals(), service.clock()) if hours else {}
        for_reader = client.access is Access.READ

        def told(record: TrialRecord) -> str:
            expected = starts.get(record.trial_id)
            row = trial_row(
                record,
                view=service.loop.observer.latest_views.get(record.trial_id),
                hints=hints.get(record.trial_id),
                latest=latest.get(record.trial_id),
                expected_start=None if expected is None or snapshot is None else snapshot.now + expected,
                for_reader=for_reader,
            )
            row["title"] = apart.get(record.spec.study, record.spec.study)
            if hours:
                row["slot_hours"] = seconds.get(record.trial_id, 0.0) / 3600.0
            return json.dumps(row)

        shown = []
        for record in records:
            if hours or not record.state.is_final:
                shown.append(told(record))
                continue
            of_what = record, latest.get(record.trial_id), apart.get(record.spec.study), for_reader
            shown.append(texts.of(record.trial_id, of_what, partial(told, record)))
        around = json.dumps({"now": service.clock(), "emulated": service.site.emulated, "over": over})
        return Response(f'{around[:-1]}, "trials": [{", ".join(shown)}]}}', media_type="application/json")

    @routes.get("/studies")
    def studies(client: Client) -> list[dict[str, Any]]:
        """Return the studies with their numbers of trials and what they use."""
        allow(client, study=client.subject, read=True)
        now = service.clock()
        seconds = slot_seconds_by_trial(store.slot_intervals(), now)
        held: dict[str, int] = {}
        for replica in store.replicas():
            held[replica.trial_id] = held.get(replica.trial_id, 0) + 1
        rows = []
        studies_seen = access.seen_studies(client)
        by_study: dict[str, list[TrialRecord]] = {}
        for record in access.seen_trials(client):
            by_study.setdefault(record.spec.study, []).append(record)
        for study in studies_seen:
            records = by_study.get(study.name, [])
            rows.append(
                {
                    **study_row(study, now),
                    "trials": len(records),
                    "over": sum(record.state.is_final for record in records),
                    "slots": sum(held.get(record.trial_id, 0) for record in records),
                    "slot_hours": sum(seconds.get(record.trial_id, 0.0) for record in records) / 3600.0,
                }
            )
        return rows

    @routes.get("/nodes")
    def nodes(client: Client) -> list[dict[str, Any]]:
        allow(client, study=client.subject, read=True)
        used: dict[str, int] = {}
        for replica in store.replicas():
            used[replica.node] = used.get(replica.node, 0) + 1
        return [{**node_row(node), "used": used.get(node.name, 0)} for node in service.site.nodes()]

    @routes.get("/queue")
    def queue(client: Client) -> dict[str, Any]:
        """Jobs of a queue with which slots come, where there is one."""
        allow(client, study=client.subject, read=True)
        return {
            **queue_row(service.site.queue(), service.site.queue_trouble()),
            "held_hours": service.site.held_hours(),
        }

    return routes


def _is(record: TrialRecord, state: str) -> bool:
    if state == "live":
        return not record.state.is_final
    if state == "over":
        return record.state.is_final
    if state == "waiting":
        return record.state in WAITING
    return record.state.value == state


def _called(records: Sequence[TrialRecord], wanted: str, titles: dict[str, str]) -> list[TrialRecord]:
    """Find trials by id, ``STUDY/NUMBER``, number or beginning of an id; the first of these that matches any."""
    study, slash, number = wanted.rpartition("/")
    ways = (
        lambda record: record.trial_id == wanted,
        lambda record: (
            bool(slash)
            and number == str(record.spec.number)
            and study in (record.spec.study, titles.get(record.spec.study))
        ),
        lambda record: str(record.spec.number) == wanted,
        lambda record: record.trial_id.startswith(wanted),
    )
    for way in ways:
        found = [record for record in records if way(record)]
        if found:
            return found
    return []


def _latest(records: Sequence[TrialRecord], last: int) -> list[TrialRecord]:
    """Return the unfinished trials and the ``last`` that ended last, in order of submission."""
    ended = sorted(
        (record for record in records if record.state.is_final), key=lambda record: record.finished_at or 0.0
    )
    kept = {record.trial_id for record in ended[len(ended) - min(last, len(ended)) :]}
    return [record for record in records if not record.state.is_final or record.trial_id in kept]
