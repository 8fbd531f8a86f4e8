"""`elastune operator`: from a file of settings and the environment to a running scheduler."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from scheduler.errors import SchedulerError
from scheduler.kubernetes.server import Operator, OperatorSettings
from trials.kubernetes.api import KubernetesApi
from trials.kubernetes.settings import read_settings


def run_operator(settings: Path, **options: Any) -> None:
    """Until SIGTERM. Raises InvalidClusterSettings, ClusterUnreachable or SchedulerError."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for noisy in ("httpx2", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # Its watches say themselves, in one line, what went wrong.
    logging.getLogger("kubernetes").setLevel(logging.CRITICAL)
    token = os.environ.get("ELASTUNE_TOKEN")
    if not token:
        raise SchedulerError("ELASTUNE_TOKEN is not set; it is the token that the API's callers must have")
    cluster = read_settings(settings)
    Operator(KubernetesApi.connect(), OperatorSettings(cluster=cluster, token=token, **options)).run()
