"""`elastune operator`: from a file of settings and the environment to a running scheduler."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Any

from scheduler.errors import SchedulerError
from scheduler.kubernetes.server import Operator, OperatorSettings, patiently
from scheduler.kubernetes.shared_secret import shared_secret
from scheduler.log_lines import log_to_stderr
from trials.kubernetes.api import ClusterApi, KubernetesApi
from trials.kubernetes.settings import read_settings


def run_operator(settings: Path, *, token_secret: str | None = None, **options: Any) -> None:
    """Until SIGTERM. Raises InvalidClusterSettings, ClusterUnreachable or SchedulerError."""
    log_to_stderr()
    for noisy in ("httpx2", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # Its watches say themselves, in one line, what went wrong.
    logging.getLogger("kubernetes").setLevel(logging.CRITICAL)
    cluster = read_settings(settings)
    api = KubernetesApi.connect()
    token = os.environ.get("ELASTUNE_TOKEN")
    if not token and token_secret is not None:
        token = patiently(lambda: shared_token(api, cluster.namespace, str(token_secret)))
    if not token:
        raise SchedulerError(
            "no token is known that the API's callers must have; set ELASTUNE_TOKEN, or name a secret that exists with "
            "--token-secret"
        )
    Operator(api, OperatorSettings(cluster=cluster, token=token, **options)).run()


def shared_token(api: ClusterApi, namespace: str, secret: str) -> str:
    """The owner's token in the secret; the first scheduler that finds none makes one."""
    kept = shared_secret(api, namespace, secret, ("token",), lambda: {"token": secrets.token_hex(24).encode()})
    return kept["token"].decode()
