"""Trials and studies as custom resources, and back: pure translations.

A resource's ``spec`` is what somebody asked for; ``status.record`` is what the scheduler knows and decided, written by
it alone. Values that must come back bit for bit (parameters, outcomes, hints) are kept as JSON texts: the API server
turns 1.0 into 1, and a merge patch takes null for "remove".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as fields_of
from typing import Any

from trials.errors import InvalidTrialSpec
from trials.fields import descriptions
from trials.kubernetes.names import GROUP, TRIAL_LABEL, VERSION, Document, camel, label_value, qualified
from trials.record import (
    AS_THEY_ARE,
    Measurement,
    Outcome,
    Reason,
    ReplicaRecord,
    ReplicaState,
    Report,
    Study,
    TrialRecord,
)
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store.base import HistoryEntry
from trials.terms import StudyTerms

COMMAND_ENTRYPOINT = "tuner_bridge.in_replica.commands:run"
"""Runs the command of a trial that was written by hand."""

SPEC_KEYS = {name: each.key or camel(name) for name, each in descriptions(TrialSpec)}
"""Names of a trial's fields in a resource."""
_TERM_FIELDS = {each.name: camel(each.name) for each in fields_of(StudyTerms)}
_MEASURED = tuple(each.name for each in fields_of(Measurement) if each.name != "trial_id")
CHANGEABLE = frozenset({"min_replicas", "max_replicas", "only_on", "max_losses"})
"""Fields that may change in a trial that is there already."""


