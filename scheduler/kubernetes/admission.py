"""Check of trials and studies that somebody applies: a pure answer to the API server's question.

The webhook that asks has a certificate of its own: made once, kept in a secret, and told to the API server.
"""

from __future__ import annotations

import base64
import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from trials.errors import ClusterRefused, InvalidStudyTerms, InvalidTrialSpec
from trials.kubernetes.client.api import SECRETS, WEBHOOKS, ClusterApi
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


# ---------------------------------------------------------------------- the webhook's certificate

LIFETIME = datetime.timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Certificate:
    certificate: bytes
    key: bytes
    """Both as PEM."""

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Files for a server to read, the key for its owner only."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = folder / "tls.crt", folder / "tls.key"
        for path, content in zip(paths, (self.certificate, self.key), strict=True):
            path.touch(mode=0o600)
            path.write_bytes(content)
        return paths


def make_certificate(names: Sequence[str], now: datetime.datetime) -> Certificate:
    """Self-signed, for a server that is called by these names."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Certificate(
        made.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def shared_certificate(api: ClusterApi, namespace: str, secret: str, names: Sequence[str]) -> Certificate:
    """Return the certificate that all of the scheduler's pods serve, from the secret that the first of them fills."""

    def make() -> dict[str, bytes]:
        made = make_certificate(names, datetime.datetime.now(datetime.timezone.utc))
        return {"tls.crt": made.certificate, "tls.key": made.key}

    kept = shared_secret(api, namespace, secret, ("tls.crt", "tls.key"), make)
    return Certificate(kept["tls.crt"], kept["tls.key"])


def trust(api: ClusterApi, configuration: str, certificate: Certificate) -> None:
    """Tell the API server which certificate its webhook calls will meet."""
    bundle = base64.b64encode(certificate.certificate).decode()
    present = api.get(WEBHOOKS, None, configuration)
    webhooks = present.get("webhooks") or []
    if all((hook.get("clientConfig") or {}).get("caBundle") == bundle for hook in webhooks):
        return
    for hook in webhooks:
        hook["clientConfig"]["caBundle"] = bundle
    api.patch(WEBHOOKS, None, configuration, {"webhooks": webhooks})


def shared_secret(
    api: ClusterApi, namespace: str, secret: str, keys: Sequence[str], make: Callable[[], Mapping[str, bytes]]
) -> dict[str, bytes]:
    """Return the values under ``keys``; where one is missing, those that ``make`` gives are kept and returned.

    Raises ClusterRefused where the secret does not exist, and ClusterUnreachable.
    """
    kept = api.get(SECRETS, namespace, secret)
    data = kept.get("data") or {}
    if all(data.get(key) for key in keys):
        return {key: base64.b64decode(data[key]) for key in keys}
    made = dict(make())
    change = {
        "metadata": {"resourceVersion": kept["metadata"]["resourceVersion"]},
        "data": {key: base64.b64encode(value).decode() for key, value in made.items()},
    }
    try:
        api.patch(SECRETS, namespace, secret, change)
    except ClusterRefused as error:
        if error.status != 409:
            raise
        # Another pod was first.
        return shared_secret(api, namespace, secret, keys, make)
    return made
