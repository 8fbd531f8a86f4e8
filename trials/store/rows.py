"""Rows of the tables as what they stand for."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy.engine import RowMapping

from trials.record import Outcome, Reason, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store.base import HistoryEntry


def entry_of(row: Any) -> HistoryEntry:
    return HistoryEntry(
        at=row.at,
        trial_id=row.trial_id,
        who=row.who,
        what=row.what,
        reason=Reason(code=row.reason_code, sentence=row.reason_sentence),
        numbers=json.loads(row.numbers),
    )


def trial_of(row: RowMapping) -> TrialRecord:
    outcome = json.loads(row["outcome"]) if row["outcome"] else None
    return TrialRecord(
        trial_id=row["trial_id"],
        spec=TrialSpec.from_json(json.loads(row["spec"])),
        state=TrialState(row["state"]),
        reason=Reason(code=row["reason_code"], sentence=row["reason_sentence"]),
        submitted_at=row["submitted_at"],
        finished_at=row["finished_at"],
        generation=row["generation"],
        members=tuple(json.loads(row["members"])),
        published=row["published"],
        published_members=tuple(json.loads(row["published_members"])),
        published_at=row["published_at"],
        join_epoch=row["join_epoch"],
        entered=row["entered"],
        abandoned=row["abandoned"],
        rescaled_at=row["rescaled_at"],
        layout=row["layout"],
        losses=row["losses"],
        outcome=Outcome(**outcome) if outcome else None,
        cancel_requested=row["cancel_requested"],
        hold=row["hold"],
        parameters=json.loads(row["parameters"]),
    )


def plain(text: str) -> str:
    """Without what a database has no room for: half of a surrogate pair, and PostgreSQL the character 0."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