@dataclass(frozen=True, slots=True)
class TrialObject:
    """A trial as the API server has it."""

    namespace: str
    name: str
    uid: str
    record: TrialRecord
    template: Mapping[str, Any]
    """Pod template of Kubernetes with what its pods have beyond the cluster's template."""
    deleted: bool
    finalizers: tuple[str, ...]
    replicas: tuple[ReplicaRecord, ...] = ()
    reports: tuple[Report, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    created: str = ""
    queue: str = ""
    history: tuple[HistoryEntry, ...] = ()
    history_keys: tuple[str, ...] = ()
    hints: Mapping[str, Any] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


# ---------------------------------------------------------------------- trials


def spec_from(document: Mapping[str, Any], number: int | None = None, *, scaled: bool = False) -> TrialSpec:
    """Return the spec of a resource; raises InvalidTrialSpec. ``number``: where it names none itself.

    ``scaled``: the trial is there already, and `kubectl scale` asks nobody whether it still makes sense; a maximum
    below the minimum means both.
    """
    spec_document = document.get("spec") or {}
    keys = {*SPEC_KEYS.values(), "encodedPayload", "command", "template", "queueName"}
    unknown = set(spec_document) - keys
    if unknown:
        raise InvalidTrialSpec(f"spec.{min(unknown)} is not known; the fields of a trial are {', '.join(sorted(keys))}")
    fields: dict[str, Any] = {name: spec_document[key] for name, key in SPEC_KEYS.items() if key in spec_document}
    if "encodedPayload" in spec_document:
        try:
            fields["payload"] = json.loads(spec_document["encodedPayload"])
        except ValueError as error:
            raise InvalidTrialSpec(f"spec.encodedPayload is not valid JSON: {error}") from error
    # Front ends write their payload as a text; what people write by hand nobody waits for.
    fields.setdefault("driven", "encodedPayload" in spec_document)
    command = spec_document.get("command")
    if command is not None:
        if "entrypoint" in spec_document:
            raise InvalidTrialSpec("spec has a command and an entrypoint; it must have only one of them")
        if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
            raise InvalidTrialSpec(f"spec.command is {command!r:.80}; it must be a non-empty list of strings")
        fields["entrypoint"] = COMMAND_ENTRYPOINT
        fields["payload"] = {**(fields.get("payload") or {}), "command": command}
    elif "entrypoint" not in spec_document:
        raise InvalidTrialSpec("spec has neither a command nor an entrypoint; set the one that replicas run")
    fields.setdefault("study", (document.get("metadata") or {}).get("name"))
    if fields.get("number") is None:
        fields["number"] = 0 if number is None else number
    if "max_replicas" not in fields:
        fields["max_replicas"] = fields.get("min_replicas", 1)
    if scaled:
        fields["min_replicas"] = min(fields.get("min_replicas", 1), fields["max_replicas"])
    try:
        return TrialSpec.from_json(fields)
    except TypeError as error:
        raise InvalidTrialSpec(f"spec: {error}") from error


def trial_document(
    spec: TrialSpec,
    name: str,
    namespace: str,
    *,
    study: str,
    owner: Mapping[str, Any] | None,
    labels: Mapping[str, str],
) -> Document:
    """Return the document of a trial that a front end submits; ``study``: its name within the namespace."""
    # Empty texts stay out: not every API server tells them from null.
    spec_document = {SPEC_KEYS[name]: value for name, value in spec.to_json().items() if value != ""}
    spec_document["study"] = study
    spec_document["encodedPayload"] = json.dumps(spec_document.pop("payload"))
    metadata: Document = {"name": name, "namespace": namespace, "labels": dict(labels), "finalizers": []}
    if owner is not None:
        metadata["ownerReferences"] = [dict(owner)]
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Trial", "metadata": metadata, "spec": spec_document}


def record_status(record: TrialRecord) -> Document:
    """Return the part of the status that says what the scheduler has decided, and what people see of it."""
    return {
        "phase": record.state.value.capitalize(),
        "reason": record.reason.code or None,
        "message": record.reason.sentence or None,
        "replicas": 0 if record.state.is_final else len(record.members) // record.slots_per_replica,
        "selector": f"{TRIAL_LABEL}={label_value(record.trial_id)}",
        "record": {
            "number": record.spec.number,
            "state": record.state.value,
            "submittedAt": record.submitted_at,
            "members": list(record.members),
            "publishedMembers": list(record.published_members),
            "outcome": None if record.outcome is None else json.dumps(asdict(record.outcome)),
            "cancelRequested": record.cancel_requested,
            "parameters": json.dumps(dict(record.parameters)) if record.parameters else None,
            **{camel(name): getattr(record, name) for name in AS_THEY_ARE},
        },
    }


def record_from(document: Mapping[str, Any], trial_id: str, number: int | None = None, *, home: str) -> TrialRecord:
    """Read a trial's record; a resource that has none yet gives a new one.

    Its study is one of its own namespace. ``home``: the namespace whose studies go by their names alone.
    """
    status = document.get("status") or {}
    kept = status.get("record")
    if kept is None:
        return TrialRecord(trial_id=trial_id, spec=_at_home(spec_from(document, number), document, home))
    outcome = kept.get("outcome")
    return TrialRecord(
        trial_id=trial_id,
        spec=_at_home(spec_from(document, kept["number"], scaled=True), document, home),
        state=TrialState(kept["state"]),
        reason=Reason(code=status.get("reason", ""), sentence=status.get("message", "")),
        submitted_at=kept.get("submittedAt", 0.0),
        members=tuple(kept.get("members", ())),
        published_members=tuple(kept.get("publishedMembers", ())),
        outcome=None if outcome is None else Outcome(**json.loads(outcome)),
        cancel_requested=kept.get("cancelRequested"),
        parameters=json.loads(kept.get("parameters") or "{}"),
        **{name: kept[camel(name)] for name in AS_THEY_ARE if camel(name) in kept},
    )


def _at_home(spec: TrialSpec, document: Mapping[str, Any], home: str) -> TrialSpec:
    return replace(spec, study=qualified(document["metadata"]["namespace"], spec.study, home))


def trial_object(document: Mapping[str, Any], trial_id: str, number: int | None = None, *, home: str) -> TrialObject:
    """Everything that a resource says; raises InvalidTrialSpec."""
    metadata = document["metadata"]
    status = document.get("status") or {}
    hints = status.get("hints")
    return TrialObject(
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        record=record_from(document, trial_id, number, home=home),
        template=(document.get("spec") or {}).get("template") or {},
        deleted=metadata.get("deletionTimestamp") is not None,
        created=metadata.get("creationTimestamp") or "",
        queue=(document.get("spec") or {}).get("queueName") or "",
        finalizers=tuple(metadata.get("finalizers") or ()),
        replicas=tuple(
            replica_from(name, trial_id, each) for name, each in (status.get("replicaRecords") or {}).items()
        ),
        reports=tuple(report_from(trial_id, int(step), text) for step, text in (status.get("reports") or {}).items()),
        measurements=tuple(
            measurement_from(trial_id, text) for _, text in sorted((status.get("measurements") or {}).items())
        ),
        history=tuple(history_from(trial_id, text) for _, text in sorted((status.get("history") or {}).items())),
        history_keys=tuple(status.get("history") or ()),
        hints=None if hints is None else json.loads(hints),
        labels=metadata.get("labels") or {},
    )


def merged(below: Mapping[str, Any], change: Mapping[str, Any]) -> Document:
    """Apply a merge patch (RFC 7386) to a document, or to an earlier patch: then what it removes stays named."""
    result = dict(below)
    for key, value in change.items():
        present = result.get(key)
        if isinstance(value, Mapping):
            result[key] = merged(present if isinstance(present, Mapping) else {}, value)
        else:
            result[key] = value
    return result


def without_nulls(document: Mapping[str, Any]) -> Document:
    """Return the document as the API server has it once such a patch is applied."""
    return {
        key: without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in document.items()
        if value is not None
    }


def text_of(document: Mapping[str, Any]) -> str:
    """Return the document as text that json.loads reads: numbers keep their kind, and None stays."""
    return json.dumps(document)


def replica_status(replica: ReplicaRecord) -> Document:
    fields = asdict(replica)
    del fields["replica_id"], fields["trial_id"]
    fields["state"] = replica.state.value
    return fields


def replica_from(replica_id: str, trial_id: str, kept: Mapping[str, Any]) -> ReplicaRecord:
    return ReplicaRecord(
        **{**kept, "replica_id": replica_id, "trial_id": trial_id, "state": ReplicaState(kept["state"])}
    )


def measurement_status(measured: Measurement) -> Document:
    """Return a measurement under its moment, so that they stand in their order."""
    return {moment_of(measured): json.dumps([getattr(measured, name) for name in _MEASURED])}


def moment_of(measured: Measurement) -> str:
    return f"{round(1000 * measured.at):014d}"


def measurement_from(trial_id: str, text: str) -> Measurement:
    """Read a measurement; one that an earlier version has written lacks what came later."""
    return Measurement(trial_id=trial_id, **dict(zip(_MEASURED, json.loads(text), strict=False)))


def report_status(report: Report) -> str:
    value = "nan" if report.value is None else repr(report.value)
    return f"{value} {report.progress!r}" + ("" if report.at is None else f" {report.at!r}")


def report_from(trial_id: str, step: int, text: str) -> Report:
    value, progress, *at = text.split()
    return Report(
        trial_id, step, None if value == "nan" else float(value), float(progress), float(at[0]) if at else None
    )


def history_status(entry: HistoryEntry) -> str:
    kept = [entry.at, entry.what, entry.reason.code, entry.reason.sentence, entry.who]
    return json.dumps([*kept, dict(entry.numbers)] if entry.numbers else kept)


def history_from(trial_id: str, text: str) -> HistoryEntry:
    at, what, code, sentence, who, *numbers = json.loads(text)
    reason = Reason(code=code, sentence=sentence)
    return HistoryEntry(
        at=at, trial_id=trial_id, what=what, reason=reason, who=who, numbers=numbers[0] if numbers else {}
    )


# ---------------------------------------------------------------------- studies


def study_key(document: Mapping[str, Any], home: str) -> str:
    """Return the study's name within the scheduler."""
    metadata = document["metadata"]
    return qualified(
        metadata.get("namespace", home), (document.get("spec") or {}).get("name") or metadata["name"], home
    )


def study_from(document: Mapping[str, Any], *, home: str) -> Study:
    """Read a study, which yields to studies of its own namespace; raise InvalidStudyTerms."""
    spec_document = document.get("spec") or {}
    status = document.get("status") or {}
    namespace, title = document["metadata"].get("namespace", home), spec_document.get("title")
    terms = StudyTerms.from_json(
        {name: spec_document[key] for name, key in _TERM_FIELDS.items() if key in spec_document}
    )
    return Study(
        name=study_key(document, home),
        title=qualified(namespace, title, home) if title else "",
        direction=spec_document.get("direction", "minimize"),
        terms=replace(terms, yields_to=tuple(qualified(namespace, name, home) for name in terms.yields_to)),
        owner=status.get("owner"),
        owner_seen_at=status.get("ownerSeenAt"),
        user=status.get("user") or "",
    )


def study_spec(study: Study, namespace: str, home: str) -> Document:
    """Return a study's spec for a merge patch: what is None there is removed."""
    before = "" if namespace == home else f"{namespace}."
    terms = {key: study.terms.to_json()[name] for name, key in _TERM_FIELDS.items()}
    terms["yieldsTo"] = [name.removeprefix(before) for name in study.terms.yields_to]
    title = study.title.removeprefix(before) or None
    return {"name": study.name.removeprefix(before), "title": title, "direction": study.direction, **terms}


def study_status(study: Study) -> Document:
    return {"owner": study.owner, "ownerSeenAt": study.owner_seen_at, "user": study.user or None}


def study_document(study: Study, name: str, namespace: str, labels: Mapping[str, str], home: str) -> Document:
    given = {key: value for key, value in study_spec(study, namespace, home).items() if value is not None}
    metadata = {"name": name, "namespace": namespace, "labels": dict(labels)}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Study", "metadata": metadata, "spec": given}
