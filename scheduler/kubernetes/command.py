"""`elastune operator`: from a file of settings and the environment to a running scheduler."""

from __future__ import annotations

import base64
import json
import logging
import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scheduler.api.tokens import Secrets, Tokens
from scheduler.errors import SchedulerError
from scheduler.kubernetes.certificates import shared_secret
from scheduler.kubernetes.server import Operator, OperatorSettings, patiently
from scheduler.log_lines import log_to_stderr
from trials.kubernetes.client.api import SECRETS, ClusterApi, KubernetesApi
from trials.kubernetes.settings import read_settings


def run_operator(settings: Path, *, token_secret: str | None = None, **options: Any) -> None:
    """Run until SIGTERM; raise InvalidClusterSettings, ClusterUnreachable or SchedulerError."""
    log_to_stderr()
    for noisy in ("httpx2", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # Its watches say themselves, in one line, what went wrong.
    logging.getLogger("kubernetes").setLevel(logging.CRITICAL)
    cluster = read_settings(settings)
    api = KubernetesApi.connect()
    tokens: Callable[[], Tokens]
    given = os.environ.get("ELASTUNE_TOKEN")
    if given:
        tokens = partial(Tokens, given, fixed=True)
    elif token_secret is not None:
        tokens = partial(patiently, partial(shared_tokens, api, cluster.namespace, token_secret))
    else:
        raise SchedulerError("there is no token for the API; set ELASTUNE_TOKEN, or name a secret with --token-secret")
    # What cannot be read is said before anybody waits for a leader.
    tokens()
    Operator(api, OperatorSettings(cluster=cluster, tokens=tokens, **options)).run()


def shared_tokens(api: ClusterApi, namespace: str, secret: str) -> Tokens:
    """Return the tokens that the secret's values make; the first scheduler that finds none makes them."""
    kept = {
        **shared_secret(api, namespace, secret, ("token",), lambda: {"token": secrets.token_hex(24).encode()}),
        **shared_secret(api, namespace, secret, ("key",), lambda: {"key": secrets.token_hex(32).encode()}),
        **shared_secret(api, namespace, secret, ("versions",), lambda: {"versions": b"{}"}),
    }

    def save(changed: Secrets) -> None:
        values = {"token": changed.owner, "versions": json.dumps(dict(changed.versions))}
        data = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
        api.patch(SECRETS, namespace, secret, {"data": data})

    versions = json.loads(kept["versions"])
    return Tokens(Secrets(owner=kept["token"].decode(), key=kept["key"].decode(), versions=versions), save=save)
