"""Before an uninstallation: delete all trials and studies, and wait for their scheduler to end them.

    python -m scheduler.kubernetes.clean --settings FILE

A finalizer that is left after that, because no scheduler runs, is taken away, so that nothing hangs.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

from scheduler.log_lines import log_to_stderr
from trials.errors import ClusterRefused
from trials.kubernetes.client.api import STUDIES, TRIALS, ClusterApi, Collection, KubernetesApi
from trials.kubernetes.names import Document
from trials.kubernetes.settings import read_settings

WAIT_SECONDS = 60.0

logger = logging.getLogger(__name__)


def clean(api: ClusterApi, namespaces: tuple[str, ...], *, wait_seconds: float = WAIT_SECONDS) -> None:
    """Delete all trials and studies, and after ``wait_seconds`` their finalizers; raise ClusterUnreachable."""
    for namespace in namespaces:
        for kind in (TRIALS, STUDIES):
            for document in _all(api, kind, namespace):
                api.delete(kind, namespace, document["metadata"]["name"])
    deadline = time.monotonic() + wait_seconds
    while any(_all(api, TRIALS, namespace) for namespace in namespaces) and time.monotonic() < deadline:
        time.sleep(0.5)
    for namespace in namespaces:
        for document in _all(api, TRIALS, namespace):
            name = document["metadata"]["name"]
            logger.warning("no scheduler ended trial %s/%s; removing it without one", namespace, name)
            api.patch(TRIALS, namespace, name, {"metadata": {"finalizers": None}})


def _all(api: ClusterApi, kind: Collection, namespace: str) -> list[Document]:
    try:
        items: list[Document] = api.list(kind, namespace).get("items") or []
    except ClusterRefused as error:
        if error.status == 404:
            # Its definition is gone already.
            return []
        raise
    return items


def main() -> int:
    log_to_stderr()
    parser = argparse.ArgumentParser(description="Delete all trials and studies of a cluster's scheduler.")
    parser.add_argument("--settings", type=Path, required=True)
    settings = read_settings(parser.parse_args().settings)
    clean(KubernetesApi.connect(), settings.all_namespaces)
    return 0


if __name__ == "__main__":
    sys.exit(main())
