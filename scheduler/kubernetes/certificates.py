"""The webhook's own certificate: made once, kept in a secret, and told to the API server."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from trials.errors import ClusterRefused
from trials.kubernetes.client.api import SECRETS, WEBHOOKS, ClusterApi

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
        made = make_certificate(names, datetime.datetime.now(datetime.UTC))
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
