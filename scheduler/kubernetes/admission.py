"""Check of trials and studies that somebody applies: a pure answer to the API server's question."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trials.errors import InvalidStudyTerms, InvalidTrialSpec
from trials.kubernetes.names import LONGEST_TRIAL_NAME, camel, is_name
from trials.kubernetes.pods.manifest import beyond_slot, touches_ours
from trials.kubernetes.resources.documents import CHANGEABLE, SPEC_KEYS, spec_from, study_from
from trials.kubernetes.settings import ClusterSettings
from trials.spec import TrialSpec


def review(request: Mapping[str, Any], settings: ClusterSettings) -> dict[str, Any]:
    """Return an AdmissionReview (admission.k8s.io/v1) with the answer to the one given; deletions always pass."""
    asked = request.get("request") or {}
    why = _objection(asked, settings)
    answer: dict[str, Any] = {"uid": asked.get("uid", ""), "allowed": why is None}
    if why is not None:
        answer["status"] = {"code": 422, "reason": "Invalid", "message": why}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}


def _objection(asked: Mapping[str, Any], settings: ClusterSettings) -> str | None:
    document = asked.get("object")
    if not isinstance(document, Mapping):
        return None
    before = asked.get("oldObject")
    unchanged = isinstance(before, Mapping) and before.get("spec") == document.get("spec")
    if unchanged or (document.get("metadata") or {}).get("deletionTimestamp"):
        # Labels, finalizers, its way out: what it asks for was judged before.
        return None
    kind = (asked.get("kind") or {}).get("kind")
    try:
        if kind == "Trial":
            spec = spec_from(document, 0)
            return (
                _trial_objection(document, spec, before)
                or _name_objection(document, settings, spec.study)
                or _template_objection(document, settings)
            )
        if kind == "Study":
            study = study_from(document, home=settings.namespace)
            return _name_objection(document, settings, study.name, study.called) or _template_objection(
                document, settings
            )
    except (InvalidTrialSpec, InvalidStudyTerms, TypeError) as error:
        return _with_fields(str(error))
    return None


def _with_fields(words: str) -> str:
    """Replace Python field names in a message by those of the resource (min_replicas: spec.minReplicas)."""
    found = re.sub(r"\b([a-z]+(?:_[a-z]+)+)\b", lambda match: f"spec.{_shown(match.group(1))}", words)
    return found.replace("spec.spec.", "spec.")


def _name_objection(document: Mapping[str, Any], settings: ClusterSettings, *studies: str) -> str | None:
    """Object to a name in the scheduler's namespace that reads like one in another."""
    namespace = (document.get("metadata") or {}).get("namespace", settings.namespace)
    if namespace != settings.namespace:
        return None
    return next(filter(None, (settings.objection_to(study, namespace) for study in studies)), None)


def _trial_objection(document: Mapping[str, Any], spec: TrialSpec, before: Any) -> str | None:
    name = str((document.get("metadata") or {}).get("name") or "")
    if name and not is_name(name):
        return (
            f"metadata.name is {name!r}; a trial's name has at most {LONGEST_TRIAL_NAME} lower-case letters, digits "
            "and dashes, because its replicas' names begin with it"
        )
    if not isinstance(before, Mapping):
        return None
    try:
        was = spec_from(before, 0, scaled=True)
    except InvalidTrialSpec:
        # What it was made no sense: this can only be better.
        return None
    fixed = [field for field in was.to_json() if field not in CHANGEABLE]
    changed = [field for field in fixed if getattr(was, field) != getattr(spec, field)]
    if changed:
        field = changed[0]
        return (
            f"spec.{_shown(field)} was {getattr(was, field)!r:.80} and cannot be changed; apply a trial with "
            "another name"
        )
    return None


def _template_objection(document: Mapping[str, Any], settings: ClusterSettings) -> str | None:
    template = (document.get("spec") or {}).get("template") or {}
    if not isinstance(template, Mapping) or set(template) - {"metadata", "spec"}:
        return "spec.template must be a pod template with metadata and spec, and nothing else"
    try:
        touched = touches_ours((template,))
        if touched is not None:
            return f"spec.template: {touched}"
        too_large = beyond_slot((template,), settings)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        return f"spec.template is not a valid pod template: {error}"
    return None if too_large is None else f"spec.template: {too_large}"


def _shown(field: str) -> str:
    return SPEC_KEYS.get(field, camel(field))
